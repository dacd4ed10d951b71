#!/bin/sh
# On the decode machine, with the cluster.key of the other:  decode.sh ADDRESS_OF_THIS_MACHINE ADDRESS_OF_THE_PREFILL_MACHINE
set -eu
cd "$(dirname "$0")"
here=${1:?give the address of this machine}
front=${2:?give the address of the prefill machine}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT INT TERM
python -m sglang.launch_server --model-path /models/model --host 0.0.0.0 --port 30000 --enable-metrics \
    --page-size 16 --incremental-streaming-output \
    --disaggregation-mode decode --disaggregation-transfer-backend mooncake &
baton node --name d0 --role decode --conductor "http://$front:9090" --model /models/model --engine sglang \
    --url "http://$here:30000" --block-tokens 16 --pass-tokens 8192 --cluster-key cluster.key &
wait
