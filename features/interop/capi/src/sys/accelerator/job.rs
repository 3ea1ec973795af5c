//! Functions of the caller's that workers run.

use std::cell::Cell;
use std::ffi::c_void;

use super::Function;

thread_local! {
    /// The number of the worker whose job this thread runs, or 0.
    static RUNNING: Cell<usize> = const { Cell::new(0) };
}

/// A call of a function of the caller's.
pub(crate) struct Call {
    function: Function,
    data: *mut c_void,
}

// SAFETY: who submits a function says that it may run with its data on the worker's thread.
unsafe impl Send for Call {}

impl Call {
    pub(crate) fn new(function: Function, data: *mut c_void) -> Self {
        Self { function, data }
    }

    /// Runs it, in a job of the worker of this number.
    pub(crate) fn run(self, worker: usize) -> i32 {
        let before = RUNNING.replace(worker);
        // SAFETY: as who submitted it says; it does not unwind.
        let returned = unsafe { (self.function)(self.data) };
        RUNNING.set(before);
        returned
    }
}

/// The number of the worker whose job the calling thread runs, or 0.
pub(crate) fn running_job() -> usize {
    RUNNING.try_with(Cell::get).unwrap_or(0)
}
