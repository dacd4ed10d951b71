#!/usr/bin/env bash
# Builds the tests of the RDMA transport and runs them in a virtual machine with two rails: all of them loading
# libibverbs, as what is shipped does, and a part of them linked to it, for the code is the same.
# Usage: scripts/rdma/test.sh [FILTER...]     with filters: both run what they name
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
"$here/ready.sh"
# rdma-sys needs this version exactly.
export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Usage: built FEATURE: builds the tests and puts them into the folder that the guest sees.
built() {
    local path
    path=$("$cargo" test --locked --workspace --features "$1" --test rdma --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/rdma-[^"]*\)".*/\1/p' | tail -1)
    [ -n "$path" ] || {
        echo "rdma: the tests did not build with the feature $1; see above" >&2
        exit 1
    }
    strip --strip-debug -o "$out/tests-$1" "$path"
}

for feature in ${BATON_RDMA_FEATURES:-rdma-dlopen rdma}; do
    built "$feature"
done
cp "$here/rails.sh" "$out/"
for feature in rdma rdma-dlopen; do
    printf '%s\n' "$@" >"$out/filters-$feature"
done
[ $# -gt 0 ] || printf '%s\n' basics ends windows >"$out/filters-rdma"
cat >"$out/run.sh" <<'GUEST'
set -euo pipefail
ulimit -l unlimited
export RAILS=$OUT/rails.sh RUST_BACKTRACE=1
. "$RAILS"
rails 2
for tests in "$OUT"/tests-*; do
    echo "guest: ${tests##*/} after $(cut -d' ' -f1 /proc/uptime) s"
    mapfile -t filters <"$OUT/filters-${tests##*/tests-}"
    [ -n "${filters[0]}" ] || filters=()
    "$tests" --test-threads=1 --skip promises:: "${filters[@]}" 2>&1 | tee "$OUT/${tests##*/}.log"
    # A lane in which nothing runs proves nothing.
    grep -q '^test result: ok. [1-9]' "$OUT/${tests##*/}.log"
done
echo "guest: done after $(cut -d' ' -f1 /proc/uptime) s"
GUEST
"$here/guest.sh" "$out/run.sh" "$out" "${BATON_GUEST_LIMIT_S:-400}"
