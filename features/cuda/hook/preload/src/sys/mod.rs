//! The C side: the driver's functions, those that stand in their place, and what the dynamic linker asks.
#![allow(unsafe_code)]

mod copies;
mod entry;
mod find;
mod plain;
mod real;
pub(crate) mod reserve;
mod stack;
mod staging;
mod threads;

use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

pub(crate) use real::{Of, Real, export, import, synchronize};
pub(crate) use stack::{InFile, file_of, return_addresses};
pub(crate) use staging::Saved;
pub(crate) use threads::{at_exit, barrier, close, register_barrier, wait_while, wake_all};

/// Reads the environment before the program can change it.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    vm_hook::options::Options::get();
}

static AT_FORK: OnceLock<fn()> = OnceLock::new();

/// Does something in children that the process forks from here on.
pub(crate) fn at_fork(f: fn()) {
    extern "C" fn child() {
        if let Some(f) = AT_FORK.get() {
            f();
        }
    }
    if AT_FORK.set(f).is_ok() {
        // SAFETY: the function is there as long as the library, which nobody unloads; it stores flags and closes a descriptor.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
    }
}

/// Does something, as starting a thread, with all signals blocked.
pub(crate) fn without_signals<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: an all-zero set is one.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut before = all;
    // SAFETY: the set is this function's.
    unsafe { libc::sigfillset(&mut all) };
    // SAFETY: both sets are.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) };
    let result = f();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    result
}

/// Returns how many bytes written to a stream its peer has not read.
pub(crate) fn unread(stream: &UnixStream) -> i32 {
    let mut bytes = 0;
    // SAFETY: the descriptor is open, and the request writes one `int`.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}
