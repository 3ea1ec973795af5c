//! The end of a worker, which any number of threads may wait for: each gets the same answer.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};

/// What a worker's end came to, once it has ended.
#[derive(Default)]
pub(super) struct End {
    outcome: Mutex<Option<Result<()>>>,
    ended: Condvar,
}

impl End {
    /// Waits for the end; `None` when the deadline passes first.
    pub(super) fn wait(&self, deadline: Instant) -> Option<Result<()>> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        while outcome.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            outcome = self.ended.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        outcome.clone()
    }

    fn set(&self, result: Result<()>) {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(result);
        self.ended.notify_all();
    }
}

/// The worker's side of it: if it goes away without a word, the worker has ended as stopped.
pub(super) struct Ending(pub(super) Arc<End>);

impl Ending {
    pub(super) fn complete(&self, result: Result<()>) {
        self.0.set(result);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.set(Err(Error::Stopped));
    }
}
