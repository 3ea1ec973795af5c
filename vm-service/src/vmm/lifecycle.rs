//! How a guest's run ends, and the place where its vCPUs and devices say so.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::error::MachineError;

/// Why a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// It powered itself off.
    Shutdown,
    /// It asked for a reset, and [`OnReboot::End`] was chosen.
    Reboot,
    /// [`MachineHandle::reset`](super::MachineHandle::reset) was called, and [`OnReboot::End`] was chosen.
    Reset,
    /// It crashed beyond its own repair, and [`OnReboot::End`] was chosen.
    TripleFault,
    /// [`Stop::request`](super::Stop::request) was called.
    Stopped,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shutdown => "the guest powered itself off",
            Self::Reboot => "the guest asked for a reboot",
            Self::Reset => "the guest was reset",
            Self::TripleFault => "the guest crashed (triple fault)",
            Self::Stopped => "the guest's power was cut",
        })
    }
}

/// What to do when the guest asks for a reset, is reset, or crashes into one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnReboot {
    /// Restart it in place: devices reset, RAM loaded again.
    #[default]
    Restart,
    /// End the run.
    End,
}

/// Why the vCPUs were stopped.
#[derive(Debug)]
pub(super) enum Event {
    Shutdown,
    Reboot,
    Reset,
    TripleFault,
    Failed(MachineError),
}

/// Where vCPUs and devices announce the end. The first event counts.
pub(super) struct Lifecycle {
    stopping: AtomicBool,
    event: Mutex<Option<Event>>,
    wake: EventFd,
    /// Wakes those who are [held](Self::hold).
    held: Condvar,
}

impl Lifecycle {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            stopping: AtomicBool::new(false),
            event: Mutex::new(None),
            wake: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            held: Condvar::new(),
        })
    }

    /// Announces an event; every vCPU then leaves the guest as soon as it notices.
    pub(super) fn announce(&self, event: Event) {
        self.event().get_or_insert(event);
        self.stop();
    }

    /// Makes the vCPUs leave without an event.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // It fails only when the counter is full, and then it is readable.
        let _ = self.wake.write(1);
        self.wake_held();
    }

    /// Holds a vCPU's access while `waits`, at most until vCPUs are to leave; whether it may go on.
    pub(super) fn hold(&self, waits: impl Fn() -> bool) -> bool {
        let mut event = self.event();
        while waits() {
            if self.stopping() {
                return false;
            }
            event = self.held.wait(event).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Has those who are held look again.
    pub(super) fn wake_held(&self) {
        // Who is about to wait has the lock until it does.
        drop(self.event());
        self.held.notify_all();
    }

    /// Whether vCPUs are to leave.
    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Readable once an event was announced.
    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Takes the event and makes ready for another run.
    pub(super) fn take(&self) -> Option<Event> {
        self.stopping.store(false, Ordering::Release);
        // It fails when it was not signalled.
        let _ = self.wake.read();
        self.event().take()
    }

    fn event(&self) -> MutexGuard<'_, Option<Event>> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
