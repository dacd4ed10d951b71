#!/usr/bin/env bash
# Builds the package `mooncake` and tries it as engines use it: two processes, a store that is killed. Then installs the wheel of
# the program, and streams an answer from it.
# Usage: scripts/python.sh
#   PYTHON   the interpreter [default: python3]
#   BATON    the program that serves the store [default: built here]
set -euo pipefail
cd "$(dirname "$0")/.."

cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
if [ -z "${BATON:-}" ]; then
    "$cargo" build --locked --workspace --bin baton
    BATON=$target/debug/baton
fi
export BATON
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
"$python" scripts/wheel/build.py mooncake --debug --into "$built" >/dev/null
# A wheel is an archive of what is to lie in one folder of the search path.
"$python" -m zipfile -e "$built"/*.whl "$built/package"
PYTHONPATH=$built/package PYTHONDONTWRITEBYTECODE=1 "$python" -W error::ResourceWarning -m unittest discover -s src/python/tests/python "$@"
wheel=$("$python" scripts/wheel/build.py serve --program "$BATON" --into "$built")
# An unoptimised build on a machine that runs other tests: it has longer than a user waits.
"$python" scripts/wheel/check.py "$wheel" 60
