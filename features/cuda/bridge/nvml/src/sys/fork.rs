//! What is done at forks.

/// Has functions called before each fork, and behind it on both sides.
pub(crate) fn at_fork(before: extern "C" fn(), behind: extern "C" fn()) {
    // SAFETY: the library is never unloaded (`nodelete`), so the functions are there then.
    let _ = unsafe { libc::pthread_atfork(Some(before), Some(behind), Some(behind)) };
}
