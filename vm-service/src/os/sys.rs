//! The end of this process, at once.
#![allow(unsafe_code)]

/// Ends the process without what libraries do at its end, such as waiting for a device that is still busy. What was to be
/// written must have been.
pub(crate) fn exit_at_once(status: u8) -> ! {
    // SAFETY: it takes a number and does not return.
    unsafe { libc::_exit(status.into()) }
}
