#!/usr/bin/env bash
# Tries `baton store serve --cold` with an S3 service that is not ours: moto's server from PyPI, or one that is named.
# Usage: scripts/s3.sh
#   S3         address of a service, http://HOST:PORT [default: moto is started on loopback]; with AWS_ACCESS_KEY_ID and
#              AWS_SECRET_ACCESS_KEY of a user that may make buckets
#   PYTHON     the interpreter to make a virtual environment with [default: python3]
#   BATON      the program to try [default: target/release/baton]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)

packages=('moto[server]==5.2.5' 'boto3==1.44.5' 'redis==8.1.0')
target=${CARGO_TARGET_DIR:-$root/target}
BATON=${BATON:-$target/release/baton}
[ -x "$BATON" ] || {
    echo "s3: there is no program $BATON; build it, or name one as BATON" >&2
    exit 1
}
python=$("$here/venv.sh" "$target/s3-venv" "${packages[@]}")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" "$here/s3/check.py" --baton "$BATON" --place "$place" ${S3:+--service "$S3"}
