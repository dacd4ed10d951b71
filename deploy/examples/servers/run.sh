#!/bin/sh
# One process in front of the servers of servers.toml: http://THIS_MACHINE:8080. MODEL is their Hugging Face folder, for its tokenizer.
set -eu
cd "$(dirname "$0")"
exec baton serve -c baton.toml --servers servers.toml --each '--engine vllm --pass-tokens 8192' --model "${MODEL:-/models/model}"
