//! The time that calls into ONNX Runtime take.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ort::session::RunOptions;
use ort::session::builder::LoadCanceler;

/// How long a call may take once it was cancelled, or that can't be.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// What ends a call.
pub(crate) enum Cancel {
    Load(LoadCanceler),
    Run(Arc<RunOptions>),
}

impl Cancel {
    fn now(&self) {
        // What can't be cancelled is overdue soon.
        let _ = match self {
            Self::Load(load) => load.cancel(),
            Self::Run(run) => run.terminate(),
        };
    }
}

#[derive(Default)]
struct Call {
    deadline: Option<Instant>,
    cancel: Option<Cancel>,
    is_cancelled: bool,
    is_ended: bool,
}

/// One call at a time, of one thread, and the thread that watches it.
#[derive(Default)]
pub(crate) struct Watch {
    call: Mutex<Call>,
    changed: Condvar,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn start(watch: &Arc<Watch>) -> io::Result<()> {
        let watch = Arc::clone(watch);
        thread::Builder::new().name("vm-npu-watch".to_owned()).spawn(move || watch.run())?;
        Ok(())
    }

    fn call(&self) -> MutexGuard<'_, Call> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut call = self.call();
        while !call.is_ended {
            let left = match call.deadline {
                Some(deadline) if !call.is_cancelled => deadline.saturating_duration_since(Instant::now()),
                _ => Duration::from_secs(3600),
            };
            if left.is_zero() {
                call.is_cancelled = true;
                call.cancel.iter().for_each(Cancel::now);
                continue;
            }
            let waited = self.changed.wait_timeout(call, left);
            call = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes a call that may take as long as `limit`, and is cancelled then.
    pub(crate) fn within<T>(&self, limit: Duration, cancel: Option<Cancel>, f: impl FnOnce() -> T) -> T {
        {
            let mut call = self.call();
            // A time that is too far away to be told is none.
            *call = Call {
                deadline: Instant::now().checked_add(limit),
                cancel,
                is_cancelled: false,
                is_ended: call.is_ended,
            };
        }
        self.changed.notify_all();
        let made = f();
        let mut call = self.call();
        call.deadline = None;
        call.cancel = None;
        made
    }

    /// Was the last call cancelled?
    pub(crate) fn was_cancelled(&self) -> bool {
        self.call().is_cancelled
    }

    /// Has a call not ended, long after it was cancelled?
    pub(crate) fn is_overdue(&self) -> bool {
        let deadline = self.call().deadline;
        deadline.is_some_and(|deadline| Instant::now().saturating_duration_since(deadline) > GRACE)
    }

    pub(crate) fn end(&self) {
        self.call().is_ended = true;
        self.changed.notify_all();
    }
}
