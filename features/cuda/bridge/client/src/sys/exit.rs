//! What is done when the program ends.

/// Has a function called then.
pub(crate) fn at_exit(function: extern "C" fn()) {
    // SAFETY: the library is never unloaded (`nodelete`), so the function is there then.
    let _ = unsafe { libc::atexit(function) };
}
