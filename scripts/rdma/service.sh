#!/usr/bin/env bash
# Serves over RDMA in the virtual machine: a conductor, a prefill node on one end of two rails and a decode node on
# the other. Every answer must be the one that a node alone gives on this machine, every byte of KV must have gone by
# RDMA, and answers must go on when a rail loses every packet. About two minutes once it is built.
# Usage: scripts/rdma/service.sh       with BATON=FILE: a binary that is built already, with RDMA
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
"$here/ready.sh"
export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}
if [ -z "${BATON:-}" ]; then
    "${CARGO:-cargo}" build --release --locked --package baton --bin baton --features rdma-dlopen
    BATON=${CARGO_TARGET_DIR:-target}/release/baton
fi
out=$(mktemp -d)
alone=
trap '[ -z "$alone" ] || kill "$alone" 2>/dev/null || true; rm -rf "$out"' EXIT
strip --strip-debug -o "$out/baton" "$BATON"
cp "$here/rails.sh" "$out/"

# Usage: ask PORT NUMBER: the text of an answer; each number has a prompt of its own, of some 200 tokens.
cat >"$out/ask.sh" <<'ASK'
ask() {
    local words
    words=$(seq -s ' ' "$2" "$(($2 + 60))")
    curl -sS --max-time 120 --retry 3 -w "\n" "http://127.0.0.1:$1/v1/completions" -H 'content-type: application/json' \
        -d "{\"prompt\":\"$words\",\"max_tokens\":12,\"temperature\":0}" |
        sed -n 's/.*"text":\(".*"\),"logprobs":null.*/\1/p;/"error"/p'
}
until_ready() { # PORT SECONDS
    local i
    for ((i = 0; i < $2; i++)); do
        curl -sf --max-time 30 -o /dev/null "http://127.0.0.1:$1/ready" && return
        sleep 1
    done
    echo "rdma service: not ready after $2 s" >&2
    return 1
}
ASK
. "$out/ask.sh"

"$out/baton" up --nodes 1b --listen 127.0.0.1:17100 --ssd-blocks 0 >"$out/alone.log" 2>&1 &
alone=$!
until_ready 17100 60
for n in $(seq 1 10); do ask 17100 "$n"; done >"$out/expected"
kill -INT "$alone" && wait "$alone"
alone=

cat >"$out/run.sh" <<'GUEST'
set -euo pipefail
ulimit -l unlimited
cd "$OUT"
. ./rails.sh
. ./ask.sh
rails 2
printf '[scheduler]\nblock_tokens = 16\nlocal_prefill = false\nadmission = "none"\n' >"$TMPDIR/c.toml"
./baton serve --config "$TMPDIR/c.toml" --listen 127.0.0.1:17000 --control 127.0.0.1:17001 >serve.log 2>&1 &
node() { # NAME ROLE ADDRESS DEVICES
    ./baton node --config "$TMPDIR/c.toml" --name "$1" --role "$2" --conductor http://127.0.0.1:17001 --host "$1" \
        --kv-listen "$3:0" --rdma-devices "$4" --blocks 512 --dram-blocks 0 --ssd-blocks 0 >"$1.log" 2>&1 &
}
node p0 prefill 10.0.0.1 rxe_a0,rxe_a1
node d0 decode 10.0.0.2 rxe_b0,rxe_b1
until_ready 17000 120
echo "guest: ready after $(cut -d' ' -f1 /proc/uptime) s"
for n in $(seq 1 6); do ask 17000 "$n"; done >answers
tc qdisc add dev a0 root netem loss 100%
for n in $(seq 7 10); do ask 17000 "$n"; done >>answers
sleep 3 # until the nodes have reported
curl -sS http://127.0.0.1:17000/metrics | grep '^baton_kv_sent_bytes_total\|^baton_requests_f' | tee sent
for rail in a0 a1; do
    echo "rxe_$rail: $(cat /sys/class/infiniband/rxe_$rail/ports/1/hw_counters/sent_pkts) packets sent"
done
echo "guest: done after $(cut -d' ' -f1 /proc/uptime) s"
GUEST
status=0
"$here/guest.sh" "$out/run.sh" "$out" "${BATON_GUEST_LIMIT_S:-500}" || status=$?
grep -h 'KV goes by' "$out"/?0.log || true
if [ "$status" -ne 0 ] || ! diff "$out/expected" "$out/answers" || [ "$(wc -l <"$out/answers")" -ne 10 ]; then
    echo "rdma service: the answers above differ from those of a node alone, or did not come; logs:" >&2
    tail -n 20 "$out"/*.log >&2
    exit 1
fi
grep -q 'node="p0",way="rdma"' "$out/sent" || {
    echo "rdma service: no KV went by RDMA" >&2
    exit 1
}
if grep -q 'way="tcp"\|way="shm"' "$out/sent"; then
    echo "rdma service: some KV did not go by RDMA; see above" >&2
    exit 1
fi
echo "rdma service: 10 of 10 answers as of a node alone, all KV by RDMA"
