//! What a submitted job leaves behind: its stage, its result, and who waits for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::sync::{self, AtomicBool, Condvar, Mutex, Ordering, lock, wait_until};
use crate::error::{Error, Result};

enum Stage<R> {
    Queued,
    Running,
    Done(Result<R>),
    Taken,
}

struct Progress<R> {
    stage: Stage<R>,
    waker: Option<Waker>,
    /// Whether somebody may sleep until the stage changes.
    awaited: bool,
}

/// The state that a job's runner and its holder share.
pub(crate) struct Cell<R> {
    progress: Mutex<Progress<R>>,
    changed: Condvar,
    /// Whether the job has ended, for who looks without the lock.
    ended: AtomicBool,
}

impl<R> Cell<R> {
    pub(crate) fn new() -> Self {
        Self {
            progress: Mutex::new(Progress { stage: Stage::Queued, waker: None, awaited: false }),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
        }
    }

    /// Queued to running; false when the job was cancelled.
    pub(crate) fn start(&self) -> bool {
        let mut progress = lock(&self.progress);
        let is_queued = matches!(progress.stage, Stage::Queued);
        if is_queued {
            progress.stage = Stage::Running;
        }
        is_queued
    }

    /// Leaves the result. Later results of the same job are dropped.
    pub(crate) fn complete(&self, result: Result<R>) {
        self.finish(result, false);
    }

    /// Leaves `result`; with `queued_only`, if the job has not started. True when it was left.
    fn finish(&self, result: Result<R>, queued_only: bool) -> bool {
        let mut progress = lock(&self.progress);
        let open = match progress.stage {
            Stage::Queued => true,
            Stage::Running => !queued_only,
            Stage::Done(_) | Stage::Taken => false,
        };
        if !open {
            return false;
        }
        progress.stage = Stage::Done(result);
        let (waker, awaited) = (progress.waker.take(), progress.awaited);
        self.ended.store(true, Ordering::Release);
        drop(progress);
        if awaited {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Makes a queued job end as cancelled. False when it runs or has ended.
    pub(crate) fn cancel(&self) -> bool {
        self.finish(Err(Error::Cancelled), true)
    }

    /// Waits for the result; `None` when the deadline passes first.
    ///
    /// At first it only polls: to be woken takes longer than a short job.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Result<R>> {
        sync::spin_until(|| self.ended.load(Ordering::Acquire));
        let mut progress = lock(&self.progress);
        loop {
            match std::mem::replace(&mut progress.stage, Stage::Taken) {
                Stage::Done(result) => return Some(result),
                Stage::Taken => return Some(Err(Error::Cancelled)),
                unfinished => progress.stage = unfinished,
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            progress.awaited = true;
            progress = wait_until(&self.changed, progress, deadline);
        }
    }

    /// Waits for the end; false when the deadline passes first.
    fn ends_by(&self, deadline: Instant) -> bool {
        sync::spin_until(|| self.ended.load(Ordering::Acquire));
        let mut progress = lock(&self.progress);
        while !self.ended.load(Ordering::Acquire) {
            if Instant::now() >= deadline {
                return false;
            }
            progress.awaited = true;
            progress = wait_until(&self.changed, progress, Some(deadline));
        }
        true
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Result<R>> {
        let mut progress = lock(&self.progress);
        match std::mem::replace(&mut progress.stage, Stage::Taken) {
            Stage::Done(result) => Poll::Ready(result),
            Stage::Taken => Poll::Ready(Err(Error::Cancelled)),
            unfinished => {
                progress.stage = unfinished;
                progress.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// The runner's end of a job: if it goes away without a result, the job ends as stopped.
pub(crate) struct Completer<R>(pub(crate) Arc<Cell<R>>);

impl<R> Completer<R> {
    pub(crate) fn complete(&self, result: Result<R>) {
        self.0.complete(result);
    }
}

impl<R> Drop for Completer<R> {
    fn drop(&mut self) {
        self.0.complete(Err(Error::Stopped));
    }
}

/// A job that was submitted: a future of its result.
///
/// Dropping it lets the job run all the same; [`Job::cancel`] takes back one that has not started.
#[must_use = "the job runs all the same, but its error is lost"]
pub struct Job<R>(pub(crate) Arc<Cell<R>>);

impl<R> Job<R> {
    /// Takes the job back, if it has not started; its result is then [`Error::Cancelled`]. True when it was taken back.
    pub fn cancel(&self) -> bool {
        self.0.cancel()
    }

    /// Whether the job has ended. It only polls: nothing is waited for, and nobody need be woken.
    pub fn is_done(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    /// Waits until the job has ended, or `deadline`: whether it has. It is neither taken back nor is its result taken.
    pub fn ends_by(&self, deadline: Instant) -> bool {
        self.0.ends_by(deadline)
    }

    /// Waits for the result until `deadline`.
    ///
    /// # Errors
    /// The job's own error, or [`Error::Deadline`]: then a job that had not started is taken back, and one that runs
    /// goes on.
    pub fn wait(self, deadline: Instant) -> Result<R> {
        if let Some(result) = self.0.wait(Some(deadline)) {
            return result;
        }
        let late = Error::Deadline { what: "a job on the worker".into() };
        if self.0.cancel() {
            return Err(late);
        }
        // It may have ended just now.
        self.0.wait(Some(deadline)).unwrap_or(Err(late))
    }
}

impl<R> Future for Job<R> {
    type Output = Result<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

impl<R> fmt::Debug for Job<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match lock(&self.0.progress).stage {
            Stage::Queued => "queued",
            Stage::Running => "running",
            Stage::Done(_) => "done",
            Stage::Taken => "taken",
        };
        f.debug_tuple("Job").field(&stage).finish()
    }
}
