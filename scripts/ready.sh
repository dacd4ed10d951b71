#!/usr/bin/env bash
# Sees to it that what a make target needs is there; installs only what is missing, and says so.
# Usage: scripts/ready.sh compiler|lints|clients|etcd|rdma|musl|prometheus|chromium|book
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

# Installs Debian packages. Usage: install_packages WHAT_IS_MISSING PACKAGE...
install_packages() {
    local missing=$1
    shift
    command -v apt-get >/dev/null || fail "there is no $missing; install $* and try again"
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "there is no $missing; as root: apt-get install $*"
        # Without a terminal sudo must not wait for a password.
        as_root=(sudo -n)
    fi
    say "there is no $missing: installing $* with apt-get"
    "${as_root[@]}" apt-get update -qq </dev/null >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >&2
}

# The allocator and the linker need a C compiler.
need_cc() {
    command -v cc >/dev/null && return
    install_packages "C compiler 'cc'" gcc libc6-dev
}

# The tests of the service use what its users use: curl, and OpenAI's package for Python.
need_clients() {
    command -v curl >/dev/null || install_packages "'curl'" curl ca-certificates
    command -v openssl >/dev/null || install_packages "'openssl'" openssl
    python3 -c 'import venv, ensurepip' 2>/dev/null || install_packages "Python with venv" python3 python3-venv
}

# The tests of membership and election run an etcd of their own, and its command line tool.
need_etcd() {
    command -v etcd >/dev/null && command -v etcdctl >/dev/null && return
    install_packages "'etcd' with 'etcdctl'" etcd-server etcd-client
}

# The shim that looks for libibverbs when the program runs is built by cmake, its Rust side by libclang.
need_rdma() {
    command -v cmake >/dev/null || install_packages "'cmake'; RDMA=off builds without RDMA" cmake
    # Debian's folder has the library and the headers that belong to it; elsewhere one package has both.
    compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' >/dev/null &&
        compgen -G '/usr/lib/llvm-*/lib/libclang[.-][0-9s]*' >/dev/null && return
    ldconfig -p 2>/dev/null | grep -q 'libclang\.so' && return
    install_packages "libclang; RDMA=off builds without RDMA" libclang-dev
}

# The static program is linked to musl, and its C parts are compiled for it.
need_musl() {
    local target
    target=$(uname -m)-unknown-linux-musl
    command -v musl-gcc >/dev/null || install_packages "'musl-gcc'" musl-tools
    [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] && return
    command -v rustup >/dev/null || fail "Rust has no target $target; add it to this toolchain and try again"
    say "Rust has no target $target: adding it with rustup"
    rustup target add "$target" </dev/null >&2
}

# The dashboard and the alerts are tried with a real Prometheus.
need_prometheus() {
    command -v prometheus >/dev/null && command -v promtool >/dev/null && return
    install_packages "'prometheus' with 'promtool'" prometheus
}

# The page is tried in a real browser; CHROMIUM may name another one.
need_chromium() {
    [ -n "${CHROMIUM:-}" ] || command -v chromium >/dev/null || install_packages "'chromium'" chromium
}

# The documentation as a site. Only building is wanted of it: it compiles for a few minutes.
need_mdbook() {
    command -v "${MDBOOK:-mdbook}" >/dev/null && return
    say "there is no 'mdbook': installing it with cargo"
    "$cargo" install mdbook --locked --version 0.5.4 --no-default-features --features search >&2
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
    clients) need_clients ;;
    etcd) need_etcd ;;
    rdma) need_rdma ;;
    musl) need_musl ;;
    prometheus) need_prometheus ;;
    chromium) need_chromium ;;
    book) need_mdbook ;;
    lints)
        need_component fmt rustfmt
        need_component clippy clippy
        ;;
    *) fail "usage: scripts/ready.sh compiler|lints|clients|etcd|rdma|musl|prometheus|chromium|book" ;;
esac
