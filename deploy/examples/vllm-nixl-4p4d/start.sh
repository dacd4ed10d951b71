#!/bin/sh
# Checks, then starts what the units of this folder describe: GPUs 0 to 3 prefill, 4 to 7 decode.
set -eu
cd "$(dirname "$0")"
install -D -m 640 -o root -g baton baton.toml /etc/baton/baton.toml
install -m 644 ./*.service /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now baton-serve
for gpu in 0 1 2 3; do systemctl enable --now "vllm-prefill@$gpu" "baton-prefill@$gpu"; done
for gpu in 4 5 6 7; do systemctl enable --now "vllm-decode@$gpu" "baton-decode@$gpu"; done
# Engines take minutes to load a model; then this says what is wrong, if anything is.
for gpu in 0 1 2 3; do engines="${engines:-} --engine vllm=http://127.0.0.1:820$gpu,role=prefill,handoff=nixl,model=/models/model"; done
for gpu in 4 5 6 7; do engines="$engines --engine vllm=http://127.0.0.1:830$gpu,role=decode,handoff=nixl,model=/models/model"; done
until curl -fsS -o /dev/null http://127.0.0.1:8080/ready; do sleep 10; done
# shellcheck disable=SC2086
exec baton check -c /etc/baton/baton.toml $engines
