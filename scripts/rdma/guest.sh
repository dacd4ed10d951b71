#!/usr/bin/env bash
# Runs a script as root in a virtual machine that has software RDMA (see fetch.sh). It sees this machine's
# files under their own names, read-only but for $OUT, a folder that comes back; $TMPDIR is writable memory.
# Exit status: 0 only when the script's was; everything else, a crash of the guest included, is 1.
# Usage: scripts/rdma/guest.sh SCRIPT OUT_FOLDER [LIMIT_S]
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
script=$(realpath "$1")
out=$(realpath "$2")
limit_s=${3:-300}
memory_mib=${BATON_GUEST_MIB:-1536}

folder=$("$here/fetch.sh")
command -v cpio >/dev/null || {
    echo "rdma guest: there is no 'cpio'; install it (scripts/rdma/ready.sh does) and try again" >&2
    exit 1
}
libraries=$folder/root/usr/lib/x86_64-linux-gnu

# What the guest starts from: a shell, the modules, and `init`.
first=$(mktemp -d)
trap 'rm -rf "$first"' EXIT
mkdir -p "$first/root"/{bin,proc,sys,dev,modules}
cp "$folder/root/bin/busybox" "$first/root/bin/"
cp "$folder"/modules/*.ko "$first/root/modules/"
cp "$here/init" "$first/root/init"
chmod 755 "$first/root/init"
(cd "$first/root" && find . | cpio --quiet -o -H newc -R 0:0) >"$first/initrd"

# No acceleration on purpose: it runs anywhere, the same each time. One processor: two locked up under load.
status=0
LD_LIBRARY_PATH=$libraries QEMU_MODULE_DIR=$libraries/qemu timeout --kill-after=5 "$limit_s" \
    "$folder/root/usr/bin/qemu-system-x86_64" -L "$folder/root/usr/share/qemu" -L "$folder/root/usr/share/seabios" \
    -machine q35,accel=tcg -cpu max -smp 1 -m "$memory_mib" -nodefaults -display none \
    -serial stdio -monitor none -no-reboot -kernel "$folder/vmlinuz" -initrd "$first/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable guest_script=$script" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$out,mount_tag=out,security_model=none" \
    -device isa-debug-exit,iobase=0xf4,iosize=0x04 </dev/null || status=$?

case $status in
    33) exit 0 ;;
    124 | 137) echo "rdma guest: not done after $limit_s s; see the output above" >&2 ;;
    0) echo "rdma guest: the guest crashed; see the output above" >&2 ;;
    1) echo "rdma guest: qemu did not start; see the output above" >&2 ;;
    *) echo "rdma guest: $script failed with status $((((status - 1) / 2) - 16))" >&2 ;;
esac
exit 1
