# What service.sh runs in the virtual machine.
set -euo pipefail
ulimit -l unlimited
export PATH=$OUT:$PATH RUST_BACKTRACE=1
. "$OUT/rails.sh"
rails 2

say() { echo "guest: $* after $(cut -d' ' -f1 /proc/uptime) s"; }

# Packets that the RDMA devices have sent so far.
packets() {
    local sum=0 of
    for of in /sys/class/infiniband/rxe_*/ports/1/hw_counters/sent_pkts; do sum=$((sum + $(<"$of"))); done
    echo "$sum"
}

# Usage: serve PORT NAME: a front door on PORT, its nodes at the port after that.
serve() {
    printf '%s\n' '[scheduler]' 'block_tokens = 16' 'local_prefill = false' '[[scheduler.classes]]' 'name = "slow"' \
        'ttft_us = 3_600_000_000' 'tbt_us = 60_000_000' >"$TMPDIR/$2.toml"
    baton serve -c "$TMPDIR/$2.toml" --listen "127.0.0.1:$1" --control "127.0.0.1:$(($1 + 1))" >"$OUT/$2.log" 2>&1 &
}

# Usage: node PORT NAME ROLE ADDRESS: a node on a host of its own, as far as it knows.
node() {
    baton node --conductor "http://127.0.0.1:$(($1 + 1))" --name "$2" --host "$2" --role "$3" --kv-listen "$4:0" \
        --ssd-blocks 0 >"$OUT/$2.log" 2>&1 &
}

ready() {
    for _ in $(seq 120); do
        curl -sf "http://127.0.0.1:$1/ready" >/dev/null && return
        # A node that ended will not be there.
        [ "$(jobs -r | wc -l)" -eq 5 ] || break
        sleep 0.5
    done
    say "nothing is ready at port $1"
    return 1
}

# Usage: ask PORT NUMBER: the answer to prompt NUMBER, each another one of some 200 tokens.
ask() {
    local prompt
    prompt=$(printf "$2 and %s, " $(seq "$2" "$(($2 + 24))"))
    curl -s --max-time 100 -H 'content-type: application/json' "http://127.0.0.1:$1/v1/completions" \
        -d "{\"prompt\":\"$prompt\",\"max_tokens\":6,\"temperature\":0,\"return_token_ids\":true}" >"$TMPDIR/answer"
    # What differs between two answers of the same words: their names and times.
    grep -o '"choices":.*' "$TMPDIR/answer" | sed 's/"usage".*//' || cat "$TMPDIR/answer"
}

serve 8080 door
node 8080 p prefill 10.0.0.1
node 8080 d decode 10.0.0.2
serve 8090 alone-door
node 8090 alone both 127.0.0.1
ready 8080
ready 8090
say "both are ready"
grep -h 'KV goes by' "$OUT/p.log" "$OUT/d.log"

# Usage: equal FIRST LAST
equal() {
    local at answer wanted
    for at in $(seq "$1" "$2"); do
        answer=$(ask 8080 "$at")
        wanted=$(ask 8090 "$at")
        [[ $answer == *'"choices"'* && $answer == "$wanted" ]] || {
            say "prompt $at was answered otherwise: $answer, not $wanted"
            return 1
        }
    done
}

before=$(packets)
equal 1 8
by_rdma=$(($(packets) - before))
say "8 answers are those of one node, $by_rdma packets went by RDMA"
# Each token of a prompt has a KiB of KV at least, and a packet 4 KiB at most.
[ "$by_rdma" -ge $((8 * 200 / 4)) ]

ip link set a1 down
equal 9 16
say "8 answers without the second rail are those of one node"
rail_up 1
sleep 2
before=$(packets)
equal 17 24
by_rdma=$(($(packets) - before))
say "8 more with it, $by_rdma packets went by RDMA"
[ "$by_rdma" -ge $((8 * 200 / 4)) ]
curl -sf http://127.0.0.1:8080/metrics | grep -E '^baton_(failures|leg_failures)' || true
kill %1 %2 %3 %4 %5
wait || true
