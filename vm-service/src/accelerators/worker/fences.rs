//! Waits for the accelerator, in the order in which it works, and answers the batches that asked for that.
//!
//! What is done soon, the thread that took the batch sees itself, as long as nothing else comes: another thread would have
//! to be woken for it. The rest is left to a thread that sleeps.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vm_paravirt::Status;

use super::link::Link;
use super::log::Log;
use super::pace::Permit;
use super::poll::Poll;
use super::server::{Executed, GRACE};
use super::status;
use super::watch::Watch;

/// A batch that the accelerator works on.
#[derive(Debug)]
pub(super) struct Pending<P> {
    pub(super) executed: Executed,
    /// Where the answer goes, if it waits for the accelerator.
    pub(super) reply: Option<P>,
    /// Ends with it.
    pub(super) permit: Permit,
    /// When the accelerator got it.
    pub(super) since: Instant,
}

impl<P> Pending<P> {
    /// Whether the accelerator has done it.
    fn is_done(&self) -> bool {
        self.executed.fences.iter().all(|fence| fence.job.is_done())
    }
}

/// What batches end with, one after the other.
pub(super) struct Fences<L> {
    link: Arc<L>,
    log: Arc<Mutex<Log>>,
    watch: Watch,
    /// The longest that a launch may take.
    deadline: Duration,
    /// What failed behind a fence that the guest did not ask for, for the next that it did.
    failed: Mutex<Option<Status>>,
    /// Batches that were left to the other thread and have not ended.
    left: AtomicUsize,
    /// How long the last of them took, in nanoseconds; 0 where that was asked already.
    took: AtomicU64,
}

impl<L: Link> Fences<L> {
    pub(super) fn new(link: Arc<L>, log: Arc<Mutex<Log>>, watch: Watch, deadline: Duration) -> Self {
        let (failed, left, took) = (Mutex::new(None), AtomicUsize::new(0), AtomicU64::new(0));
        Self { link, log, watch, deadline, failed, left, took }
    }

    /// Ends a batch, now if it is done while nothing else comes and `poll` polls, or else on the thread that [`run`]s.
    /// Whether that thread is there.
    ///
    /// [`run`]: Self::run
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(super) fn end_soon(
        &self,
        pending: Pending<L::Place>,
        poll: &mut Poll,
        thread: &SyncSender<Pending<L::Place>>,
    ) -> Result<bool, String> {
        // They end in their order. Nobody but this thread adds to those that are left.
        if self.left.load(Ordering::Acquire) == 0 {
            let took = self.took.swap(0, Ordering::Relaxed);
            if took > 0 {
                poll.took(Duration::from_nanos(took));
            }
            poll.until(|| pending.is_done() || self.link.ready());
            if pending.is_done() {
                poll.took(pending.since.elapsed());
                return self.end(pending).map(|()| true);
            }
        }
        self.left.fetch_add(1, Ordering::Relaxed);
        Ok(thread.send(pending).is_ok())
    }

    /// Ends batches until there are no more.
    ///
    /// # Errors
    /// When the driver broke the queue, or the accelerator can't be used any more.
    pub(super) fn run(&self, batches: &Receiver<Pending<L::Place>>) -> Result<(), String> {
        while let Ok(pending) = batches.recv() {
            let since = pending.since;
            self.end(pending)?;
            let took = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.took.store(took, Ordering::Relaxed);
            self.left.fetch_sub(1, Ordering::Release);
        }
        Ok(())
    }

    /// Waits for a batch, and answers it if that was asked for.
    fn end(&self, mut pending: Pending<L::Place>) -> Result<(), String> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lost = None;
        for fence in std::mem::take(&mut pending.executed.fences) {
            let limit = self.deadline.saturating_mul(fence.launches.saturating_add(1)).saturating_add(GRACE);
            let under_way = self.watch.begin("the accelerator's work", limit);
            let now = Instant::now();
            let until = now.checked_add(limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
            let ended = fence.job.wait(until);
            drop(under_way);
            if let Err(error) = ended {
                let (batch, operation) = (pending.executed.batch, fence.operation.unwrap_or(0));
                let (status, text) = (status::of(&error), error.to_string());
                if status == Status::Lost {
                    lost = Some(text.clone());
                }
                self.log.lock().unwrap_or_else(PoisonError::into_inner).add(batch, operation, status, text);
                failed.get_or_insert(status);
            }
            if let Some(operation) = fence.operation
                && let Some(status) = failed.take()
            {
                pending.executed.answer.set_status(operation, status);
            }
        }
        drop(pending.permit);
        if let Some(reply) = &pending.reply {
            self.link.answer(reply, &pending.executed.answer)?;
        }
        lost.map_or(Ok(()), Err)
    }
}
