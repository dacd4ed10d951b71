#!/usr/bin/env bash
# Tries `baton mooncake` with Mooncake itself: its master, its clients, its engines, all on loopback (docs/mooncake.md).
# Usage: scripts/mooncake.sh
#   MOONCAKE   a virtual environment that has the pinned release [default: one is made, and the package fetched from PyPI]
#   PYTHON     the interpreter to make it with [default: python3]
#   BATON      the program to try [default: built here]
set -euo pipefail
cd "$(dirname "$0")/.."

package=mooncake-transfer-engine-non-cuda release=0.3.13.post1
cargo=${CARGO:-cargo}
if [ -z "${BATON:-}" ]; then
    "$cargo" build --locked --package baton --bin baton --features mooncake
    BATON=${CARGO_TARGET_DIR:-target}/debug/baton
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
if [ -z "${MOONCAKE:-}" ]; then
    MOONCAKE=$place/venv
    "${PYTHON:-python3}" -m venv "$MOONCAKE"
    "$MOONCAKE/bin/pip" install --quiet --disable-pip-version-check "$package==$release"
fi
found=$("$MOONCAKE/bin/python" -c "import importlib.metadata as m; print(m.version('$package'))") || {
    echo "mooncake: $MOONCAKE has no $package; install $package==$release there, or leave MOONCAKE unset" >&2
    exit 1
}
if [ "$found" != "$release" ]; then
    echo "mooncake: $MOONCAKE has $package $found; $release is what is spoken" >&2
    exit 1
fi
"$MOONCAKE/bin/python" scripts/mooncake/check.py --baton "$BATON" --bin "$MOONCAKE/bin" --place "$place"
