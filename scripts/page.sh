#!/usr/bin/env bash
# Tries the page at `/` in a real headless Chromium: keyboard, both colour schemes, phone width, keys, policy, chat, a
# service that goes away; and measures first paint and what five viewers cost the conductor.
# Usage: scripts/page.sh
#   CHROMIUM   the browser to use [default: chromium on the PATH]
#   SHOTS      folder for screenshots [default: none are kept]
#   PYTHON     the interpreter to make a virtual environment with [default: python3]
#   BATON      the program to try [default: target/release/baton]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)

packages=('playwright==1.65.2' 'axe-playwright-python==0.1.8')
target=${CARGO_TARGET_DIR:-$root/target}
BATON=${BATON:-$target/release/baton}
[ -x "$BATON" ] || {
    echo "page: there is no program $BATON; build it, or name one as BATON" >&2
    exit 1
}
CHROMIUM=${CHROMIUM:-$(command -v chromium || true)}
[ -x "$CHROMIUM" ] || {
    echo "page: there is no chromium; install it, or name one as CHROMIUM" >&2
    exit 1
}
python=$("$here/venv.sh" "$target/page-venv" "${packages[@]}")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" "$here/page/check.py" --baton "$BATON" --chromium "$CHROMIUM" --place "$place" ${SHOTS:+--shots "$SHOTS"}
