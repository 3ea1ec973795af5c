//! A single-thread executor: jobs come from any thread and run on one, in the order in which they came.
//!
//! It knows no accelerator: `C` is whatever the running thread owns. The wake-up is Dekker's: the running thread says
//! that it sleeps and then looks at the ring once more; a pusher pushes and then looks whether it sleeps; a full fence
//! stands between on both sides, so one of them sees the other.

mod borrow;
pub(crate) mod job;
mod ring;
pub(crate) mod sync;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use job::{Cell, Completer, Job};
pub(crate) use ring::Refused;
use ring::Ring;
use sync::{AtomicBool, AtomicU64, Mutex, Ordering, Thread, fence, lock, thread};

/// What the running thread does when no command is ready.
pub(crate) enum Idle {
    /// Poll again at once.
    Poll,
    /// Poll again after at most this time.
    Within(Duration),
    /// Sleep until a command comes.
    Sleep,
}

pub(crate) struct Executor<C> {
    ring: Ring<C>,
    sleeping: AtomicBool,
    runner: Mutex<Option<Thread>>,
    /// The position of the command that runs, or will run next.
    position: AtomicU64,
}

impl<C: 'static> Executor<C> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            ring: Ring::new(capacity),
            sleeping: AtomicBool::new(false),
            runner: Mutex::new(None),
            position: AtomicU64::new(0),
        }
    }

    /// How many commands may wait.
    pub(crate) fn capacity(&self) -> usize {
        self.ring.capacity()
    }

    /// Every command pushed so far has a position below this.
    pub(crate) fn tail(&self) -> u64 {
        self.ring.tail()
    }

    /// The position of the command that runs, or will run next: all commands below it have run.
    pub(crate) fn position(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// Whether no command waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.ring.is_idle()
    }

    /// Whether none waits behind the command that runs.
    pub(crate) fn runs_the_last(&self) -> bool {
        self.ring.tail() <= self.position() + 1
    }

    /// Takes no more commands; `run` returns when those already pushed have run.
    pub(crate) fn close(&self) {
        self.ring.close();
        self.wake();
    }

    /// Appends a command.
    ///
    /// # Errors
    /// The command, when the ring is full or closed.
    pub(crate) fn push<F>(&self, command: F) -> Result<u64, (F, Refused)>
    where
        F: FnOnce(&C) + Send + 'static,
    {
        let position = self.ring.push(command)?;
        self.wake();
        Ok(position)
    }

    /// Appends a command, waiting for room until `deadline`.
    ///
    /// # Errors
    /// [`Error::Stopped`], or [`Error::QueueFull`] when no room came in time.
    pub(crate) fn push_by<F>(&self, mut command: F, deadline: Instant) -> Result<u64>
    where
        F: FnOnce(&C) + Send + 'static,
    {
        let mut tries = 0u32;
        loop {
            match self.push(command) {
                Ok(position) => return Ok(position),
                Err((_, Refused::Closed)) => return Err(Error::Stopped),
                Err((back, Refused::Full)) => command = back,
            }
            tries += 1;
            match tries {
                0..64 => sync::spin_loop(),
                64..128 => thread::yield_now(),
                _ => {
                    if Instant::now() >= deadline {
                        return Err(Error::QueueFull { capacity: self.capacity() });
                    }
                    rest();
                }
            }
        }
    }

    /// Submits a job.
    ///
    /// # Errors
    /// [`Error::QueueFull`] at once when there is no room; [`Error::Stopped`].
    pub(crate) fn submit<F, R>(&self, f: F) -> Result<Job<R>>
    where
        F: FnOnce(&C) -> Result<R> + Send + 'static,
        R: Send + 'static,
    {
        let cell = Arc::new(Cell::new());
        let completer = Completer(Arc::clone(&cell));
        let command = move |context: &C| {
            if completer.0.start() {
                completer.complete(guarded(|| f(context)));
            }
        };
        match self.push(command) {
            Ok(_) => Ok(Job(cell)),
            Err((_, Refused::Closed)) => Err(Error::Stopped),
            Err((_, Refused::Full)) => Err(Error::QueueFull { capacity: self.capacity() }),
        }
    }

    /// Runs commands on this thread until the executor is closed and empty. `idle` is asked when none is ready, and
    /// now and then between commands.
    pub(crate) fn run(&self, context: &C, mut idle: impl FnMut() -> Idle) {
        *lock(&self.runner) = Some(thread::current());
        let mut in_a_row = 0u32;
        loop {
            if self.ring.run_one(Some(context), |position| self.position.store(position, Ordering::Relaxed)) {
                in_a_row += 1;
                if in_a_row.is_multiple_of(64) {
                    // What `idle` looks after must not starve while commands keep coming.
                    idle();
                }
                continue;
            }
            if self.ring.is_finished() {
                self.position.store(self.ring.head(), Ordering::Relaxed);
                break;
            }
            if !self.ring.is_idle() {
                // A pusher has claimed its slot and is about to fill it; or the ring was closed just now.
                pause();
                continue;
            }
            self.position.store(self.ring.head(), Ordering::Relaxed);
            match idle() {
                Idle::Poll => pause(),
                Idle::Within(time) => self.sleep(Some(time)),
                Idle::Sleep => self.sleep(None),
            }
        }
    }

    fn sleep(&self, time: Option<Duration>) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.ring.is_idle() {
            park(time);
        }
        self.sleeping.store(false, Ordering::Relaxed);
    }

    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(runner) = lock(&self.runner).as_ref()
        {
            runner.unpark();
        }
    }
}

/// Runs `f`; a panic becomes an error, whatever was thrown.
pub(crate) fn guarded<R>(f: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(Error::from_panic(panic)))
}

#[cfg(not(loom))]
fn park(time: Option<Duration>) {
    match time {
        Some(time) => thread::park_timeout(time),
        None => thread::park(),
    }
}

#[cfg(loom)]
fn park(_time: Option<Duration>) {
    thread::park();
}

#[cfg(not(loom))]
fn pause() {
    sync::spin_loop();
}

#[cfg(loom)]
fn pause() {
    thread::yield_now();
}

#[cfg(not(loom))]
fn rest() {
    thread::sleep(Duration::from_micros(20));
}

#[cfg(loom)]
fn rest() {
    thread::yield_now();
}
