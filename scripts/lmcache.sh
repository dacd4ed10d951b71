#!/usr/bin/env bash
# Tries `baton store serve` with LMCache itself: its engine, its clients for Redis and its multiprocess cache, all on loopback.
# No GPU is needed. LMCache comes from PyPI with PyTorch for CUDA, which no version on PyPI does without: 6.2 GB, once.
# Usage: scripts/lmcache.sh
#   LMCACHE    a virtual environment that has the pinned releases [default: one is made and kept, in CARGO_TARGET_DIR or target]
#   PYTHON     the interpreter to make it with, 3.10 to 3.13 [default: python3]
#   BATON      the program to try [default: target/release/baton]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)

packages=('lmcache==0.5.6' 'redis==8.1.0' 'valkey-glide-sync==2.6.0')
target=${CARGO_TARGET_DIR:-$root/target}
BATON=${BATON:-$target/release/baton}
[ -x "$BATON" ] || {
    echo "lmcache: there is no program $BATON; build it, or name one as BATON" >&2
    exit 1
}
place=$(mktemp -d)
fresh=
trap 'rm -rf "$place" ${fresh:+"$fresh"}' EXIT

python=${LMCACHE:-$target/lmcache-venv}/bin/python
has() {
    [ -x "$python" ] && "$python" - "${packages[@]}" <<'EOF'
import importlib.metadata, sys
for wanted in sys.argv[1:]:
    name, release = wanted.split("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != release:
        sys.exit(f"lmcache: of {name} there is {found}; {release} is what is tried")
EOF
}
if [ -n "${LMCACHE:-}" ]; then
    has || exit 1
elif ! has 2>/dev/null; then
    mkdir -p "$target"
    # Made aside and moved in one go, so that one that was broken off is not taken for whole.
    fresh=$(mktemp -d "$target/lmcache-venv.XXXXXX")
    "${PYTHON:-python3}" -m venv "$fresh"
    "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    rm -rf "$target/lmcache-venv"
    mv -T "$fresh" "$target/lmcache-venv"
    fresh=
fi
"$python" "$here/lmcache/check.py" --baton "$BATON" --place "$place"
