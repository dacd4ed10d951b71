#!/usr/bin/env bash
# Measures the RDMA transport beside perftest's ib_write_bw and ib_read_bw in the same virtual machine, and how
# long a mover takes to get over a cut rail. Needs the package perftest. The figures are those of a software
# device on an emulated processor: good for comparing the two, for nothing else.
# Usage: scripts/rdma/bench.sh
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
"$here/ready.sh"
command -v ib_write_bw >/dev/null || {
    echo "rdma bench: there is no ib_write_bw; as root: apt-get install perftest" >&2
    exit 1
}
export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# BATON_RDMA_TESTS names a binary that is built already.
tests=${BATON_RDMA_TESTS:-$("${CARGO:-cargo}" test --locked --release --package baton-transports --features rdma-dlopen \
    --test rdma --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\/rdma-[^"]*\)".*/\1/p' | tail -1)}
strip --strip-debug -o "$out/tests" "$tests"
cp "$here/rails.sh" "$out/"
cat >"$out/run.sh" <<'GUEST'
set -euo pipefail
ulimit -l unlimited
export RAILS=$OUT/rails.sh
. "$RAILS"
rails 2

perftest() { # PROGRAM BYTES ITERATIONS [OPTION...]
    local program=$1 bytes=$2 iterations=$3
    shift 3
    "$program" -d rxe_b0 -x 1 -m 4096 -s "$bytes" -n "$iterations" -F "$@" >/dev/null 2>&1 &
    sleep 2
    # The columns are bytes, iterations, peak and average in MiB/s.
    if "$program" -d rxe_a0 -x 1 -m 4096 -s "$bytes" -n "$iterations" -F "$@" 127.0.0.1 >"$OUT/said" 2>&1; then
        awk -v what="$program $((bytes >> 10)) KiB $*" \
            '$1 ~ /^[0-9]+$/ && NF >= 4 { print what ": average " $4 " MiB/s" }' "$OUT/said"
    else
        echo "$program $bytes $*: no figure: $(tail -1 "$OUT/said")"
        kill %% 2>/dev/null || true
    fi
    wait || true
}

for round in 1 2 3; do
    for program in ib_write_bw ib_read_bw; do
        perftest "$program" 65536 1024
        perftest "$program" 1048576 64
    done
    # Reads may wait for events instead of polling, which on one processor is faster.
    perftest ib_read_bw 65536 1024 -e
    perftest ib_read_bw 1048576 64 -e
    "$OUT/tests" --test-threads=1 --ignored --nocapture speed::bandwidth 2>&1 | grep ours
done
"$OUT/tests" --test-threads=1 --ignored --nocapture speed::registration 2>&1 | grep -E "registering|window of"
"$OUT/tests" --test-threads=1 --nocapture failover 2>&1 | grep batches
GUEST
"$here/guest.sh" "$out/run.sh" "$out" 600
