#!/bin/sh
# Whether `bridge serve --deadline` ends what makes no progress on this machine's GPU, and nothing else, and what it costs. Run from the repository's
# root; it needs gcc and no compiler of CUDA:
#
#   features/cuda/bridge/server/benches/deadline.sh [DRIVER]
#
# Each line of a case must end in `ok`; it tells how many milliseconds the program took. Then come the figures of `native.c` without a deadline and with
# one, and their ratio: that of launches should be 0.98 to 1.02.
set -eu
driver=${1:-libcuda.so.1}
profile=${PROFILE:-release}
built=$PWD/target/$profile
if [ ! -e "$built/libvm_bridge_guest.so" ] || [ ! -e "$built/vm-service" ]; then
    cargo build --profile "$profile" -p vm-bridge-guest -p vm-service
fi
work=$(mktemp -d)
trap 'kill $servers 2>/dev/null; rm -rf "$work"' EXIT
servers=
mkdir "$work/guest"
ln -s "$built/libvm_bridge_guest.so" "$work/guest/libcuda.so.1"
gcc -O2 -pthread -o "$work/deadline" features/cuda/bridge/client/tests/deadline.c -ldl
gcc -O2 -o "$work/bench" features/cuda/bridge/server/benches/native.c -ldl
serve() {
    name=$1
    shift
    "$built/vm-service" bridge serve --socket "$work/$name" --driver "$driver" "$@" >"$work/$name.log" 2>&1 &
    servers="$servers $!"
    for _ in $(seq 300); do [ -S "$work/$name" ] || sleep 0.2; done
}
bridged() {
    to=$1
    shift
    LD_LIBRARY_PATH=$work/guest${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VM_BRIDGE=unix:$work/$to "$@"
}
serve plain
serve short --deadline 2s
serve brief --deadline 50ms
serve long --deadline 60s
failed=0

# A case, what it must say, its server, and how long a piece of honest work is.
check() {
    since=$(date +%s%N)
    said=$(bridged "$3" timeout 300 "$work/deadline" "$1" "$4" ptx 2>"$work/errors") || true
    took=$((($(date +%s%N) - since) / 1000000))
    if [ "$said" = "$1: $2" ]; then
        echo "$1 ($3), $took ms: ok"
    else
        failed=1
        echo "$1 ($3), $took ms: WRONG: $said; $(tail -n 1 "$work/errors")"
    fi
}
late='702 702 CUDA_ERROR_LAUNCH_TIMEOUT'
fine='0 0 CUDA_SUCCESS'
for name in legacy own own_waited free blocks asked thread_ended destroyed released hidden behind_wait before_wait before_capture graph; do
    check $name "$late" short 400
    check honest_idle "$fine" short 10
done
# The queue of the device is full behind a kernel that does not end, or the end of its context waits for it: after 64 deadlines at most it is over.
check full "$late" brief 400
for name in reset context_destroyed; do check $name "$late" brief 400; done
for name in queue legacy own many waits implicit callback value capture; do check honest_$name "$fine" short 400; done
# Beside a program that is ended another goes on.
check honest_queue "$fine" short 400 &
beside=$!
check hidden "$late" short 400
wait $beside

for way in plain long; do bridged $way "$work/bench" >"$work/$way.txt"; done
echo "what without with ratio"
paste -d ' ' "$work/plain.txt" "$work/long.txt" | awk '{ printf "%s %s %s %.3f\n", $1, $2, $4, ($2 > 0 ? $4 / $2 : 0) }'
exit $failed
