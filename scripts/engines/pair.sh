# Sourced by vllm.sh and sglang.sh: servers in the background that can be killed and started again, Baton in front of a
# pair of them, and the checks. Each server NAME has, in one folder, its command NAME.sh, its process group NAME.pid and
# its log NAME.log (LOG=FOLDER names the folder); scripts/engines/faults.py works on those.

fail() { echo "engines: $*" >&2; exit 1; }
BATON=${BATON:-target/release/baton}
[ -x "$BATON" ] || fail "$BATON is not there; run: cargo build --release"
[ -d "${MODEL:-}" ] || fail "set MODEL to the folder of a model that the engine can serve"
BLOCK=${BLOCK:-32}
PYTHON=${PYTHON:-python3}
log=${LOG:-$(mktemp -d)}
started=()

stop() {
    local name
    for name in "${started[@]}"; do kill -- "-$(cat "$log/$name.pid")" 2>/dev/null || true; done
    sleep 1
    for name in "${started[@]}"; do kill -9 -- "-$(cat "$log/$name.pid")" 2>/dev/null || true; done
}
trap stop EXIT

# start NAME command...: a process group of its own in the background.
start() {
    local name=$1
    shift
    { printf 'exec'; printf ' %q' "$@"; echo; } >"$log/$name.sh"
    echo "engines: starting $name; its log is $log/$name.log"
    setsid bash "$log/$name.sh" >>"$log/$name.log" 2>&1 </dev/null &
    echo $! >"$log/$name.pid"
    started+=("$name")
}

# answers URL NAME: waits for a server.
answers() {
    for _ in $(seq 600); do
        curl -fsS -m 20 -o /dev/null "$1" 2>/dev/null && return
        sleep 1
    done
    tail -20 "$log/$2.log" >&2 || true
    fail "$2 does not answer at $1"
}

# front: Baton's front door and conductor.
front() {
    cat >"$log/baton.toml" <<TOML
[scheduler]
block_tokens = $BLOCK
fetch = false
[[scheduler.classes]]
name = "standard"
ttft_us = 60_000_000
tbt_us = 5_000_000
TOML
    start serve "$BATON" serve -c "$log/baton.toml" --listen 127.0.0.1:18080 --control 127.0.0.1:18090 --model "$MODEL"
}

# node NAME ROLE ENGINE URL [options...]: Baton's node beside a server.
node() {
    local name=$1 role=$2 engine=$3 url=$4
    shift 4
    start "$name" "$BATON" node --conductor http://127.0.0.1:18090 --model "$MODEL" --block-tokens "$BLOCK" \
        --engine "$engine" --name "$name" --role "$role" --url "$url" "$@"
}

# checks ENGINE [options of check.py...]: what CHECKS names, of check and faults; servers that were not started here are not killed.
checks() {
    local engine=$1 which faults=0 bad=0
    shift
    answers http://127.0.0.1:18080/ready serve
    for which in ${CHECKS:-check faults}; do
        case $which in
            check)
                "$PYTHON" scripts/engines/check.py --baton http://127.0.0.1:18080 --alone "$ALONE" --kind "$engine" \
                    --engine "$PREFILL" --engine "$DECODE" "$@" || bad=1 ;;
            faults)
                "$PYTHON" scripts/engines/faults.py --baton http://127.0.0.1:18080 --alone "$ALONE" --kind "$engine" \
                    --prefill "$PREFILL" --decode "$DECODE" --run "$log" ${FAULTS:-} || bad=1 ;;
            *) fail "CHECKS names check, faults or both" ;;
        esac
    done
    return "$bad"
}
