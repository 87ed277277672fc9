#!/bin/sh
# Installs what `make chaos` needs for faults of the network, of disks and of clocks, where it is missing: iproute2 and
# nsenter (util-linux), fuse3 with its headers, gcc and pkg-config. Needs Debian's apt and root; otherwise it says what is
# missing, and the run goes without those faults. Never fails, but with `--check`, which only says what is missing.
missing=""
command -v ip >/dev/null || missing="$missing iproute2"
command -v nsenter >/dev/null || missing="$missing util-linux"
command -v gcc >/dev/null || missing="$missing gcc libc6-dev"
command -v pkg-config >/dev/null || missing="$missing pkg-config"
command -v fusermount3 >/dev/null || missing="$missing fuse3"
{ command -v pkg-config >/dev/null && pkg-config --exists fuse3; } || missing="$missing libfuse3-dev"
[ -z "$missing" ] && exit 0
if [ "${1:-}" = --check ]; then
    echo "missing:$missing"
    exit 1
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "make chaos: install$missing for all faults"
    exit 0
fi
echo "make chaos: installing$missing"
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null ||
    echo "make chaos: apt could not install$missing"
exit 0
