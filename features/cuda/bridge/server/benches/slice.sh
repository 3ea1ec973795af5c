#!/bin/sh
# Whether `bridge serve --time-slice` keeps programs to their share of this machine's GPU, and what it costs. Run from the repository's root; it needs gcc
# and no compiler of CUDA:
#
#   features/cuda/bridge/server/benches/slice.sh [DRIVER]
#
# Each line of a case has what was done in a second, without a slice and with one, and the share: it must be no more than 1.25 times the slice's, and no
# less than .6 of it, and ends in `ok` then. Of copies to the program's memory, in which the device works for a part of the time, it is the share of the
# device's time that was charged which must be no more, and what was done no less. TIME is how long each program goes on, in ms. The last lines are a summary.
set -eu
driver=${1:-libcuda.so.1}
profile=${PROFILE:-release}
time=${TIME:-4000}
built=$PWD/target/$profile
[ "$profile" != debug ] && cargo=$profile || cargo=dev
if [ ! -e "$built/libvm_bridge_guest.so" ] || [ ! -e "$built/vm-service" ]; then
    cargo build --profile "$cargo" -p vm-bridge-guest -p vm-service
fi
work=$(mktemp -d)
servers=
trap 'kill $servers 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/guest"
ln -s "$built/libvm_bridge_guest.so" "$work/guest/libcuda.so.1"
gcc -O2 -pthread -o "$work/slice" features/cuda/bridge/client/tests/slice.c -ldl
serve() {
    name=$1
    shift
    VM_CUDA_CPU_SECONDS=3600 "$built/vm-service" bridge serve --socket "$work/$name" --driver "$driver" "$@" >"$work/$name.log" 2>&1 &
    servers="$servers $!"
    eval "pid_$name=$!"
    for _ in $(seq 300); do [ -S "$work/$name" ] || sleep 0.2; done
}
# What a program says: its server, its case, and how long it goes on.
bridged() {
    LD_LIBRARY_PATH=$work/guest${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VM_BRIDGE=unix:$work/$1 \
        timeout 300 "$work/slice" "$2" "$3" "$looks" "${IMAGE:-ptx}"
}
rate() { bridged "$@" | awk '{ print $3 }'; }
serve plain
serve other
serve all --time-slice 100ms
serve near --time-slice 99ms
serve half --time-slice 50ms
serve fifth --time-slice 20ms
serve late --time-slice 20ms --deadline 2s
looks=1000
looks=$(bridged plain looks 1)
echo "a kernel that polls looks $looks times in a ms"
failed=0

# How many nanoseconds a server has charged ever: the sixth word of its file.
charged() {
    eval "pid=\$pid_$1"
    for file in /proc/$pid/fd/*; do
        case $(readlink "$file") in *bridge-time*) od -An -t u8 -j 40 -N 8 "$file" | tr -d ' ' ;; esac
    done
}

# A case, what was done without a slice, what with it, and the slice of 100 ms.
share() {
    line=$(echo "$@" | awk '{
        got = $2 > 0 ? $3 / $2 : 0; want = $4 / 100; most = NF > 4 ? $5 : got
        print $1, "without", $2, "with", $3, "share", sprintf("%.3f", got), "of", want, (NF > 4 ? sprintf("(charged %.3f) ", $5) : "") (most <= 1.25 * want && got >= .6 * want ? "ok" : "WRONG") }')
    echo "$line"
    echo "$line" >>"$work/summary"
}
for case in short queue long longs graph copy back own; do
    without=$(rate plain $case "$time")
    echo "$without" >"$work/$case"
    for slice in 20 50; do
        way=$([ $slice = 20 ] && echo fifth || echo half)
        # What was not used before is free: it is paid back first.
        before=$(charged $way)
        begun=$(date +%s%N)
        with=$(rate $way $case "$time")
        part=$(awk -v before="$before" -v after="$(charged $way)" -v begun="$begun" -v ended="$(date +%s%N)" 'BEGIN { print (after - before) / (ended - begun) }')
        share "$case-$slice" "$without" "$with" $slice $([ $case != back ] || echo "$part")
        sleep 1
    done
done
# With a deadline as well, which what waits does not miss.
share long-20-deadline "$(cat "$work/long")" "$(rate late long "$time")" 20

# Two programs of one server have the slice together; beside them another server's has the rest.
for case in short long graph; do
    rate fifth $case "$time" >"$work/one" &
    one=$!
    rate fifth $case "$time" >"$work/two"
    wait $one
    share "two-$case-20" "$(cat "$work/$case")" "$(cat "$work/one" "$work/two" | awk '{ sum += $1 } END { print sum }')" 20
    sleep 1
done
beside() {
    rate "$1" "$2" "$time" >"$work/one" &
    one=$!
    rate other "$2" "$time" >"$work/two"
    wait $one
    awk -v what="$3" -v one="$(cat "$work/one")" -v two="$(cat "$work/two")" -v all="$(cat "$work/$2")" 'BEGIN {
        printf "%s: the first %.3f, the second %.3f of what one has alone\n", what, one / all, two / all }' | tee -a "$work/summary"
}
for case in short long; do
    beside plain $case "two-servers-$case, neither with a slice"
    beside fifth $case "two-servers-$case, the first with 20 ms"
    sleep 1
done

# What it costs to launch, three times each in turn.
for _ in 1 2 3; do
    for way in plain all near; do rate $way empty 2000 >>"$work/empty-$way"; done
done
middle() { sort -n "$work/empty-$1" | sed -n 2p; }
for way in all near; do
    awk -v way=$way -v plain="$(middle plain)" -v got="$(middle $way)" 'BEGIN {
        printf "launches in a second, plain %.0f, %s %.0f, ratio %.3f\n", plain, way == "all" ? "--time-slice 100ms" : "--time-slice 99ms", got, got / plain }' | tee -a "$work/summary"
done
# What waits is no work: it takes as long with a slice.
for way in plain fifth; do rate $way waits 2000 >"$work/waits-$way"; done
echo "waits in a second, plain $(cat "$work/waits-plain"), --time-slice 20ms $(cat "$work/waits-fifth")" | tee -a "$work/summary"
# A kernel that waits for a copy that is held up gets it.
bridged fifth signal 1000 | tee -a "$work/summary"

echo "summary"
cat "$work/summary"
if grep -q WRONG "$work/summary"; then failed=1; fi
[ $failed = 0 ] && echo "slice.sh: ok" || echo "slice.sh: WRONG"
exit $failed
