//! The primitives that the executor is built from: those of `std`, or loom's when loom checks it.

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{self, Thread},
};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{self, Thread},
};

use std::sync::PoisonError;
use std::time::Instant;

/// Locks, also when a panic poisoned the mutex: no invariant here spans a call that can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification until `deadline`. The caller checks its condition and the clock again.
#[cfg(not(loom))]
pub(crate) fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> MutexGuard<'a, T> {
    match deadline {
        None => condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
        }
    }
}

/// Waits for a notification. loom has no clock, so a deadline never passes under it.
#[cfg(loom)]
pub(crate) fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    _deadline: Option<Instant>,
) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// How long a caller polls before it sleeps: about as long as waking it takes, several times over.
#[cfg(not(loom))]
const POLL: std::time::Duration = std::time::Duration::from_micros(25);

/// Polls for a short time whether something has come about, where another processor may bring it about meanwhile.
#[cfg(not(loom))]
pub(crate) fn spin_until(condition: impl Fn() -> bool) {
    static SEVERAL: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| thread::available_parallelism().is_ok_and(|count| count.get() > 1));
    if condition() || !*SEVERAL {
        return;
    }
    let begin = Instant::now();
    while begin.elapsed() < POLL {
        for _ in 0..8 {
            if condition() {
                return;
            }
            spin_loop();
        }
    }
}

/// loom looks at every order of things; polling first would only make it look at more.
#[cfg(loom)]
pub(crate) fn spin_until(_condition: impl Fn() -> bool) {}

/// A cell that the ring's own protocol guards.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;
