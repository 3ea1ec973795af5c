//! The session of the worker that the calling thread is: what lets a job call its own worker.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr;

use super::session::Session;
use crate::accelerator::Accelerator;

thread_local! {
    /// The worker's number and its session, while it runs.
    static CURRENT: Cell<(u64, *const ())> = const { Cell::new((0, ptr::null())) };
}

/// Runs `f` on a worker's thread, with `session` as what [`with`] finds there.
pub(crate) fn enter<A: Accelerator, R>(id: u64, session: &Session<A>, f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            CURRENT.set((0, ptr::null()));
        }
    }
    CURRENT.set((id, ptr::from_ref(session).cast()));
    let _leave = Leave;
    f()
}

/// Whether the calling thread is the worker with this number.
pub(crate) fn is(id: u64) -> bool {
    CURRENT.try_with(|current| current.get().0 == id).unwrap_or(false)
}

/// Runs `f` with the session, if the calling thread is the worker with this number. Numbers start at 1.
///
/// `A` must be that of the worker that has the number, which its `Shared` sees to.
pub(super) fn with<A: Accelerator, R>(
    shared: &super::Shared<A>,
    f: impl FnOnce(&Session<A>) -> R,
) -> Option<R> {
    let (id, session) = CURRENT.try_with(Cell::get).ok()?;
    if id != shared.id() {
        return None;
    }
    // SAFETY: numbers are never reused, and the thread with this number entered with a session of the same `A`
    // as the `Shared` of this number; it borrows the session until it leaves, on this same thread.
    let session = unsafe { &*session.cast::<Session<A>>() };
    Some(f(session))
}
