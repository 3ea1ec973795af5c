//! Ends a running guest from another thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_passthrough::claim::Cancel;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::sys;

/// Ends a running guest: [`request`](Self::request) it from any thread, also before the guest runs. Clones are the
/// same handle.
#[derive(Clone, Debug)]
pub struct Stop(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    requested: Cancel,
    event: EventFd,
    /// Whether the event is another process's, too, which writes to it.
    is_shared: bool,
}

impl Stop {
    /// A handle that nobody has used.
    ///
    /// # Errors
    /// When this process has no file descriptors left.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        Ok(Self(Arc::new(Inner { requested: Cancel::default(), event, is_shared: false })))
    }

    /// That of another process, by its event: requested here once it is there.
    pub(crate) fn received(event: OwnedFd) -> Self {
        let event = sys::event_of(event);
        Self(Arc::new(Inner { requested: Cancel::default(), event, is_shared: true }))
    }

    /// Has a thread do this once it was asked.
    ///
    /// # Errors
    /// When this process has no threads left.
    pub(crate) fn hear(&self, then: impl FnOnce(&Self) + Send + 'static) -> io::Result<()> {
        let this = self.clone();
        let hear = move || {
            let event = sys::borrow(this.event());
            while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&event, PollFlags::IN)], None) {}
            then(&this);
        };
        std::thread::Builder::new().name("stop".into()).spawn(hear).map(drop)
    }

    /// Asks that the guest be ended, as if its power were cut. It can't be taken back. This only stores a flag and
    /// writes to an eventfd.
    pub fn request(&self) {
        self.0.requested.request();
        // It fails only when the counter is full, and then it is readable.
        let _ = self.0.event.write(1);
    }

    /// Whether it was asked.
    pub fn requested(&self) -> bool {
        self.0.requested.is_requested() || self.0.is_shared && sys::signalled(self.event())
    }

    /// What gives up a claim once it was asked.
    pub(crate) fn cancel(&self) -> Cancel {
        self.0.requested.clone()
    }

    /// Whether it was asked, or is until this time has passed.
    pub(super) fn requested_within(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while !self.requested() {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let event = sys::borrow(self.event());
            match poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) | Err(_) if Instant::now() >= until => return self.requested(),
                Ok(_) | Err(_) => {}
            }
        }
        true
    }

    /// Readable once it was asked; it is never read.
    pub(crate) fn event(&self) -> &EventFd {
        &self.0.event
    }
}
