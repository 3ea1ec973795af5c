//! Jobs that borrow from the caller's stack: the caller waits until the job has ended, or takes it back unstarted.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::job::{Cell, Completer};
use super::sync::{Mutex, lock};
use super::{Executor, guarded};
use crate::error::{Error, Result};

type Work<'a, C> = Box<dyn FnOnce(&C) -> Result<()> + Send + 'a>;

/// The work of one borrowed job, held in one place: who takes it runs it or drops it.
struct Place<C>(Mutex<Option<Work<'static, C>>>);

impl<C> Place<C> {
    fn take(&self) -> Option<Work<'static, C>> {
        lock(&self.0).take()
    }
}

impl<C: 'static> Executor<C> {
    /// Runs `f` on the running thread and waits for its result. `f` may borrow: this returns only when `f` has ended
    /// or been dropped. If it has not started by `deadline` it is taken back.
    ///
    /// # Errors
    /// What `f` returns, [`Error::Deadline`], [`Error::QueueFull`], [`Error::Stopped`], [`Error::Panicked`].
    pub(crate) fn submit_and_wait<'a, F, R>(&self, deadline: Instant, f: F) -> Result<R>
    where
        F: FnOnce(&C) -> Result<R> + Send + 'a,
        R: Send + 'a,
    {
        let result = Mutex::new(None);
        let slot = &result;
        let work: Work<'_, C> = Box::new(move |context| {
            let value = f(context)?;
            *lock(slot) = Some(value);
            Ok(())
        });
        // SAFETY: only the lifetime changes. `TakeBack` below does not let this function end, not even by a panic,
        // before the work has been taken out of its place and dropped: by itself, or by the running thread, which then
        // completes `cell` after the work is gone.
        let work: Work<'static, C> = unsafe { std::mem::transmute::<Work<'_, C>, Work<'static, C>>(work) };
        let place = Arc::new(Place(Mutex::new(Some(work))));
        let cell = Arc::new(Cell::new());
        let guard = TakeBack { place: &place, cell: &cell };

        let completer = Completer(Arc::clone(&cell));
        let theirs = Arc::clone(&place);
        self.push_by(
            move |context: &C| {
                if let Some(work) = theirs.take() {
                    // `work` is consumed within, so it is gone when the cell says that it ended.
                    completer.complete(guarded(|| work(context)));
                }
            },
            deadline,
        )?;
        let ended = match cell.wait(Some(deadline)) {
            Some(ended) => ended,
            None => match place.take() {
                Some(work) => {
                    std::mem::forget(guard);
                    drop(work);
                    return Err(Error::Deadline { what: "the start of a job on the worker".into() });
                }
                // It has started, so it must end before its borrows do.
                None => cell.wait(None).unwrap_or(Err(Error::Stopped)),
            },
        };
        drop(guard);
        ended?;
        lock(&result).take().ok_or(Error::Stopped)
    }
}

/// Sees to it that the work is gone before the frame that it borrows from.
struct TakeBack<'a, C> {
    place: &'a Place<C>,
    cell: &'a Cell<()>,
}

impl<C> Drop for TakeBack<'_, C> {
    fn drop(&mut self) {
        if self.place.take().is_none() {
            // It ran, or runs. A result already taken reads as ended.
            let _ = self.cell.wait(None);
        }
    }
}
