#!/usr/bin/env bash
# A real SGLang pair behind Baton on loopback, compared with one SGLang alone by scripts/engines/check.py, then ill-treated by
# scripts/engines/faults.py (CHECKS="check", "faults" or "check faults").
#
#   SGLANG="/path/to/python -m sglang.launch_server" MODEL=/folder/of/a/model scripts/engines/sglang.sh [options of check.py]
#   SGLANG="/path/to/python scripts/engines/sglang_cpu.py" ...            # on a machine without a GPU
#
# Starts three servers of the model, or uses those that run: ALONE=URL PREFILL=URL DECODE=URL BOOTSTRAP_PORT=PORT, and
# EVENTS=tcp://HOST:PORT REPLAY=tcp://HOST:PORT where the prefill server announces its cache. PYTHON has aiohttp; BATON is the
# program to try. SGLANG_FLAGS are given to every server, PREFILL_FLAGS and DECODE_FLAGS to one, FAULTS to faults.py. RANKS=2 gives
# both servers of the pair two data-parallel ranks, and each rank a node (on a CPU: SGLANG_CPU_OMP_THREADS_BIND="0|1"). The servers' transfer engines listen on all addresses:
# run it in a network namespace of its own (unshare -n, then ip link set lo up) where that matters.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/engines/pair.sh

BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-18998}
RANKS=${RANKS:-1}
# Prompts that wait for the other leg in vain are given up after 10 s: those of a server that was killed are many here.
export SGLANG_DISAGGREGATION_WAITING_TIMEOUT=${SGLANG_DISAGGREGATION_WAITING_TIMEOUT:-10}
export SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=${SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT:-10}

# serve NAME PORT [flags...]
serve() {
    local name=$1 port=$2
    shift 2
    [ -n "${SGLANG:-}" ] || fail "set SGLANG to the command that starts SGLang, or ALONE, PREFILL and DECODE to servers that run"
    # shellcheck disable=SC2086
    start "$name" $SGLANG --model-path "$MODEL" --served-model-name tiny --host 127.0.0.1 --port "$port" --page-size "$BLOCK" \
        --dtype float32 --enable-metrics --skip-server-warmup --context-length 4096 ${SGLANG_FLAGS:-} "$@"
}

[ -n "${ALONE:-}" ] || { serve alone 18100; ALONE=http://127.0.0.1:18100; }
ranks=()
[ "$RANKS" = 1 ] || ranks=(--dp-size "$RANKS")
if [ -z "${PREFILL:-}" ]; then
    EVENTS=tcp://127.0.0.1:18557 REPLAY=tcp://127.0.0.1:18567
    events="{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:18557\",\"replay_endpoint\":\"tcp://*:18567\"}"
    # shellcheck disable=SC2086
    serve prefill 18200 --disaggregation-mode prefill --disaggregation-transfer-backend mooncake \
        --disaggregation-bootstrap-port "$BOOTSTRAP_PORT" --kv-events-config "$events" "${ranks[@]}" ${PREFILL_FLAGS:-}
    PREFILL=http://127.0.0.1:18200
fi
if [ -z "${DECODE:-}" ]; then
    # shellcheck disable=SC2086
    serve decode 18300 --disaggregation-mode decode --disaggregation-transfer-backend mooncake "${ranks[@]}" ${DECODE_FLAGS:-}
    DECODE=http://127.0.0.1:18300
fi
answers "$ALONE/health" alone
answers "$PREFILL/health" prefill
answers "$DECODE/health" decode

front
# plus ENDPOINT RANK: where a rank announces, the server's own port being that of rank 0.
plus() { echo "${1%:*}:$((${1##*:} + $2))"; }

for rank in $(seq 0 $((RANKS - 1))); do
    follow=()
    [ -z "${EVENTS:-}" ] || follow=(--events "$(plus "$EVENTS" "$rank")" ${REPLAY:+--events-replay "$(plus "$REPLAY" "$rank")"})
    [ "$RANKS" = 1 ] || follow+=(--dp-rank "$rank")
    node "p$rank" prefill sglang "$PREFILL" --bootstrap-port "$BOOTSTRAP_PORT" "${follow[@]}"
    follow=()
    [ "$RANKS" = 1 ] || follow+=(--dp-rank "$rank")
    node "d$rank" decode sglang "$DECODE" "${follow[@]}"
done
checks sglang "$@"
