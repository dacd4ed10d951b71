#!/usr/bin/env bash
# A real vLLM pair behind Baton, over NIXL or (HANDOFF=mooncake) Mooncake's connector, on loopback, compared with one vLLM alone by scripts/engines/check.py.
#
#   VLLM=/path/to/vllm MODEL=/folder/of/a/model scripts/engines/vllm.sh [options of check.py]
#
# Starts three servers of the model, or uses those that run: ALONE=URL PREFILL=URL DECODE=URL, and EVENTS=tcp://HOST:PORT
# REPLAY=tcp://HOST:PORT where the prefill server announces its cache. PYTHON has aiohttp; BATON is the program to try.
# CONNECTOR_MODULE=module and CONNECTOR=Name take another connector than vLLM's own, which keeps a core busy each; VLLM_FLAGS
# are given to every server. Servers listen on all addresses for announcements and Mooncake's bootstrap: run it in a network
# namespace of its own (unshare -n, then ip link set lo up) where that matters.
# A small random model of a few million weights is enough, and a CPU build of vLLM.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "engines: $*" >&2; exit 1; }
BATON=${BATON:-target/release/baton}
[ -x "$BATON" ] || fail "$BATON is not there; run: cargo build --release"
[ -d "${MODEL:-}" ] || fail "set MODEL to the folder of a model that vLLM can serve"
BLOCK=${BLOCK:-32}
HANDOFF=${HANDOFF:-nixl}
case $HANDOFF in
    nixl) name=NixlConnector extra={} ;;
    mooncake) name=MooncakeConnector extra='{"mooncake_protocol":"tcp","num_workers":2}' ;;
    *) fail "HANDOFF is nixl or mooncake" ;;
esac
CONNECTOR=${CONNECTOR:-$name}
log=$(mktemp -d)
pids=()
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
}
trap stop EXIT

# serve NAME PORT [flags...]: a server in the background.
serve() {
    local name=$1 port=$2
    shift 2
    [ -x "${VLLM:-}" ] || fail "set VLLM to the vllm program, or ALONE, PREFILL and DECODE to servers that run"
    echo "engines: starting $name on $port; its log is $log/$name.log"
    "$VLLM" serve "$MODEL" --served-model-name tiny --host 127.0.0.1 --port "$port" --enforce-eager --block-size "$BLOCK" \
        --max-model-len 4096 --dtype float32 --enable-prompt-tokens-details ${VLLM_FLAGS:-} "$@" >"$log/$name.log" 2>&1 &
    pids+=($!)
}

# answers URL NAME: waits for a server.
answers() {
    for _ in $(seq 600); do
        curl -fsS -m 2 -o /dev/null "$1" 2>/dev/null && return
        sleep 1
    done
    tail -20 "$log/$2.log" >&2 || true
    fail "$2 does not answer at $1"
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
    VLLM_MOONCAKE_BOOTSTRAP_PORT=18998 VLLM_NIXL_SIDE_CHANNEL_PORT=18600 serve prefill 18200 --kv-transfer-config "$(connector kv_producer)" --kv-events-config "$events"
    PREFILL=http://127.0.0.1:18200
fi
if [ -z "${DECODE:-}" ]; then
    VLLM_NIXL_SIDE_CHANNEL_PORT=18601 serve decode 18300 --kv-transfer-config "$(connector kv_consumer)"
    DECODE=http://127.0.0.1:18300
fi
answers "$ALONE/health" alone
answers "$PREFILL/health" prefill
answers "$DECODE/health" decode

cat >"$log/baton.toml" <<TOML
[scheduler]
block_tokens = $BLOCK
fetch = false
[[scheduler.classes]]
name = "standard"
ttft_us = 60_000_000
tbt_us = 5_000_000
TOML
"$BATON" serve -c "$log/baton.toml" --listen 127.0.0.1:18080 --control 127.0.0.1:18090 --model "$MODEL" >"$log/serve.log" 2>&1 &
pids+=($!)
node=("$BATON" node --conductor http://127.0.0.1:18090 --model "$MODEL" --engine vllm --handoff "$HANDOFF" --block-tokens "$BLOCK")
follow=()
[ -z "${EVENTS:-}" ] || follow=(--events "$EVENTS" ${REPLAY:+--events-replay "$REPLAY"})
[ "$HANDOFF" = nixl ] || follow+=(--bootstrap-url "${BOOTSTRAP:-http://127.0.0.1:18998}")
"${node[@]}" --name p0 --role prefill --url "$PREFILL" "${follow[@]}" >"$log/p0.log" 2>&1 &
pids+=($!)
"${node[@]}" --name d0 --role decode --url "$DECODE" >"$log/d0.log" 2>&1 &
pids+=($!)
answers http://127.0.0.1:18080/ready serve

"${PYTHON:-python3}" scripts/engines/check.py --baton http://127.0.0.1:18080 --alone "$ALONE" --engine "$PREFILL" --engine "$DECODE" "$@"
