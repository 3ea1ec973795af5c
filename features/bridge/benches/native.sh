#!/bin/sh
# What the bridge costs on this machine's GPU: `native.c` with the driver, through the bridge by shared memory, and by its stream; then whether
# programs print the same both ways. Run from the repository's root:
#
#   features/bridge/benches/native.sh [DRIVER] [PROGRAM...]
#
# DRIVER is the driver's library (libcuda.so.1). Programs are run with what they are given in quotes: 'python3 train.py'.
set -eu
driver=${1:-libcuda.so.1}
[ $# -gt 0 ] && shift
profile=${PROFILE:-release}
built=$PWD/target/$profile
if [ ! -e "$built/libvm_bridge_guest.so" ] || [ ! -e "$built/examples/serve" ]; then
    cargo build --profile "$profile" -p vm-bridge-guest --lib --examples
fi
work=$(mktemp -d)
trap 'kill $server 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/guest" "$work/native"
ln -s "$built/libvm_bridge_guest.so" "$work/guest/libcuda.so.1"
case $driver in */*) ln -s "$(realpath "$driver")" "$work/native/libcuda.so.1" ;; esac
gcc -O2 -o "$work/bench" features/bridge/benches/native.c -ldl
gcc -O2 -o "$work/add" features/bridge-guest/tests/add.c -ldl
"$built/examples/serve" "$work/socket" "$driver" >"$work/server" 2>&1 &
server=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -S "$work/socket" ] || sleep 0.2; done

native() { LD_LIBRARY_PATH=$work/native${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"; }
bridged() { LD_LIBRARY_PATH=$work/guest${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VM_BRIDGE=unix:$work/socket "$@"; }

native "$work/bench" >"$work/a"
bridged "$work/bench" >"$work/b"
VM_BRIDGE_STREAM=1 bridged "$work/bench" >"$work/c"
echo "what native shared-memory stream shared-memory/native"
paste -d ' ' "$work/a" "$work/b" "$work/c" | awk '{ printf "%s %s %s %s %.3f\n", $1, $2, $4, $6, ($2 > 0 ? $4 / $2 : 0) }'

compare() {
    native "$@" >"$work/native.txt" 2>&1 || echo "ended: $?" >>"$work/native.txt"
    bridged "$@" >"$work/bridged.txt" 2>"$work/bridged.err" || echo "ended: $?" >>"$work/bridged.txt"
    if cmp -s "$work/native.txt" "$work/bridged.txt"; then
        echo "equal: $*"
    else
        echo "DIFFERENT: $*"
        diff "$work/native.txt" "$work/bridged.txt" | head -20
    fi
    cat "$work/bridged.err"
}
compare "$work/add"
for program in "$@"; do
    # What is in quotes is a command with its arguments.
    # shellcheck disable=SC2086
    compare $program
done
cat "$work/server"
