//! A child of this process has no session: neither its connection nor its lanes.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many forks are between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
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
