#!/usr/bin/env bash
# Serves by two nodes whose KV goes by RDMA, in the virtual machine (see guest.sh): answers must be those of a node that
# does both, a rail is cut in the middle, and the software devices themselves say how many packets went by them.
# Usage: scripts/rdma/service.sh [BATON]     a baton that is built with rdma-dlopen; without, one is built
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
"$here/ready.sh"
export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
baton=${1:-}
if [ -z "$baton" ]; then
    baton=$("$cargo" build --locked --package baton --features rdma-dlopen --bin baton --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/baton\)".*/\1/p' | tail -1)
fi
[ -x "$baton" ] || {
    echo "rdma: baton did not build with the feature rdma-dlopen; see above" >&2
    exit 1
}
strip --strip-debug -o "$out/baton" "$baton"
cp "$here/rails.sh" "$here/service-guest.sh" "$out/"
"$here/guest.sh" "$out/service-guest.sh" "$out" "${BATON_GUEST_LIMIT_S:-400}" || {
    tail -n 25 "$out"/*.log >&2
    exit 1
}
