//! Waits for the accelerator, in the order in which it works, and answers the batches that asked for that.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vm_paravirt::Status;

use super::budget::Budget;
use super::link::Link;
use super::log::Log;
use super::server::{Executed, GRACE};
use super::status;
use super::watch::Watch;

/// A batch that the accelerator works on.
#[derive(Debug)]
pub(super) struct Pending<P> {
    pub(super) executed: Executed,
    /// Where the answer goes, if it waits for the accelerator.
    pub(super) reply: Option<P>,
    /// When its operations were begun.
    pub(super) begun: Instant,
}

/// How far the accelerator is behind, and what it has used of its time.
#[derive(Debug)]
pub(super) struct Pace {
    state: Mutex<(usize, Budget)>,
    changed: Condvar,
}

impl Pace {
    pub(super) fn new(slice: Duration) -> Self {
        Self { state: Mutex::new((0, Budget::new(slice, Instant::now()))), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, (usize, Budget)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the guest may go on. With a time slice that is when nothing of its work is under way, so that its
    /// time can be told, and it has time left.
    pub(super) fn wait(&self) {
        let mut state = self.state();
        if !state.1.limits() {
            return;
        }
        loop {
            if state.0 > 0 {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let wait = state.1.wait(Instant::now());
            if wait.is_zero() {
                return;
            }
            drop(state);
            std::thread::sleep(wait);
            state = self.state();
        }
    }

    /// A batch is under way.
    pub(super) fn begin(&self) {
        self.state().0 += 1;
    }

    /// A batch that was under way is done.
    fn end(&self, used: Duration) {
        let mut state = self.state();
        state.0 = state.0.saturating_sub(1);
        state.1.spend(used, Instant::now());
        drop(state);
        self.changed.notify_all();
    }
}

/// What the thread works with.
pub(super) struct Fences<L> {
    pub(super) link: Arc<L>,
    pub(super) pace: Arc<Pace>,
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
            self.pace.end(pending.begun.elapsed());
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
