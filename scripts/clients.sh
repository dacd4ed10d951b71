#!/usr/bin/env bash
# Prepares the Python that tests/clients runs under: a virtual environment with the packages of two
# clients, made once. Prints the path of its interpreter; says on standard error what is missing, and ends with 1.
# Usage: scripts/clients.sh
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${CARGO_TARGET_DIR:-$root/target}/clients-venv
python=$folder/bin/python
packages=('openai>=1.40,<3' 'redis>=5,<9')

say() { printf 'clients: %s\n' "$*" >&2; }

works() { [ -x "$python" ] && "$python" -c 'import openai, redis' 2>/dev/null; }

if ! works; then
    command -v python3 >/dev/null || {
        say "there is no python3; install Python 3.9 or newer"
        exit 1
    }
    mkdir -p "$(dirname "$folder")"
    # Made aside and moved in one go: two at a time do not disturb each other.
    fresh=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    python3 -m venv "$fresh" >&2 || {
        say "python3 -m venv does not work; install python3-venv"
        exit 1
    }
    "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" >&2 || {
        say "pip cannot install ${packages[*]}; check the network"
        exit 1
    }
    rm -rf "$folder"
    mv -T "$fresh" "$folder" || works
fi
printf '%s\n' "$python"
