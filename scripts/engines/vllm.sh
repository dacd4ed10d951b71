#!/usr/bin/env bash
# A real vLLM pair behind Baton, over NIXL or (HANDOFF=mooncake) Mooncake's connector, on loopback, compared with one vLLM alone by
# scripts/engines/check.py, then ill-treated by scripts/engines/faults.py (CHECKS="check", "faults" or "check faults").
#
#   VLLM=/path/to/vllm MODEL=/folder/of/a/model scripts/engines/vllm.sh [options of check.py]
#
# Starts three servers of the model, or uses those that run: ALONE=URL PREFILL=URL DECODE=URL, and EVENTS=tcp://HOST:PORT
# REPLAY=tcp://HOST:PORT where the prefill server announces its cache. PYTHON has aiohttp; BATON is the program to try.
# CONNECTOR_MODULE=module and CONNECTOR=Name take another connector than vLLM's own, which keeps a core busy each; VLLM_FLAGS
# are given to every server, FAULTS to faults.py. Servers listen on all addresses for announcements and Mooncake's bootstrap:
# run it in a network namespace of its own (unshare -n, then ip link set lo up) where that matters.
# A small random model of a few million weights is enough, and a CPU build of vLLM; there VLLM_ENABLE_V1_MULTIPROCESSING=0 and
# VLLM_FLAGS="--distributed-executor-backend uni" make one process of an engine and its worker, which otherwise wait for each other by turning.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/engines/pair.sh

HANDOFF=${HANDOFF:-nixl}
case $HANDOFF in
    nixl) name=NixlConnector extra={} ;;
    mooncake) name=MooncakeConnector extra='{"mooncake_protocol":"tcp","num_workers":2}' ;;
    *) fail "HANDOFF is nixl or mooncake" ;;
esac
CONNECTOR=${CONNECTOR:-$name}

# serve NAME PORT [flags...]
serve() {
    local name=$1 port=$2
    shift 2
    [ -x "${VLLM:-}" ] || fail "set VLLM to the vllm program, or ALONE, PREFILL and DECODE to servers that run"
    start "$name" env "VLLM_MOONCAKE_BOOTSTRAP_PORT=18998" "VLLM_NIXL_SIDE_CHANNEL_PORT=$((port + 400))" \
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=${VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT:-30}" \
        "$VLLM" serve "$MODEL" --served-model-name tiny --host 127.0.0.1 --port "$port" --enforce-eager --block-size "$BLOCK" \
        --max-model-len 4096 --dtype float32 --enable-prompt-tokens-details ${VLLM_FLAGS:-} "$@"
}

connector() {
    local module=
    [ -z "${CONNECTOR_MODULE:-}" ] || module="\"kv_connector_module_path\":\"$CONNECTOR_MODULE\","
    printf '{"kv_connector":"%s",%s"kv_role":"%s","kv_buffer_device":"cpu","kv_load_failure_policy":"fail","kv_connector_extra_config":%s}' \
        "$CONNECTOR" "$module" "$1" "$extra"
}

export UCX_TLS=${UCX_TLS:-tcp} UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
[ -n "${ALONE:-}" ] || { serve alone 18100; ALONE=http://127.0.0.1:18100; }
if [ -z "${PREFILL:-}" ]; then
    EVENTS=tcp://127.0.0.1:18557 REPLAY=tcp://127.0.0.1:18567
    events="{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:18557\",\"replay_endpoint\":\"tcp://*:18567\"}"
    serve prefill 18200 --kv-transfer-config "$(connector kv_producer)" --kv-events-config "$events"
    PREFILL=http://127.0.0.1:18200
fi
if [ -z "${DECODE:-}" ]; then
    serve decode 18300 --kv-transfer-config "$(connector kv_consumer)"
    DECODE=http://127.0.0.1:18300
fi
answers "$ALONE/health" alone
answers "$PREFILL/health" prefill
answers "$DECODE/health" decode

front
follow=()
[ -z "${EVENTS:-}" ] || follow=(--events "$EVENTS" ${REPLAY:+--events-replay "$REPLAY"})
[ "$HANDOFF" = nixl ] || follow+=(--bootstrap-url "${BOOTSTRAP:-http://127.0.0.1:18998}")
node p0 prefill vllm "$PREFILL" --handoff "$HANDOFF" "${follow[@]}"
node d0 decode vllm "$DECODE" --handoff "$HANDOFF"
checks vllm "$@"
