//! Waits for the accelerator, in the order in which it works, and answers the batches that asked for that.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vm_paravirt::Status;

use super::link::Link;
use super::log::Log;
use super::pace::Turn;
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
    pub(super) turn: Turn,
}

/// What the thread works with.
pub(super) struct Fences<L> {
    pub(super) link: Arc<L>,
    pub(super) log: Arc<Mutex<Log>>,
    pub(super) watch: Watch,
    /// The longest that a launch may take.
    pub(super) deadline: Duration,
}

impl<L: Link> Fences<L> {
    /// Serves batches until there are no more.
    ///
    /// # Errors
    /// When the driver broke the queue, or the accelerator can't be used any more.
    pub(super) fn run(&self, batches: &Receiver<Pending<L::Place>>) -> Result<(), String> {
        // What failed behind a fence that the guest did not ask for, for the next that it did.
        let mut failed = None;
        while let Ok(mut pending) = batches.recv() {
            let mut lost = None;
            for fence in std::mem::take(&mut pending.executed.fences) {
                let limit =
                    self.deadline.saturating_mul(fence.launches.saturating_add(1)).saturating_add(GRACE);
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
                    self.log
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .add(batch, operation, status, text);
                    failed.get_or_insert(status);
                }
                if let Some(operation) = fence.operation
                    && let Some(status) = failed.take()
                {
                    pending.executed.answer.set_status(operation, status);
                }
            }
            drop(pending.turn);
            if let Some(reply) = &pending.reply {
                self.link.answer(reply, &pending.executed.answer)?;
            }
            if let Some(text) = lost {
                return Err(text);
            }
        }
        Ok(())
    }
}
