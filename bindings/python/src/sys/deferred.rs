//! What must be dropped with the interpreter's lock, by threads that must not wait for it: who holds the lock may wait for them.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use super::dlpack::Managed;

/// What keeps memory of another library's.
pub(crate) enum Keeper {
    /// An object whose memory it is.
    Object(Py<PyAny>),
    /// A tensor of DLPack's.
    Tensor(Managed),
}

/// Keeps it until it is dropped, on whichever thread: the interpreter's main thread lets go of it soon after.
pub(crate) struct Deferred(Option<Keeper>);

static DROPPED: Mutex<Vec<Keeper>> = Mutex::new(Vec::new());
static IS_ASKED: AtomicBool = AtomicBool::new(false);

impl Deferred {
    pub(crate) fn new(keeper: Keeper) -> Self {
        Self(Some(keeper))
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        let Some(keeper) = self.0.take() else { return };
        DROPPED.lock().unwrap_or_else(PoisonError::into_inner).push(keeper);
        // SAFETY: this may be asked at any time.
        if unsafe { pyo3::ffi::Py_IsInitialized() } == 0 || IS_ASKED.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: any thread may call this, with the lock or without it; the function is there as long as the process, as modules are not
        // unloaded.
        if unsafe { pyo3::ffi::Py_AddPendingCall(Some(called), std::ptr::null_mut()) } != 0 {
            // There are too many already. The next call of this module drops it.
            IS_ASKED.store(false, Ordering::Release);
        }
    }
}

extern "C" fn called(_: *mut c_void) -> c_int {
    Python::attach(drop_all);
    0
}

/// Lets go of all that was dropped so far.
pub(crate) fn drop_all(py: Python<'_>) {
    IS_ASKED.store(false, Ordering::Release);
    let dropped = std::mem::take(&mut *DROPPED.lock().unwrap_or_else(PoisonError::into_inner));
    for keeper in dropped {
        match keeper {
            Keeper::Object(object) => drop(object),
            Keeper::Tensor(tensor) => tensor.release(py),
        }
    }
}
