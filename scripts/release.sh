#!/usr/bin/env bash
# Builds what a release is made of: an archive of the program, the wheels, a bill of materials (CycloneDX), and their SHA-256.
# Usage: scripts/release.sh [FOLDER]   [default: target/release-files]
#   PROFILE   cargo's profile [default: dist]
#   TARGET    "musl" for the static program alone: it runs on any Linux, and without RDMA, since a static program loads no library
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-${CARGO_TARGET_DIR:-target}/release-files}
profile=${PROFILE:-dist}
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-target}
machine=$(uname -m)
version=$(sed -n '/^\[workspace.package\]/,/^version/s/^version = "\(.*\)"/\1/p' Cargo.toml)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# Usage: archive PROGRAM SYSTEM
archive() {
    local name=baton-$version-$machine-$2 place
    place=$(mktemp -d)
    mkdir "$place/$name"
    cp "$1" LICENSE README.md CHANGELOG.md deploy/baton.toml deploy/baton.service "$place/$name/"
    "$1" man --out "$place/$name/man1" >/dev/null
    "$1" completions bash >"$place/$name/baton.bash"
    # The same files make the same archive.
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime='1980-01-01 UTC' -C "$place" -cf - "$name" |
        gzip -9n >"$folder/$name.tar.gz"
    rm -rf "$place"
}

if [ "${TARGET:-}" = musl ]; then
    make --no-print-directory static PROFILE="$profile" CARGO="$cargo"
    archive "$target/$machine-unknown-linux-musl/$profile/baton" linux-musl
else
    make --no-print-directory wheel PROFILE="$profile" CARGO="$cargo"
    archive "$target/$profile/baton" linux-gnu
    cp "$target/wheels"/baton_{serve,mooncake}-"$version"-*.whl "$folder/"
    "$cargo" cyclonedx --format json --spec-version 1.5 --features rdma-dlopen --override-filename baton.cdx
    mv baton.cdx.json "$folder/baton-$version.cdx.json"
    # It writes one beside each crate; the program's has all that is in it.
    git ls-files '*Cargo.toml' | while read -r manifest; do rm -f "$(dirname "$manifest")/baton.cdx.json"; done
fi
(cd "$folder" && rm -f SHA256SUMS && sha256sum -- * >SHA256SUMS)
ls -l "$folder"
