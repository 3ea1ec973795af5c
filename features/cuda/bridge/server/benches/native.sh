#!/bin/sh
# Whether programs find the same with the driver and through the bridge, and what the bridge costs, on this machine's GPU. Run from the repository's
# root:
#
#   features/cuda/bridge/server/benches/native.sh [DRIVER [PROGRAM...]]
#
# DRIVER is the driver's library (libcuda.so.1). Programs are run with what they are given in quotes: 'python3 train.py'; without any, those of
# `programs` are, as far as `python3` has what they import. A line `time NAME VALUE` of theirs is compared as a ratio, and every other line must be equal.
set -eu
driver=${1:-libcuda.so.1}
[ $# -gt 0 ] && shift
profile=${PROFILE:-release}
built=$PWD/target/$profile
here=features/cuda/bridge/server/benches
if [ ! -e "$built/libvm_bridge_guest.so" ] || [ ! -e "$built/vm-service" ]; then
    cargo build --profile "$profile" -p vm-bridge-guest -p vm-service
fi
work=$(mktemp -d)
trap 'kill $server 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/guest" "$work/native"
ln -s "$built/libvm_bridge_guest.so" "$work/guest/libcuda.so.1"
case $driver in */*) ln -s "$(realpath "$driver")" "$work/native/libcuda.so.1" ;; esac
gcc -O2 -o "$work/bench" $here/native.c -ldl
gcc -O2 -o "$work/add" features/cuda/bridge/client/tests/add.c -ldl
RUST_LOG=${RUST_LOG:-info} "$built/vm-service" bridge serve --socket "$work/socket" --driver "$driver" ${SERVE:-} >"$work/server" 2>&1 &
server=$!
for _ in $(seq 300); do [ -S "$work/socket" ] || sleep 0.2; done
failed=0

native() { LD_LIBRARY_PATH=$work/native${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"; }
bridged() { LD_LIBRARY_PATH=$work/guest${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VM_BRIDGE=unix:$work/socket "$@"; }

native "$work/bench" >"$work/a"
bridged "$work/bench" >"$work/b"
VM_BRIDGE_STREAM=1 bridged "$work/bench" >"$work/c"
echo "what native shared-memory stream shared-memory/native"
paste -d ' ' "$work/a" "$work/b" "$work/c" | awk '{ printf "%s %s %s %s %.3f\n", $1, $2, $4, $6, ($2 > 0 ? $4 / $2 : 0) }'

# From its start to its end, the median of 21.
start_ms() {
    for _ in $(seq 21); do
        since=$(date +%s%N)
        "$1" "$work/add" >/dev/null
        echo $((($(date +%s%N) - since) / 10000))
    done | sort -n | sed -n 11p
}
echo "a program's start to end, in 10 us: native $(start_ms native), bridged $(start_ms bridged)"

compare() {
    native "$@" >"$work/native.txt" 2>"$work/native.err" || echo "ended: $?" >>"$work/native.txt"
    bridged "$@" >"$work/bridged.txt" 2>"$work/bridged.err" || echo "ended: $?" >>"$work/bridged.txt"
    for way in native bridged; do grep -v '^time ' "$work/$way.txt" >"$work/$way.said" || true; done
    if grep -q '^ended' "$work/native.txt"; then
        echo "not run: $*: $(tail -n 1 "$work/native.err")"
    elif cmp -s "$work/native.said" "$work/bridged.said"; then
        echo "equal ($(wc -l <"$work/native.said") lines): $*"
        paste -d ' ' "$work/native.txt" "$work/bridged.txt" | awk '$1 == "time" { printf "  %s: native %s, bridged %s, ratio %.3f\n", $2, $3, $6, $6 / $3 }'
    else
        failed=1
        echo "DIFFERENT: $*"
        diff "$work/native.said" "$work/bridged.said" | cut -c1-200 | head -20
        tail -n 3 "$work/bridged.err"
    fi
    grep '^vm-bridge' "$work/bridged.err" || true
}
compare "$work/add"
[ $# -gt 0 ] || set -- "python3 $here/programs/train.py" "python3 $here/programs/steps.py" "python3 $here/programs/decode.py" "python3 $here/programs/products.py" \
    "python3 $here/programs/graphs.py" "python3 $here/programs/sparse.py" "python3 $here/programs/compiled.py" "python3 $here/programs/arrays.py" "python3 $here/programs/jit.py" "python3 $here/programs/xla.py"
for program in "$@"; do
    # What is in quotes is a command with its arguments.
    # shellcheck disable=SC2086
    compare $program
done

# One trains while another writes where nothing is: the first finds what it finds alone.
trained="python3 $here/programs/train.py 30"
if native $trained 2>/dev/null | grep -v '^time ' >"$work/alone"; then
    bridged python3 $here/programs/stray.py 25 >"$work/stray" 2>&1 &
    stray=$!
    sleep 2
    bridged $trained 2>"$work/beside.err" | grep -v '^time ' >"$work/beside1" &
    one=$!
    bridged $trained 2>"$work/beside.err" | grep -v '^time ' >"$work/beside2" &
    two=$!
    sleep 3
    for worker in $(pgrep -P $server -f bridge-worker); do
        echo "a worker's memory: $(awk '/VmRSS|RssAnon/ { printf "%s %s kB ", $1, $2 }' /proc/$worker/status)"
    done
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader 2>/dev/null || true
    wait $one $two $stray || failed=1
    cmp "$work/alone" "$work/beside1" && cmp "$work/alone" "$work/beside2" && echo "equal: two that train beside one that strays" || failed=1
    cat "$work/stray"
fi
echo "the server:"
cat "$work/server"
exit $failed
