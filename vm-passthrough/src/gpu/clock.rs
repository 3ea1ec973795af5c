//! Time, as the sequences and the ring see it: tests have one of their own, so that they wait for nothing.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A clock that can be waited by.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Time since some moment of the clock's own. It never goes back.
    fn now(&self) -> Duration;
    /// Waits that long.
    fn sleep(&self, time: Duration);
    /// Waits until an eventfd that doesn't block is signalled, and takes the signal, at most that long. Whether it was.
    ///
    /// # Errors
    /// When the system refuses.
    fn wait(&self, event: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool>;
}

/// The host's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct HostClock(Instant);

impl Default for HostClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for HostClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn wait(&self, event: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(event, PollFlags::IN)], Some(&timeout)) {
            // Who waits asks again, as after any wait that was too short.
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(false),
            Ok(_) => take(event),
            Err(error) => Err(error.into()),
        }
    }
}

/// Takes an eventfd's signal, without waiting. Whether there was one.
pub(crate) fn take(event: BorrowedFd<'_>) -> io::Result<bool> {
    match rustix::io::read(event, &mut [0; 8]) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
