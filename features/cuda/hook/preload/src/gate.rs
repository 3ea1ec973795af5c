//! The gate that the program's calls of the driver pass: open, or closed while memory is away.
//!
//! A call costs two stores and a load. Each thread counts its calls in a place of its own, and whoever closes the gate makes all threads'
//! stores visible (`membarrier`) before looking at the counts: either the call sees that the gate is closed, or its count is seen.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, compiler_fence, fence};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::sys;

/// Calls pass.
const OPEN: u32 = 0;
/// They wait.
const CLOSED: u32 = 1;
/// The program ends: they pass, whatever they find.
const ENDING: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(OPEN);
/// Threads that wait.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Can the one who closes make others' stores visible? If not, each call does.
static ASYMMETRIC: AtomicBool = AtomicBool::new(false);

/// A thread's calls that have not returned; it may be in several, where a handler of a signal calls.
#[repr(align(64))]
struct Slot {
    calls: AtomicU32,
    is_taken: AtomicBool,
}

static SLOTS: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());
/// Of threads whose own is gone, as they end.
static LATE: Slot = Slot { calls: AtomicU32::new(0), is_taken: AtomicBool::new(true) };

/// Gives a slot back when its thread ends.
struct Owner(&'static Slot);

impl Drop for Owner {
    fn drop(&mut self) {
        SLOT.set(Some(&LATE));
        // A thread that was ended within a call does not return from it.
        self.0.calls.store(0, Ordering::Release);
        self.0.is_taken.store(false, Ordering::Release);
    }
}

thread_local! {
    static SLOT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static OWNER: Owner = Owner(take());
}

fn take() -> &'static Slot {
    let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    match slots.iter().find(|slot| !slot.is_taken.swap(true, Ordering::AcqRel)) {
        Some(slot) => slot,
        None => {
            let (calls, is_taken) = (AtomicU32::new(0), AtomicBool::new(true));
            let slot: &'static Slot = Box::leak(Box::new(Slot { calls, is_taken }));
            slots.push(slot);
            slot
        }
    }
}

#[cold]
fn first() -> &'static Slot {
    // A handler of a signal that comes in between finds none yet, and is counted with those that end.
    SLOT.set(Some(&LATE));
    let slot = OWNER.try_with(|owner| owner.0).unwrap_or(&LATE);
    SLOT.set(Some(slot));
    slot
}

/// A call that has not returned.
pub(crate) struct Pass(&'static Slot);

impl Pass {
    #[inline]
    fn new(slot: &'static Slot) -> (Self, bool) {
        // Only its thread changes a slot, but for the late ones'.
        let before = if std::ptr::eq(slot, &LATE) {
            slot.calls.fetch_add(1, Ordering::SeqCst);
            0
        } else {
            let before = slot.calls.load(Ordering::Relaxed);
            slot.calls.store(before + 1, Ordering::Relaxed);
            before
        };
        (Pass(slot), before != 0)
    }
}

impl Drop for Pass {
    #[inline]
    fn drop(&mut self) {
        if std::ptr::eq(self.0, &LATE) {
            self.0.calls.fetch_sub(1, Ordering::Release);
        } else {
            self.0.calls.store(self.0.calls.load(Ordering::Relaxed) - 1, Ordering::Release);
        }
    }
}

/// Before a call: waits while the gate is closed. True if the program ends, and memory may be away.
#[inline]
pub(crate) fn enter() -> (Pass, bool) {
    let slot = SLOT.get().unwrap_or_else(first);
    loop {
        let (pass, is_inner) = Pass::new(slot);
        if ASYMMETRIC.load(Ordering::Relaxed) {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        match STATE.load(Ordering::Acquire) {
            OPEN => return (pass, false),
            // What a call that has passed waits for must not wait for it.
            CLOSED if !is_inner => {
                drop(pass);
                wait();
            }
            state => return (pass, state == ENDING),
        }
    }
}

#[cold]
fn wait() {
    WAITING.fetch_add(1, Ordering::Relaxed);
    while STATE.load(Ordering::Acquire) == CLOSED {
        sys::wait_while(&STATE, CLOSED);
    }
    WAITING.fetch_sub(1, Ordering::Relaxed);
}

/// Prepares for [`close`]; calls may run.
pub(crate) fn prepare() {
    if sys::register_barrier() {
        ASYMMETRIC.store(true, Ordering::Release);
    }
}

/// Threads that wait.
pub(crate) fn waiting() -> u32 {
    WAITING.load(Ordering::Relaxed)
}

/// Closes the gate, and waits until no call runs; if one runs on after so long, the gate is as before. False, too, if the program ends.
pub(crate) fn close(time: Duration) -> bool {
    if STATE.compare_exchange(OPEN, CLOSED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return false;
    }
    let deadline = Instant::now() + time;
    if ASYMMETRIC.load(Ordering::Acquire) && !sys::barrier() {
        open();
        return false;
    }
    fence(Ordering::SeqCst);
    let mut pause = Duration::from_micros(20);
    while is_any_inside() {
        if Instant::now() >= deadline || STATE.load(Ordering::Acquire) != CLOSED {
            open();
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
    true
}

fn is_any_inside() -> bool {
    let slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    slots.iter().copied().chain([&LATE]).any(|slot| slot.calls.load(Ordering::Acquire) != 0)
}

/// Opens it again.
pub(crate) fn open() {
    // What ends ends on.
    let _ = STATE.compare_exchange(CLOSED, OPEN, Ordering::SeqCst, Ordering::SeqCst);
    sys::wake_all(&STATE);
}

/// Opens it for good, as the program ends.
pub(crate) fn end() {
    STATE.store(ENDING, Ordering::SeqCst);
    sys::wake_all(&STATE);
}

/// In a child that was forked: none of the parent's threads is here.
pub(crate) fn forget() {
    STATE.store(OPEN, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn nobody_is_inside_of_a_closed_gate() {
        prepare();
        let (inside, passed, is_done) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let mut found = Vec::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        let (_pass, is_ending) = enter();
                        // A call within a call does not wait.
                        let (_inner, _) = enter();
                        inside.fetch_add(u64::from(is_ending), Ordering::Relaxed);
                        inside.fetch_add(1, Ordering::Relaxed);
                        passed.fetch_add(1, Ordering::Relaxed);
                        std::hint::spin_loop();
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
            let mut closed = 0;
            while closed < 50 {
                if close(Duration::from_secs(60)) {
                    closed += 1;
                    let before = passed.load(Ordering::Relaxed);
                    for _ in 0..100 {
                        found.push(inside.load(Ordering::Relaxed));
                        std::thread::yield_now();
                    }
                    found.push(passed.load(Ordering::Relaxed) - before);
                    open();
                }
                while passed.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
            }
            is_done.store(true, Ordering::Relaxed);
        });
        assert!(found.iter().all(|inside| *inside == 0), "{found:?}");
        // One that does not return keeps it open.
        let (pass, _) = enter();
        assert!(!close(Duration::from_millis(1)));
        drop(pass);
        assert!(close(Duration::from_secs(60)) && !close(Duration::ZERO));
        open();
    }
}
