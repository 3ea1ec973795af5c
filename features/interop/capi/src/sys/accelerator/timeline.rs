//! Timelines of the caller's, by its functions.

use std::ffi::c_void;
use std::time::Instant;

use vm_accel::{Error, Result};

use super::vma_release_function;

/// A function of the caller's that waits.
pub(crate) type WaitFunction = unsafe extern "C" fn(*mut c_void, u64, u64) -> i32;
/// A function of the caller's that signals.
pub(crate) type SignalFunction = unsafe extern "C" fn(*mut c_void, u64) -> i32;

/// A timeline of the caller's, which is told when nobody uses it any more.
pub(crate) struct Theirs {
    wait: WaitFunction,
    signal: SignalFunction,
    release: vma_release_function,
    data: *mut c_void,
}

// SAFETY: who imports a timeline says that its functions may be called by any thread.
unsafe impl Send for Theirs {}
// SAFETY: as above, and at the same time.
unsafe impl Sync for Theirs {}

impl Theirs {
    pub(crate) fn new(
        wait: WaitFunction,
        signal: SignalFunction,
        release: vma_release_function,
        data: *mut c_void,
    ) -> Self {
        Self { wait, signal, release, data }
    }
}

/// The error of a function that returned less than 0.
fn failed(what: &'static str, returned: i32) -> Error {
    Error::Host { what, cause: format!("its function returned {returned}") }
}

impl vm_accel::Timeline for Theirs {
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: as who imported it says; the data is there until it is released.
        match unsafe { (self.wait)(self.data, value, left) } {
            returned @ ..0 => Err(failed("waiting for a timeline", returned)),
            returned => Ok(returned > 0),
        }
    }

    fn signal(&self, value: u64) -> Result<()> {
        // SAFETY: as above.
        match unsafe { (self.signal)(self.data, value) } {
            returned @ ..0 => Err(failed("signalling a timeline", returned)),
            _ => Ok(()),
        }
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: as who imported it says; nobody uses the data any more.
            unsafe { release(self.data) };
        }
    }
}
