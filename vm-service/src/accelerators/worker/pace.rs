//! The guest's leave to use the accelerator: with a time slice, one batch at a time, and none while the guest owes time.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::budget::Budget;
use crate::accelerators::meter::{self, Meter};

/// What the guest has used of its time.
#[derive(Debug)]
pub(super) struct Pace {
    state: Mutex<State>,
    changed: Condvar,
    /// Where it is kept for the next worker.
    meter: Meter,
}

#[derive(Debug)]
struct State {
    budget: Budget,
    /// Since when the accelerator has worked for the guest, if it does.
    since: Option<Duration>,
    /// The processor time of this process at that point.
    computed: Duration,
}

/// The processor time that this process has taken, all threads together.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// The guest's leave to use the accelerator. What passes until it is dropped is of its time.
#[derive(Debug)]
pub(super) struct Permit(Option<Arc<Pace>>);

impl Pace {
    /// Goes on where the worker before ended.
    ///
    /// # Errors
    /// When that can't be read.
    pub(super) fn new(slice: Duration, meter: Meter) -> Result<Self, String> {
        let reading = meter.read().map_err(|error| format!("the guest's time can't be read: {error}"))?;
        let now = meter::now();
        let budget = match reading {
            Some(reading) => Budget::resume(slice, now, &reading),
            None => Budget::new(slice, now),
        };
        Ok(Self {
            state: Mutex::new(State { budget, since: None, computed: Duration::ZERO }),
            changed: Condvar::new(),
            meter,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the guest may go on. With a time slice that is when nothing of its work is under way, so that its
    /// time can be measured, and it has time left.
    pub(super) fn permit(self: &Arc<Self>) -> Permit {
        let mut state = self.state();
        if !state.budget.limits() {
            return Permit(None);
        }
        loop {
            if state.since.is_some() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let now = meter::now();
            let wait = state.budget.wait(now);
            if wait.is_zero() {
                state.since = Some(now);
                state.computed = processor_time();
                self.keep(&state);
                return Permit(Some(self.clone()));
            }
            drop(state);
            std::thread::sleep(wait);
            state = self.state();
        }
    }

    fn end(&self, used: impl FnOnce(&State, Duration) -> Duration) {
        let mut state = self.state();
        let now = meter::now();
        if let Some(since) = state.since.take() {
            let used = used(&state, now.saturating_sub(since));
            state.budget.spend(used, now);
        }
        self.keep(&state);
        drop(state);
        self.changed.notify_all();
    }

    fn keep(&self, state: &State) {
        if let Err(error) = self.meter.write(&state.budget.reading(state.since)) {
            tracing::error!(%error, "the guest's time can't be kept for its next worker");
        }
    }
}

impl Permit {
    /// Ends it with the accelerator not used: the processor time that passed is of the guest's time, in which its modules
    /// were compiled.
    pub(super) fn computed(mut self) {
        if let Some(pace) = self.0.take() {
            pace.end(|state, _| processor_time().saturating_sub(state.computed));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(pace) = self.0.take() {
            pace.end(|_, passed| passed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn a_worker_that_is_killed_leaves_its_debt() {
        let kept = Meter::new().unwrap();
        let pace = |slice| Arc::new(Pace::new(slice, kept.try_clone().unwrap()).unwrap());
        let first = pace(20 * MILLISECOND);
        first.permit().computed();
        assert!(kept.read().unwrap().unwrap().balance > 0);
        // The process ends in the middle of a batch.
        std::mem::forget(first.permit());
        std::thread::sleep(60 * MILLISECOND);
        kept.settle(meter::now()).unwrap();
        let (second, begin) = (pace(20 * MILLISECOND), Instant::now());
        drop(second.permit());
        // Of the 60 ms it had 40 at most.
        assert!(begin.elapsed() >= 90 * MILLISECOND, "{:?}", begin.elapsed());
        // Who has no slice owes nothing.
        let begin = Instant::now();
        let free = pace(crate::config::TIME_PERIOD);
        let permits = [free.permit(), free.permit()];
        assert!(begin.elapsed() < Duration::from_secs(60));
        drop(permits);
    }

    #[test]
    fn without_the_accelerator_what_was_computed_counts() {
        let pace = Arc::new(Pace::new(10 * MILLISECOND, Meter::new().unwrap()).unwrap());
        let permit = pace.permit();
        let begin = processor_time();
        while processor_time() - begin < 60 * MILLISECOND {
            std::hint::spin_loop();
        }
        permit.computed();
        let begin = Instant::now();
        pace.permit().computed();
        // Of the 60 ms it had 10 and what came meanwhile.
        assert!(begin.elapsed() >= 300 * MILLISECOND, "{:?}", begin.elapsed());
    }

    #[test]
    fn one_batch_is_under_way_at_a_time() {
        let pace = Arc::new(Pace::new(99 * MILLISECOND, Meter::new().unwrap()).unwrap());
        let permit = pace.permit();
        let other = pace.clone();
        let thread = std::thread::spawn(move || drop(other.permit()));
        std::thread::sleep(50 * MILLISECOND);
        assert!(!thread.is_finished());
        drop(permit);
        thread.join().unwrap();
    }
}
