#!/usr/bin/env bash
# Makes a virtual environment with packages from PyPI, unless it is there, and prints the path of its interpreter.
# Usage: scripts/venv.sh FOLDER PACKAGE...
#   PYTHON     the interpreter to make it with [default: python3]
set -euo pipefail
venv=$1
shift
# What it is made of is written last: one that was broken off, or is of other releases, is made anew.
if [ "$(cat "$venv/made-of" 2>/dev/null)" != "$*" ]; then
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
    printf '%s\n' "$*" >"$venv/made-of"
fi
printf '%s\n' "$venv/bin/python"
