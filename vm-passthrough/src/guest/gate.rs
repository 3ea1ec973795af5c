//! Whether a guest reaches its device: accesses to BARs, which take no other lock, pass a gate that can be closed.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::DeviceError;

/// How often it is looked whether an access has ended.
pub(super) const POLL: Duration = Duration::from_millis(1);

/// Lets accesses through while it is open. Once it is closed none is under way any more, and none begins.
#[derive(Default)]
pub(super) struct Gate {
    open: AtomicBool,
    /// Held to read by each access that is under way.
    under_way: RwLock<()>,
}

impl Gate {
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Begins an access, which is under way until the answer is dropped; `None` when the gate is closed.
    pub(super) fn enter(&self) -> Option<RwLockReadGuard<'_, ()>> {
        // Those that come after the gate was closed do not take the lock, so that it gets free.
        if !self.is_open() {
            return None;
        }
        let access = self.under_way.read().unwrap_or_else(PoisonError::into_inner);
        self.is_open().then_some(access)
    }

    /// Lets no more accesses through, and waits until those that are under way have ended.
    ///
    /// # Errors
    /// When one does not end within `deadline`. The gate is closed even then; closing it again waits again.
    pub(super) fn close(&self, deadline: Duration) -> Result<(), DeviceError> {
        self.open.store(false, Ordering::Release);
        let until = Instant::now() + deadline;
        loop {
            match self.under_way.try_write() {
                Ok(_) | Err(TryLockError::Poisoned(_)) => return Ok(()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(POLL),
                Err(TryLockError::WouldBlock) => return Err(DeviceError::Stuck { deadline }),
            }
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = !matches!(self.under_way.try_write(), Err(TryLockError::WouldBlock));
        f.debug_struct("Gate").field("open", &self.is_open()).field("idle", &idle).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_waits_for_an_access_until_the_deadline() {
        let gate = Gate::default();
        assert!(gate.enter().is_none());
        gate.open();
        let access = gate.enter().unwrap();
        let (deadline, start) = (Duration::from_millis(20), Instant::now());
        let closed = gate.close(deadline);
        assert!(start.elapsed() >= deadline);
        assert!(matches!(closed, Err(DeviceError::Stuck { deadline: of }) if of == deadline), "{closed:?}");
        assert!(!gate.is_open() && gate.enter().is_none());
        drop(access);
        gate.close(Duration::ZERO).unwrap();
        gate.open();
        assert!(gate.enter().is_some());
    }
}
