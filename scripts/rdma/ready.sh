#!/usr/bin/env bash
# Sees to it that what the RDMA features and their tests need is there; installs only what is missing, and says
# so. The virtual machine is no part of this: fetch.sh unpacks it without installing anything.
# Usage: scripts/rdma/ready.sh
set -euo pipefail

say() { printf 'ready: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "the RDMA tests run on x86-64 Linux; see docs/rdma.md"
command -v dpkg-query >/dev/null ||
    fail "the RDMA tests are made of Debian packages; run them on Debian or Ubuntu, or in a container of one (docs/rdma.md)"

# To build with libibverbs (and to load it), to build the shim that loads it, and to run the guest.
wanted="libibverbs-dev librdmacm-dev pkg-config libclang1-14 libclang-common-14-dev cmake
    ibverbs-providers iproute2 kmod cpio xz-utils binutils"
missing=()
for package in $wanted; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "as root: apt-get install ${missing[*]}"
    # Without a terminal sudo must not wait for a password.
    as_root=(sudo -n)
fi
say "the RDMA tests lack ${missing[*]}: installing them with apt-get"
wait_for_lock=(-o DPkg::Lock::Timeout=300)
"${as_root[@]}" apt-get update -qq "${wait_for_lock[@]}" </dev/null >&2 ||
    fail "apt-get update failed; see above, and as root: apt-get install ${missing[*]}"
# Nothing that is here goes: where apt would have to remove a package, it fails and says which.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends --no-remove \
    "${wait_for_lock[@]}" "${missing[@]}" </dev/null >&2 ||
    fail "apt-get could not install ${missing[*]} without removing others; see above, and choose by hand"
