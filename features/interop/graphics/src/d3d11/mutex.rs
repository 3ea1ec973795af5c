//! Turns by the keyed mutex of a resource.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vm_accel::{
    Accelerator, Error, ExternalSemaphore, Link, Mapped, OsHandle, RefusedResource, Registered, Result,
    SemaphoreKind, Shareable, Timeline, Worker,
};
use windows::Win32::Graphics::Direct3D11::ID3D11Resource;

use super::sys;

/// A registered resource that was not mapped.
type Refused<A, R> = Box<RefusedResource<Registered<A, R>>>;

/// What the keys have with which graphics releases a mutex: those of workers count from 1.
const GRAPHICS: u64 = 1 << 63;

/// A resource's keyed mutex, on graphics' side.
pub(super) struct KeyedMutex {
    handle: sys::Mutex,
    keys: Mutex<Keys>,
    timeout: Duration,
}

#[derive(Default)]
struct Keys {
    /// With which it was released last, but for turns of the worker since; 0 is that of a new one.
    last: u64,
    /// How often graphics released it.
    released: u64,
    /// The last of the worker's that graphics acquired it with.
    seen: u64,
}

impl Keys {
    /// With which it is acquired next, where a link has promised so much.
    fn next(&self, promised: u64) -> u64 {
        if promised > self.seen { promised } else { self.last }
    }
}

impl KeyedMutex {
    pub(super) fn of(resource: &ID3D11Resource, timeout: Duration) -> Result<Self> {
        Ok(Self { handle: sys::Mutex::of(resource)?, keys: Mutex::default(), timeout })
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acquires it behind the worker's turns so far.
    fn acquire(&self, promised: u64) -> Result<()> {
        let key = self.keys().next(promised);
        // Meanwhile the worker may end, and release it with that key.
        if !self.handle.acquire(key, vm_accel::deadline(self.timeout))? {
            return Err(Error::Deadline { what: format!("the keyed mutex with key {key}") });
        }
        let mut keys = self.keys();
        keys.seen = promised.max(keys.seen);
        Ok(())
    }

    fn release(&self) -> Result<()> {
        let mut keys = self.keys();
        let key = GRAPHICS | (keys.released + 1);
        self.handle.release(key)?;
        keys.released += 1;
        keys.last = key;
        Ok(())
    }
}

impl Timeline for KeyedMutex {
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        let acquired = self.handle.acquire(value, deadline)?;
        if acquired {
            self.handle.release(value)?;
        }
        Ok(acquired)
    }

    /// Releases it with a key in the worker's place, unless that was done.
    fn signal(&self, value: u64) -> Result<()> {
        let keys = self.keys();
        let now = Instant::now();
        if keys.seen >= value {
            return Ok(());
        }
        if self.handle.acquire(value, now)? || self.handle.acquire(keys.last, now)? {
            return self.handle.release(value);
        }
        Err(Error::Deadline { what: format!("the keyed mutex with key {:#x}", keys.last) })
    }
}

/// The turns of a worker at a resource by its keyed mutex. Dropping them leaves the mutex as the worker released it last.
pub struct MutexTurns<A: Accelerator> {
    link: Link<A>,
    mutex: Arc<KeyedMutex>,
}

impl<A: Accelerator> MutexTurns<A> {
    pub(super) fn new(worker: &Worker<A>, mutex: &Arc<KeyedMutex>, handle: OsHandle) -> Result<Self> {
        let kind = SemaphoreKind::D3d11KeyedMutex;
        let link =
            worker.link_mutex(ExternalSemaphore { fd: Some(handle), kind, host: Arc::clone(mutex) as _ })?;
        // The keys of another link's turns mean nothing to this one.
        mutex.keys().seen = 0;
        Ok(Self { link, mutex: Arc::clone(mutex) })
    }

    /// The registered resource for graphics, which waits on the host until the worker has released the mutex, and holds it.
    ///
    /// # Errors
    /// [`Error::Deadline`]; [`Error::Lost`] where the worker's device is gone; the driver's.
    pub fn acquire<'a, R: Shareable>(&'a self, registered: &'a Registered<A, R>) -> Result<Held<'a, R>> {
        self.mutex.acquire(self.link.promised())?;
        Ok(Held { mutex: Some(&self.mutex), resource: registered.resource() })
    }

    /// Gives the resource to kernels: what the worker is given from here on begins when it has acquired the mutex that graphics released.
    ///
    /// # Errors
    /// As [`Registered::map`].
    pub fn map<R: Shareable>(&self, registered: Registered<A, R>) -> Result<Mapped<A, R>, Refused<A, R>> {
        // The link has its lock when it takes that of the keys.
        let promised = self.link.promised();
        let key = self.mutex.keys().next(promised);
        registered.map(&self.link, key)
    }
}

impl<A: Accelerator> Drop for MutexTurns<A> {
    fn drop(&mut self) {
        let promised = self.link.promised();
        let mut keys = self.mutex.keys();
        keys.last = keys.next(promised);
    }
}

impl<A: Accelerator> fmt::Debug for MutexTurns<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexTurns").field("link", &self.link).finish_non_exhaustive()
    }
}

/// A resource whose keyed mutex graphics holds. Dropping it releases the mutex.
#[must_use = "dropping it releases the mutex"]
pub struct Held<'a, R> {
    mutex: Option<&'a KeyedMutex>,
    resource: &'a R,
}

impl<R> Held<'_, R> {
    /// The resource.
    pub fn resource(&self) -> &R {
        self.resource
    }

    /// Ends graphics' turn, behind what its context was given.
    ///
    /// # Errors
    /// The driver's.
    pub fn release(mut self) -> Result<()> {
        self.mutex.take().map_or(Ok(()), KeyedMutex::release)
    }
}

impl<R> Drop for Held<'_, R> {
    fn drop(&mut self) {
        if let Some(mutex) = self.mutex.take()
            && let Err(error) = mutex.release()
        {
            tracing::warn!(%error, "a keyed mutex is not released");
        }
    }
}

impl<R> fmt::Debug for Held<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("held", &self.mutex.is_some()).finish_non_exhaustive()
    }
}
