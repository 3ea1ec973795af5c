#!/bin/sh
# Whether programs of graphs, copies, logs, peers, registered and shared memory find the same with the driver of this machine's GPU and through the bridge. Run from the
# repository's root:
#
#   features/cuda/bridge/server/benches/same.sh [DRIVER]
#
# DRIVER is the driver's library (libcuda.so.1). PROFILE is what is built: release. With `vm-service` built, its confined workers are looked at, too.
set -eu
driver=${1:-libcuda.so.1}
profile=${PROFILE:-release}
built=$PWD/target/$profile
if [ ! -e "$built/libvm_bridge_guest.so" ] || [ ! -e "$built/examples/serve" ]; then
    cargo build --profile "$profile" -p vm-bridge-guest --lib --examples
fi
work=$(mktemp -d)
servers=
trap 'kill $servers 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/guest" "$work/native"
ln -s "$built/libvm_bridge_guest.so" "$work/guest/libcuda.so.1"
case $driver in */*) ln -s "$(realpath "$driver")" "$work/native/libcuda.so.1" ;; esac
for program in graphs share ways; do
    gcc -std=gnu11 -O1 -o "$work/$program" "features/cuda/bridge/client/tests/$program.c" -ldl
done

# Waits until a server listens.
listens() { for _ in $(seq 300); do [ -S "$1" ] && return; sleep 0.1; done; echo "no server: $1"; exit 1; }
"$built/examples/serve" "$work/free" "$driver" >"$work/free.log" 2>&1 &
servers=$!
listens "$work/free"
ways="native free"
if [ -e "$built/vm-service" ]; then
    "$built/vm-service" bridge serve --socket "$work/confined" --driver "$driver" >"$work/confined.log" 2>&1 &
    servers="$servers $!"
    listens "$work/confined"
    ways="$ways confined"
fi

# by WAY COMMAND...: with the driver, or through a server.
by() {
    way=$1
    shift
    case $way in
    native) LD_LIBRARY_PATH=$work/native${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@" ;;
    *) LD_LIBRARY_PATH=$work/guest${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VM_BRIDGE=unix:$work/$way "$@" ;;
    esac
}

# A program that shares, and one that takes.
share() {
    mkfifo "$work/$1.in"
    by "$1" "$work/share" give <"$work/$1.in" >"$work/$1.give" &
    giver=$!
    exec 3<>"$work/$1.in"
    for _ in $(seq 300); do [ "$(wc -l <"$work/$1.give")" -ge 3 ] || ! kill -0 $giver 2>/dev/null && break; sleep 0.1; done
    [ "$(wc -l <"$work/$1.give")" -ge 3 ] || { cat "$work/$1.give"; return; }
    sed -n 3p "$work/$1.give"
    # shellcheck disable=SC2046 # Two handles.
    echo | by "$1" "$work/share" take $(sed -n 1,2p "$work/$1.give") || echo "ended: $?"
    echo >&3
    exec 3>&-
    wait $giver || echo "ended: $?"
    sed -n '4,$p' "$work/$1.give"
}

for what in graphs hostmem conditional allocs prints mapped copies logs peers occupancy registered files handles share; do
    for way in $ways; do
        case $what in
        share) share "$way" ;;
        registered | files | handles) by "$way" "$work/ways" $what || echo "ended: $?" ;;
        *) by "$way" "$work/graphs" $what || echo "ended: $?" ;;
        esac >"$work/$what.$way" 2>&1
        # What NVIDIA's driver makes of events takes files that confined workers have not.
        if grep -q '^no events: 801, ' "$work/$what.$way"; then
            echo "$what, $way: memory alone, no events"
            sed -i '/^vm-bridge: an event/d; s/^no events: 801, //' "$work/$what.$way"
        fi
        if [ "$way" = native ]; then
            sed "s/^/$what: /" "$work/$what.native"
        elif cmp -s "$work/$what.native" "$work/$what.$way"; then
            echo "equal: $what, $way"
        else
            echo "DIFFERENT: $what, $way"
            diff "$work/$what.native" "$work/$what.$way" || true
        fi
    done
done
by free "$work/graphs" gone || true
cat "$work"/*.log
