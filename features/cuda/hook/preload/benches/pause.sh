#!/bin/sh
# How fast programs are paused and resumed on this machine's driver, or on the one in a directory, with nothing reserved and with all, beside copies
# of pinned memory: a table of medians of 5, for each size that the device and the host have room for. What a call takes and whether handles
# are shared is told on standard error.
#
#     features/cuda/hook/preload/benches/pause.sh ["1 8 16 40" [DIRECTORY OF libcuda.so.1]]
#
# What is built in target/quick or target/release, or the directory BUILT, is taken; `pause.sh build` only builds, in target/release.
set -eu
cd "$(dirname "$0")/../../../../.."
sizes=${1:-1 8 16 40}
driver=${2:-}
target=${CARGO_TARGET_DIR:-target}
built=${BUILT:-}
for folder in "$target/quick" "$target/release"; do
    if [ -z "$built" ] && [ -e "$folder/libvmhook.so" ] && [ -e "$folder/vmhook" ]; then
        built=$folder
    fi
done
if [ -z "$built" ] || [ "$sizes" = build ]; then
    cargo build --release --package vm-hook-preload --package vm-hook-cli
    built=$target/release
fi
built=$(cd "$built" && pwd)
for program in benches/pause tests/share; do
    own=$built/hook-${program##*/} source=features/cuda/hook/preload/$program.c
    if [ ! -e "$own" ] || [ "$source" -nt "$own" ] && command -v gcc >/dev/null; then
        gcc -std=gnu11 -O2 -o "$own" "$source" -ldl
    fi
done
if [ "$sizes" = build ]; then
    exit
fi
if [ -n "$driver" ]; then
    export LD_LIBRARY_PATH="$driver"
fi
hook() { env LD_PRELOAD="$built/libvmhook.so" "$@"; }
for turn in 1 2 3; do
    printf 'without the hook: ' && "$built/hook-pause" calls
    printf 'with the hook: ' && hook "$built/hook-pause" calls
done >&2
printf '| GiB | reserved | pinned, to the host (GiB/s) | pause | of it | pinned, to the device | resume | of it |\n'
printf '| --- | --- | --- | --- | --- | --- | --- | --- |\n'
for gib in $sizes; do
    device=$("$built/hook-pause" free)
    host=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
    needed=$((gib * 1024 + 1024))
    if [ "$device" -lt "$needed" ] || [ "$host" -lt $((needed + 2048)) ]; then
        printf 'skipped: %s GiB need more than the %s MiB of the device or the %s of the host\n' "$gib" "$device" "$host" >&2
        continue
    fi
    hook "$built/hook-pause" "$gib" "$built/vmhook"
    VMM_RESERVE=$((needed - 512))M hook "$built/hook-pause" "$gib" "$built/vmhook"
done
for size in 4 256; do
    without=$("$built/hook-share" $size)
    with=$(hook "$built/hook-share" $size)
    if [ "$without" != "$with" ]; then
        printf 'without the hook:\n%s\nwith it:\n%s\n' "$without" "$with"
        exit 1
    fi
    printf 'processes share %s MiB as without the hook\n' $size >&2
done
