//! A child of this process has no session: neither its connection nor its lanes.

use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

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

/// What each process has of its own. A child that is forked does not wait for a lock in its parent's.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(u64, T)>);

impl<T: Default> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// This process's.
    pub(crate) fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: it is null, or was made below and is never freed.
            if let Some((of, it)) = unsafe { known.as_ref() }
                && *of == generation
            {
                return it;
            }
            let made = Box::into_raw(Box::new((generation, T::default())));
            if self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: it was made just now, and nobody else has it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}
