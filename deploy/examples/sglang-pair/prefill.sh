#!/bin/sh
# On the prefill machine, which is also the front door:  prefill.sh ADDRESS_OF_THIS_MACHINE
set -eu
cd "$(dirname "$0")"
here=${1:?give the address of this machine, as the decode machine reaches it}
# The decode machine needs the same file beside its decode.sh.
[ -e cluster.key ] || (umask 077 && openssl rand -hex 32 > cluster.key)
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT INT TERM
python -m sglang.launch_server --model-path /models/model --host 0.0.0.0 --port 30000 --enable-metrics \
    --page-size 16 --incremental-streaming-output \
    --disaggregation-mode prefill --disaggregation-transfer-backend mooncake --disaggregation-bootstrap-port 8998 &
baton serve -c baton.toml --model /models/model &
baton node --name p0 --role prefill --conductor "http://$here:9090" --model /models/model --engine sglang \
    --url "http://$here:30000" --bootstrap-port 8998 --block-tokens 16 --pass-tokens 8192 --cluster-key cluster.key &
wait
