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
        let mut first = self.event();
        first.get_or_insert(event);
        self.stop_locked(first);
    }

    /// Makes the vCPUs leave without an event.
    pub(super) fn stop(&self) {
        self.stop_locked(self.event());
    }

    /// Event, flag and wake-up change together, under the event's lock: [`take`](Self::take) takes all of them or none.
    fn stop_locked(&self, event: MutexGuard<'_, Option<Event>>) {
        self.stopping.store(true, Ordering::Release);
        // It fails only when the counter is full, and then it is readable.
        let _ = self.wake.write(1);
        drop(event);
        self.held.notify_all();
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
        let mut event = self.event();
        self.stopping.store(false, Ordering::Release);
        // It fails when it was not signalled.
        let _ = self.wake.read();
        event.take()
    }

    fn event(&self) -> MutexGuard<'_, Option<Event>> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn an_event_is_taken_whole_or_left_for_the_next_run() {
        const ROUNDS: usize = 20_000;
        let lifecycle = Lifecycle::new().expect("an eventfd");
        let (round, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let wait = |counter: &AtomicUsize, value| {
            while counter.load(Ordering::Acquire) < value {
                std::hint::spin_loop();
            }
        };
        let mut torn = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=ROUNDS {
                    wait(&round, number);
                    lifecycle.announce(Event::Reset);
                    done.store(number, Ordering::Release);
                }
            });
            for number in 1..=ROUNDS {
                round.store(number, Ordering::Release);
                let taken = lifecycle.take().is_some();
                wait(&done, number);
                let stopping = lifecycle.stopping();
                let awake = lifecycle.wake.read().is_ok();
                let kept = lifecycle.take().is_some();
                torn += u32::from((kept, stopping, awake) != (!taken, !taken, !taken));
            }
        });
        assert_eq!(torn, 0, "rounds in which a part of the event was lost");
    }
}
