#!/usr/bin/env bash
# Compiles a crate of the workspace so that its branches are counted, for `make fuzz` (RUSTC_WORKSPACE_WRAPPER).
set -euo pipefail

counted=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters)

# A program that links counted code has to link what takes the counts: tests do, build scripts and programs do not.
case " $* " in
*" --crate-name baton_fuzz "*) exec "$@" ;;
*" --test "* | *" --crate-type lib "*) exec "$@" "${counted[@]}" ;;
*) exec "$@" ;;
esac
