#!/usr/bin/env bash
# Runs the simulator's seeded fault runs: every test of baton-sim whose name contains "seeds", told by
# BATON_SEEDS how many seeds to try. A failing seed is printed by its test.
# Usage: scripts/seeds.sh N
set -euo pipefail

seeds=${1:-100}
case "$seeds" in
    '' | *[!0-9]* | 0)
        printf 'seeds: N is a whole number above zero, not "%s"; try: make seeds N=1000\n' "$seeds" >&2
        exit 2
        ;;
esac

log=$(mktemp)
trap 'rm -f "$log"' EXIT
BATON_SEEDS=$seeds "${CARGO:-cargo}" test --release --locked --package baton-sim seeds -- --nocapture 2>&1 | tee "$log"

# A filter that matches nothing passes, and would pass for ever after a test is renamed.
grep -q '^running [1-9]' "$log" || {
    echo 'seeds: no test of baton-sim has "seeds" in its name, so nothing ran' >&2
    exit 1
}
printf 'seeds: %s seeds, nothing wrong\n' "$seeds"
