//! A job that may be waited for more than once, and by several threads.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use vm_accel::{Error, Job, Result};

enum State<R> {
    Waiting(Job<R>),
    Ended(Result<R>),
}

/// Whom the job's end wakes.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    ends: Condvar,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *lock(&self.rung) = true;
        self.ends.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job, and its result once it has ended.
pub(crate) struct Pending<R> {
    state: Mutex<State<R>>,
    bell: Arc<Bell>,
}

impl<R: Clone> Pending<R> {
    pub(crate) fn new(job: Job<R>) -> Self {
        Self { state: Mutex::new(State::Waiting(job)), bell: Arc::default() }
    }

    /// The result, if the job has ended; else its end rings the bell.
    pub(crate) fn ended(&self) -> Option<Result<R>> {
        let mut state = lock(&self.state);
        if let State::Waiting(job) = &mut *state {
            let waker = Waker::from(Arc::clone(&self.bell));
            match Pin::new(job).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => *state = State::Ended(result),
                Poll::Pending => return None,
            }
        }
        if let State::Ended(result) = &*state { Some(result.clone()) } else { None }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// The job's own, or [`Error::Deadline`]; it goes on then.
    pub(crate) fn wait(&self, deadline: Instant) -> Result<R> {
        loop {
            if let Some(result) = self.ended() {
                return result;
            }
            let mut rung = lock(&self.bell.rung);
            while !*rung {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::Deadline { what: "the job".into() });
                }
                rung = self.bell.ends.wait_timeout(rung, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Takes the job back, if it has not started.
    pub(crate) fn cancel(&self) -> bool {
        match &*lock(&self.state) {
            State::Waiting(job) => job.cancel(),
            State::Ended(_) => false,
        }
    }
}
