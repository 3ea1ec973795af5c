//! What threads ask of the system: to wait for a word of memory, and to see each other's stores.

use std::sync::atomic::AtomicU32;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.
const BARRIER: i32 = 1 << 3;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`.
const REGISTER: i32 = 1 << 4;

fn membarrier(command: i32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Lets [`barrier`] be used; false where the system has none.
pub(crate) fn register_barrier() -> bool {
    membarrier(REGISTER)
}

/// Makes all threads of the process pass a full barrier.
pub(crate) fn barrier() -> bool {
    membarrier(BARRIER)
}

/// Waits while a word is a value. It may return early, and a handler of a signal may run meanwhile.
pub(crate) fn wait_while(word: &AtomicU32, value: u32) {
    let none = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is there as long as it is borrowed, and no time is given.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            value,
            none,
        )
    };
}

/// Wakes all that wait for a word.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: the word is borrowed.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX)
    };
}

/// Calls a function when the process exits, before what was registered so far.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: the function is there as long as the library, which nobody unloads. Where it can't be registered, nothing is called.
    unsafe { libc::atexit(f) };
}

/// Closes a descriptor in a child that was forked, in which nobody else uses it; -1 is none.
pub(crate) fn close(descriptor: i32) {
    if descriptor >= 0 {
        // SAFETY: it is the child's copy, whose owner is a thread of the parent.
        unsafe { libc::close(descriptor) };
    }
}
