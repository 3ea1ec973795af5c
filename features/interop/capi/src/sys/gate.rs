//! What keeps calls and the end of the process apart.
//!
//! A driver's library gives up what it has when the process ends, whatever other threads do then: one that is in the driver meanwhile
//! crashes. So an exit handler that runs before the driver's turns calls away, and waits for those that are under way.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the end waits for calls: a driver may hang in one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Calls are turned away.
const CLOSED: u32 = 1 << 31;

/// Calls that are under way, and whether others may begin.
pub(super) struct Gate(AtomicU32);

/// The process's.
static GATE: Gate = Gate::new();

/// A call that is under way.
pub(super) struct Passed<'a>(&'a Gate);

impl Gate {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Begins a call, unless the process ends.
    pub(super) fn enter(&self) -> Option<Passed<'_>> {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        let passed = Passed(self);
        (before & CLOSED == 0).then_some(passed)
    }

    /// Turns calls away, and waits for those that are under way, if it is the first to. Whether none is left.
    pub(super) fn close(&self, patience: Duration) -> bool {
        let calls = self.0.fetch_or(CLOSED, Ordering::AcqRel);
        if calls & CLOSED != 0 { calls == CLOSED } else { self.wait(patience) }
    }

    /// Waits for the calls that are under way. Whether none is left.
    pub(super) fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.0.load(Ordering::Acquire) & !CLOSED != 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }
}

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Begins a call, unless the process ends.
pub(super) fn enter() -> Option<Passed<'static>> {
    GATE.enter()
}

/// Whether the process ends: a call that has not yet come to the driver is to keep away from it.
pub(crate) fn is_closed() -> bool {
    GATE.0.load(Ordering::Acquire) & CLOSED != 0
}

/// A child has none of the threads that were in calls.
pub(super) fn in_child() {
    GATE.0.store(0, Ordering::Release);
}

/// Loads NVIDIA's compiler of PTX, which the driver loads for the first kernel that no cache has, and which asks then for what it does at the
/// end: the gate is closed before that also if the process ends while the first is compiled. Without it, it is loaded as late as ever.
pub(super) fn load_compiler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the name is a string that ends with a zero; what is loaded is the driver's own, as the driver itself would load it.
        let _ = unsafe {
            libc::dlopen(c"libnvidia-ptxjitcompiler.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL)
        };
        close_at_exit();
    });
}

/// Closes the gate when the process ends, before all that has asked for the like until now: to be called each time that a driver has loaded a
/// kernel, as it may have loaded a library as well.
pub(super) fn close_at_exit() {
    extern "C" fn close() {
        GATE.close(PATIENCE);
    }
    // SAFETY: the handler touches a static alone, and belongs to the library, so that it is called before that is unloaded.
    let _ = unsafe { libc::atexit(close) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_are_under_way_are_waited_for_and_later_ones_turned_away() {
        let gate = Gate::new();
        let call = gate.enter();
        assert!(call.is_some());
        assert!(!gate.close(Duration::from_millis(1)));
        assert!(gate.enter().is_none());
        // The first handler has waited: those behind it do not.
        assert!(!gate.close(Duration::from_secs(600)));
        drop(call);
        assert!(gate.close(Duration::ZERO));
        let gate = Gate::new();
        let call = gate.enter();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| gate.close(Duration::from_secs(60)));
            drop(call);
            assert!(ended.join().unwrap());
        });
        assert!(gate.enter().is_none());
    }
}
