#!/usr/bin/env bash
# Sees to it that what a make target needs is there; installs only what is missing, and says so.
# Usage: scripts/ready.sh compiler|lints
set -euo pipefail

cargo=${CARGO:-cargo}

say() { printf 'ready: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

need_cargo() {
    command -v "$cargo" >/dev/null && return
    fail "there is no '$cargo'; install Rust 1.95 or newer (https://rustup.rs) and try again"
}

# The allocator and the linker need a C compiler.
need_cc() {
    command -v cc >/dev/null && return
    command -v apt-get >/dev/null || fail "there is no C compiler 'cc'; install gcc and libc headers and try again"
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "there is no C compiler 'cc'; as root: apt-get install gcc libc6-dev"
        # Without a terminal sudo must not wait for a password.
        as_root=(sudo -n)
    fi
    say "there is no C compiler 'cc': installing gcc and libc6-dev with apt-get"
    "${as_root[@]}" apt-get update -qq </dev/null >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev \
        </dev/null >&2
}

need_component() {
    "$cargo" "$1" --version >/dev/null 2>&1 && return
    command -v rustup >/dev/null || fail "there is no 'cargo $1'; install $2 for this toolchain and try again"
    say "there is no 'cargo $1': adding $2 with rustup"
    rustup component add "$2" </dev/null >&2
}

need_cargo
case "${1:-}" in
    compiler) need_cc ;;
    lints)
        need_component fmt rustfmt
        need_component clippy clippy
        ;;
    *) fail "usage: scripts/ready.sh compiler|lints" ;;
esac
