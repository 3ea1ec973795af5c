#!/bin/sh
# What the hook's pause, its gate and its handles do on this machine's driver, or on the one in a directory:
#
#     features/hook-preload/benches/pause.sh [GIB [DIRECTORY OF libcuda.so.1]]
set -eu
cd "$(dirname "$0")/../../.."
gib=${1:-16}
driver=${2:-}
cargo build --release --package vm-hook-preload --package vm-hook-cli
release=${CARGO_TARGET_DIR:-$PWD/target}/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gcc -std=gnu11 -O2 -o "$work/pause" features/hook-preload/benches/pause.c -ldl
gcc -std=gnu11 -O1 -o "$work/share" features/hook-preload/tests/share.c -ldl
if [ -n "$driver" ]; then
    export LD_LIBRARY_PATH="$driver"
fi
hook() { env LD_PRELOAD="$release/libvmhook.so" "$@"; }
for turn in 1 2; do
    printf 'without the hook: ' && "$work/pause" calls
    printf 'with the hook: ' && hook "$work/pause" calls
done
hook "$work/pause" "$gib" "$release/vmhook"
for size in 4 256; do
    "$work/share" $size >"$work/without"
    hook "$work/share" $size >"$work/with"
    if cmp "$work/without" "$work/with"; then
        echo "processes share $size MiB as without the hook"
    else
        cat "$work/without" "$work/with"
        exit 1
    fi
done
