#!/bin/sh
# What the hook's pause, its gate and its handles do on this machine's driver, or on the one in a directory:
#
#     features/hook-preload/benches/pause.sh [GIB [DIRECTORY OF libcuda.so.1]]
#
# `pause.sh build` only builds; with BUILT=target/release nothing is built, so a machine without compilers runs it.
set -eu
cd "$(dirname "$0")/../../.."
gib=${1:-16}
driver=${2:-}
built=${BUILT:-${CARGO_TARGET_DIR:-target}/release}
built=$(mkdir -p "$built" && cd "$built" && pwd)
if [ -z "${BUILT:-}" ]; then
    cargo build --release --package vm-hook-preload --package vm-hook-cli
    gcc -std=gnu11 -O2 -o "$built/hook-pause" features/hook-preload/benches/pause.c -ldl
    gcc -std=gnu11 -O1 -o "$built/hook-share" features/hook-preload/tests/share.c -ldl
fi
if [ "$gib" = build ]; then
    exit
fi
if [ -n "$driver" ]; then
    export LD_LIBRARY_PATH="$driver"
fi
hook() { env LD_PRELOAD="$built/libvmhook.so" "$@"; }
for turn in 1 2 3; do
    printf 'without the hook: ' && "$built/hook-pause" calls
    printf 'with the hook: ' && hook "$built/hook-pause" calls
done
hook "$built/hook-pause" "$gib" "$built/vmhook"
for size in 4 256; do
    without=$("$built/hook-share" $size)
    with=$(hook "$built/hook-share" $size)
    if [ "$without" != "$with" ]; then
        printf 'without the hook:\n%s\nwith it:\n%s\n' "$without" "$with"
        exit 1
    fi
    printf 'processes share %s MiB as without the hook\n' $size
done
