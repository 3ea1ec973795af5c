//! Writes of the hook's in a program's threads, which neither end the program nor the thread.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// A set of signals.
fn set(signals: &[c_int]) -> libc::sigset_t {
    // SAFETY: an all-zero set is one.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    for signal in signals {
        // SAFETY: the set is this function's.
        unsafe { libc::sigaddset(&mut set, *signal) };
    }
    set
}

/// Writes, without the signals that come of a pipe that nobody reads or of a file that may not grow, and without a cancellation of the thread.
///
/// # Errors
/// What `write` says.
pub fn unnoticed<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    const SIGNALS: [c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];
    let (mut pending, mut before, mut state) = (set(&[]), set(&[]), 0);
    // SAFETY: the place is this function's.
    unsafe { pthread_setcancelstate(DISABLE, &mut state) };
    // SAFETY: both sets are this function's.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set(&SIGNALS), &mut before) };
    // SAFETY: the set is this function's.
    unsafe { libc::sigpending(&mut pending) };
    let result = write();
    if result.is_err() {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        for signal in SIGNALS {
            // SAFETY: the set is this function's. What the program left pending is its own.
            if unsafe { libc::sigismember(&pending, signal) } == 0 {
                // SAFETY: the set and the time are this function's, and nothing is written.
                unsafe { libc::sigtimedwait(&set(&[signal]), std::ptr::null_mut(), &now) };
            }
        }
    }
    // SAFETY: the set is what it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    // SAFETY: the state is what it was, and its place this function's.
    unsafe { pthread_setcancelstate(state, &mut state) };
    result
}
