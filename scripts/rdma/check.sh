#!/usr/bin/env bash
# Lints the code that only the RDMA features compile: without headers of libibverbs, for what is shipped looks for it
# when it runs.
# Usage: scripts/rdma/check.sh [OTHER_FEATURES]: these are linted in the same pass, with RDMA or without.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ] || ! command -v dpkg-query >/dev/null; then
    echo "rdma: not linted here, for the features are built from Debian packages on x86-64 (docs/rdma.md)" >&2
    features=${1:-}
else
    "$here/ready.sh"
    export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}
    features=rdma-dlopen${1:+,$1}
fi
# All of the workspace, or the crates from elsewhere would be checked once more, with other features.
"$cargo" clippy --locked --workspace --features "$features" --all-targets -- -D warnings
