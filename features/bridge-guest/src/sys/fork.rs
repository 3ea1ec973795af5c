//! A child of this process has no session: neither its connection nor its lanes.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// How many forks are between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The connection's descriptor; none where it is negative.
static CONNECTION: AtomicI32 = AtomicI32::new(-1);

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    let connection = CONNECTION.swap(-1, Ordering::SeqCst);
    if connection >= 0 {
        // SAFETY: it is this process's copy of the connection, which nobody else closes.
        unsafe { libc::close(connection) };
    }
}

/// Has children close their copy of a connection: else the server would not see that this process has ended.
pub(crate) fn close_in_children(connection: i32) {
    generation();
    CONNECTION.store(connection, Ordering::SeqCst);
}

/// Ends what is ended in the process that began it alone.
pub(crate) fn end<T>(what: &mut ManuallyDrop<T>) {
    // SAFETY: its owner is being dropped, and uses it no more.
    unsafe { ManuallyDrop::drop(what) };
}

/// Which process this is, counted by forks.
pub(crate) fn generation() -> u64 {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the handler changes one atomic.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
    GENERATION.load(Ordering::SeqCst)
}
