#!/usr/bin/env bash
# Brings a virtual machine with RDMA into a cache folder: Debian's stock kernel with its software RDMA driver
# (rxe), qemu and a static busybox. Nothing is installed: packages are downloaded and unpacked there.
# Prints the folder. What is there and unchanged is used again, without the network.
# Usage: scripts/rdma/fetch.sh
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# The recipe is the key: another recipe gets another folder.
recipe=$(sha256sum "$here/fetch.sh" | cut -c1-12)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/baton/rdma-guest-$recipe

# Modules in the order of loading. crc32_generic is needed by rdma_rxe, which does not say so.
modules="crc32_generic veth sch_netem udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe
    configfs ib_cm iw_cm rdma_cm rdma_ucm netfs 9pnet 9pnet_virtio 9p"

say() { printf 'rdma guest: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "there is no '$1'; install the package $2 (scripts/rdma/ready.sh does) and try again"
}

# The exact packages to download, as NAME=VERSION: qemu with what this machine lacks for it, busybox, kernel.
packages() {
    local kernel
    kernel=$(apt-cache depends linux-image-6.12-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-6[^ ]*\)$/\1/p' | head -1)
    [ -n "$kernel" ] || return 1
    apt-get install -s --no-install-recommends qemu-system-x86 busybox-static 2>/dev/null |
        sed -n 's/^Inst \([^ ]*\) \(\[[^]]*\] \)\?(\([^ ]*\) .*/\1=\3/p'
    # Those that are installed already are not in the list above, but the guest wants its own of each.
    apt-cache policy qemu-system-x86 busybox-static qemu-system-common qemu-system-data seabios "$kernel" |
        awk '/^[a-z]/ { sub(":$", ""); name = $0 } /Candidate:/ { print name "=" $2 }'
}

download() {
    command -v apt-get >/dev/null || fail "there is no apt-get: the guest is made of Debian packages, so make it on Debian or Ubuntu"
    local list
    if ! list=$(packages); then
        say "apt knows no kernel 6.12: updating its lists"
        local as_root=()
        [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
        "${as_root[@]}" apt-get update -qq </dev/null >&2 || fail "apt-get update failed; run it as root and try again"
        list=$(packages) || fail "apt has no package linux-image-6.12-amd64: add Debian's backports or security archive to its sources"
    fi
    list=$(sort -u <<<"$list")
    say "downloading $(wc -l <<<"$list") packages, about 140 MB"
    mkdir "$work/debs"
    # shellcheck disable=SC2086
    (cd "$work/debs" && apt-get download -qq -o APT::Sandbox::User=root $list >&2) || fail "the download failed; see above, and try again"
    printf '%s\n' "$list" >"$work/packages"
}

unpack() {
    local deb
    mkdir -p "$work/root" "$work/kernel"
    for deb in "$work"/debs/*.deb; do
        case $(basename "$deb") in
            linux-image-*) dpkg-deb -x "$deb" "$work/kernel" ;;
            *) dpkg-deb -x "$deb" "$work/root" ;;
        esac
    done
    rm -r "$work/debs"
}

# Keeps the kernel and the modules that we load, and drops the rest.
trim() {
    local version tree module path order=0
    tree=$work/kernel
    [ -d "$tree/usr/lib/modules" ] && [ ! -e "$tree/lib" ] && ln -s usr/lib "$tree/lib"
    version=$(ls "$tree/lib/modules")
    depmod -b "$tree" "$version"
    mkdir "$work/modules"
    for module in $modules; do
        path=$(modinfo -b "$tree" -k "$version" -n "$module") || fail "the kernel $version has no module $module"
        order=$((order + 1))
        xz -dc "$path" >"$work/modules/$(printf '%02d' "$order")-$module.ko"
    done
    cp "$tree/boot/vmlinuz-$version" "$work/vmlinuz"
    printf '%s\n' "$version" >"$work/version"
    rm -r "$tree"
}

# Unchanged, and complete for this machine: the libraries that were installed here when it was made still are.
checked() {
    [ -s "$folder/sums" ] && (cd "$folder" && sha256sum --quiet --check sums >&2) &&
        LD_LIBRARY_PATH="$folder/root/usr/lib/x86_64-linux-gnu" "$folder/root/usr/bin/qemu-system-x86_64" --version >/dev/null
}

make_folder() {
    need dpkg-deb dpkg
    need depmod kmod
    need xz xz-utils
    mkdir -p "$(dirname "$folder")"
    work=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    download
    unpack
    trim
    (cd "$work" && find vmlinuz modules root/usr/bin root/bin -type f -exec sha256sum {} + >sums)
    rm -rf "$folder"
    chmod 755 "$work"
    mv "$work" "$folder"
    trap - EXIT
    say "kernel $(cat "$folder/version") and qemu are in $folder"
}

if ! checked; then
    [ ! -d "$folder" ] || say "$folder is damaged or does not fit this machine: making it anew"
    make_folder
fi
printf '%s\n' "$folder"
