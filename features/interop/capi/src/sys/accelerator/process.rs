//! What a process does beside calls: it forks, and ends.
//!
//! Workers are threads, which a forked child has not; so it is told that it can't call. When the process ends, drivers give up what they
//! have, so workers end before: by an exit handler, which runs before those that were asked for earlier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::time::{Duration, Instant};

use super::running_job;
use crate::accelerator::{Failure, functions};
use crate::sys::gate::{Gate, Passed};

/// The time that process exit waits for workers and calls, all of them together.
const TIMEOUT: Duration = Duration::from_secs(5);

static GATE: Gate = Gate::new();
static CHILD: AtomicBool = AtomicBool::new(false);
/// The end of [`TIMEOUT`], set by the first exit handler: the process has one for each worker that was started.
static UNTIL: OnceLock<Instant> = OnceLock::new();

/// Begins a call.
///
/// # Errors
/// The process ends, or is the child of one that called.
pub(super) fn enter() -> Result<Passed<'static>, Failure> {
    static AT_FORK: Once = Once::new();
    extern "C" fn in_child() {
        CHILD.store(true, Ordering::Release);
    }
    AT_FORK.call_once(|| {
        // SAFETY: the handler stores a number.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    if CHILD.load(Ordering::Acquire) {
        return Err(Failure::Process(
            "a forked child can't use what its parent opened: call exec, or fork before the first call",
        ));
    }
    GATE.enter().ok_or(Failure::Process("the process ends"))
}

/// Has the workers end when the process does, before all that has asked for the like until now.
pub(crate) fn end_at_exit() {
    extern "C" fn end() {
        if CHILD.load(Ordering::Acquire) {
            return;
        }
        let until = *UNTIL.get_or_init(|| Instant::now() + TIMEOUT);
        GATE.close(Duration::ZERO);
        // The process ends whatever is left of them. No panic may leave this.
        let _ = std::panic::catch_unwind(|| functions::stop_all(until));
        // Who waits for the job that ends the process does not come back.
        if running_job() == 0 {
            GATE.wait(until.saturating_duration_since(Instant::now()));
        }
    }
    // SAFETY: the handler uses statics alone, and belongs to the library, so that it is called before that is unloaded.
    let _ = unsafe { libc::atexit(end) };
}
