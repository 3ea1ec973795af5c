//! Asks a running guest to power itself off.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::sys;

/// A guest's power button: [`press`](Self::press) it from any thread. Clones are the same button.
#[derive(Clone, Debug)]
pub struct PowerButton(Arc<EventFd>);

impl PowerButton {
    /// A button of no machine yet.
    ///
    /// # Errors
    /// When this process has no file descriptors left.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(|event| Self(Arc::new(event)))
    }

    /// That of another process.
    pub(crate) fn received(event: OwnedFd) -> Self {
        Self(Arc::new(sys::event_of(event)))
    }

    /// Presses it. Whether the guest powers off, and when, is its own affair: one that does not listen yet, as its driver has
    /// not started, or not any more, never hears of it. It may be pressed again, and does nothing while no guest runs.
    pub fn press(&self) {
        // It fails only when the counter is full, and then it is signalled.
        let _ = self.0.write(1);
    }

    /// Signalled when it is pressed.
    pub(crate) fn event(&self) -> &EventFd {
        &self.0
    }
}
