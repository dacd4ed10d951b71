#!/bin/sh
# The whole service on this machine with the built-in engine on the CPU: http://127.0.0.1:8080
# MODEL=/path/to/a/hugging-face/folder serves a checkpoint instead of the small model from a seed.
set -eu
cd "$(dirname "$0")"
exec baton up -c baton.toml --nodes 1p1d ${MODEL:+--model "$MODEL"}
