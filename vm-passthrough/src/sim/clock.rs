//! A clock that only goes when somebody waits.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::gpu::{Clock, take_signal};

/// Time that passes when it is waited for, and not otherwise.
#[derive(Debug, Default)]
pub struct SimClock(Mutex<Duration>);

impl Clock for SimClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += time;
    }

    fn wait(&self, event: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
        let signalled = take_signal(event)?;
        if !signalled {
            self.sleep(timeout);
        }
        Ok(signalled)
    }
}
