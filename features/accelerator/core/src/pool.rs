//! The bookkeeping of a worker's memory: what is free, what lives, and when free memory may be used again.
//!
//! Freed memory carries the position at which its last owner's commands end. A command that comes after that position
//! may use it at once; that is every command which is not yet in the queue. Only a job that already runs must look.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::memory::{Memory, MemoryKind};

/// How a worker's pool gives memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// The most bytes that it holds, in use and free together. Registered memory is the host's and does not count.
    pub limit: u64,
    /// Whether all memory is set to zero before anybody gets it. Set it where a guest will see the memory.
    pub zero: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { limit: u64::MAX, zero: false }
    }
}

/// What a worker's pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Live buffers.
    pub buffers: u64,
    /// Bytes that live buffers hold, rounded up as the pool does.
    pub in_use: u64,
    /// Bytes that are free in the pool.
    pub cached: u64,
    /// The most bytes that were in use at once.
    pub peak: u64,
    /// Allocations that were answered from free memory.
    pub hits: u64,
    /// Allocations that had to ask the device.
    pub misses: u64,
}

/// Small memory is rounded up to quarters of a power of two.
const SMALLEST: u64 = 256;
/// Large memory is rounded up to the granularity of a GPU's page tables.
const LARGE: u64 = 2 << 20;

/// The bytes that the pool sets aside for a buffer of `bytes`; `None` if that is more than there can be.
pub(crate) fn rounded(bytes: u64) -> Option<u64> {
    if bytes >= LARGE {
        return bytes.checked_next_multiple_of(LARGE);
    }
    if bytes <= SMALLEST {
        return Some(SMALLEST);
    }
    let step = bytes.next_power_of_two() / 8;
    bytes.checked_next_multiple_of(step.max(SMALLEST))
}

struct Free {
    memory: Memory,
    ready: u64,
}

#[derive(Default)]
struct Held {
    graphs: u64,
    returned: Option<Memory>,
}

#[derive(Default)]
struct State {
    free: BTreeMap<(MemoryKind, u64), Vec<Free>>,
    held: HashMap<u64, Held>,
    statistics: PoolStatistics,
    /// Bytes in use that are the host's own.
    registered: u64,
    closed: bool,
}

pub(crate) struct Pool {
    state: Mutex<State>,
    options: PoolOptions,
}

/// What the pool answers to a wish for memory.
pub(crate) enum Taken {
    /// Memory, and the position from which it may be used.
    Hit(Memory, u64),
    /// The device must be asked for this many bytes, which are counted as in use already, after what is listed here
    /// has been freed.
    Miss(u64, Vec<Memory>),
}

impl Pool {
    pub(crate) fn new(options: PoolOptions) -> Self {
        Self { state: Mutex::new(State::default()), options }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn zero(&self) -> bool {
        self.options.zero
    }

    /// Takes memory for a buffer. `position` is that of the running command, where a running command asks.
    ///
    /// # Errors
    /// [`Error::PoolLimit`].
    pub(crate) fn take(&self, kind: MemoryKind, bytes: u64, position: Option<u64>) -> Result<Taken> {
        let limit = self.options.limit;
        let mut state = self.lock();
        let Some(size) = rounded(bytes) else {
            let in_use = state.statistics.in_use - state.registered;
            return Err(Error::PoolLimit { bytes, in_use, limit });
        };
        let hit = state.free.get_mut(&(kind, size)).and_then(|free| match position {
            None => free.pop(),
            Some(position) => {
                let index = free.iter().rposition(|free| free.ready <= position)?;
                Some(free.swap_remove(index))
            }
        });
        let in_use = state.statistics.in_use - state.registered;
        if hit.is_none() && in_use.checked_add(size).is_none_or(|sum| sum > limit) {
            return Err(Error::PoolLimit { bytes: size, in_use, limit });
        }
        let statistics = &mut state.statistics;
        statistics.buffers += 1;
        statistics.in_use += size;
        statistics.peak = statistics.peak.max(statistics.in_use);
        if let Some(Free { memory, ready }) = hit {
            statistics.cached -= size;
            statistics.hits += 1;
            return Ok(Taken::Hit(memory, ready));
        }
        statistics.misses += 1;
        let over = (in_use + size).saturating_add(statistics.cached).saturating_sub(limit);
        Ok(Taken::Miss(size, state.evict(over, position)))
    }

    /// Takes back the promise of a [`Taken::Miss`].
    pub(crate) fn missed(&self, size: u64) {
        let mut state = self.lock();
        state.statistics.buffers -= 1;
        state.statistics.in_use -= size;
    }

    /// Gives memory back; commands pushed so far, which end at `ready`, may still use it. Once the pool is closed the
    /// memory is the queue's to free.
    ///
    /// Memory that no pool uses again, since it is the host's, comes back: the device is to let go of it once those
    /// commands have run. What a graph keeps stays here until [`Pool::unhold`], whatever its kind.
    #[must_use]
    pub(crate) fn give(&self, memory: Memory, ready: u64) -> Option<Memory> {
        let mut state = self.lock();
        state.statistics.buffers -= 1;
        state.statistics.in_use -= memory.bytes();
        if memory.kind().is_lent() {
            state.registered -= memory.bytes();
        }
        if !state.held.is_empty()
            && let Some(held) = state.held.get_mut(&memory.address())
        {
            held.returned = Some(memory);
            return None;
        }
        state.put(memory, ready)
    }

    /// Counts registered memory out, which is freed by other means than the pool.
    pub(crate) fn forget(&self, bytes: u64) {
        let mut state = self.lock();
        state.statistics.buffers -= 1;
        state.statistics.in_use -= bytes;
        state.registered -= bytes;
    }

    /// Counts registered memory in, which comes by other means than the pool.
    pub(crate) fn adopt(&self, bytes: u64) {
        let mut state = self.lock();
        state.statistics.buffers += 1;
        state.statistics.in_use += bytes;
        state.registered += bytes;
        state.statistics.peak = state.statistics.peak.max(state.statistics.in_use);
    }

    /// Keeps the memory at an address for a graph, also when its buffer is dropped.
    pub(crate) fn hold(&self, address: u64) {
        self.lock().held.entry(address).or_default().graphs += 1;
    }

    /// Whether a graph keeps the memory at an address.
    pub(crate) fn holds(&self, address: u64) -> bool {
        self.lock().held.contains_key(&address)
    }

    /// Ends what [`Pool::hold`] began. What was freed meanwhile is free now, as [`Pool::give`] says.
    #[must_use]
    pub(crate) fn unhold(&self, address: u64, ready: u64) -> Option<Memory> {
        let mut state = self.lock();
        let held = state.held.get_mut(&address)?;
        held.graphs -= 1;
        if held.graphs > 0 {
            return None;
        }
        let memory = state.held.remove(&address)?.returned?;
        state.put(memory, ready)
    }

    /// Takes all free memory that the running command at `position` may free.
    pub(crate) fn drain(&self, position: u64) -> Vec<Memory> {
        self.lock().evict(u64::MAX, Some(position))
    }

    /// Takes no more memory back, and gives out what is free.
    pub(crate) fn close(&self) -> Vec<Memory> {
        let mut state = self.lock();
        state.closed = true;
        state.evict(u64::MAX, None)
    }

    pub(crate) fn statistics(&self) -> PoolStatistics {
        self.lock().statistics
    }
}

impl State {
    /// Keeps memory for the next owner, unless it is the host's or there will be none.
    fn put(&mut self, memory: Memory, ready: u64) -> Option<Memory> {
        if self.closed {
            return None;
        }
        if memory.kind().is_lent() {
            return Some(memory);
        }
        self.cache(memory, ready);
        None
    }

    fn cache(&mut self, memory: Memory, ready: u64) {
        self.statistics.cached += memory.bytes();
        self.free.entry((memory.kind(), memory.bytes())).or_default().push(Free { memory, ready });
    }

    /// Takes free memory, the largest first, until `bytes` are gathered.
    fn evict(&mut self, bytes: u64, position: Option<u64>) -> Vec<Memory> {
        let mut evicted = Vec::new();
        let mut gathered = 0u64;
        if bytes == 0 {
            return evicted;
        }
        for ((_, size), free) in self.free.iter_mut().rev() {
            let may_go = |free: &Free| position.is_none_or(|position| free.ready <= position);
            while gathered < bytes
                && let Some(index) = free.iter().position(may_go)
            {
                evicted.push(free.swap_remove(index).memory);
                gathered = gathered.saturating_add(*size);
                self.statistics.cached -= *size;
            }
        }
        self.free.retain(|_, free| !free.is_empty());
        evicted
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounding_wastes_at_most_a_quarter(bytes in 1u64..1 << 40) {
            let size = rounded(bytes).unwrap();
            prop_assert!(size >= bytes);
            prop_assert!(size.is_multiple_of(256));
            prop_assert_eq!(rounded(size), Some(size));
            if bytes > 1024 {
                prop_assert!(size - bytes <= bytes / 4 || size - bytes < LARGE && bytes >= LARGE, "{bytes} {size}");
            }
        }
    }

    #[test]
    fn the_limit_is_for_what_the_pool_holds() {
        let pool = Pool::new(PoolOptions { limit: 1000, zero: false });
        pool.adopt(1 << 30);
        assert!(matches!(pool.take(MemoryKind::Device, 700, None), Ok(Taken::Miss(768, _))));
        let error = pool.take(MemoryKind::Device, 256, None).err().unwrap();
        assert_eq!(error, Error::PoolLimit { bytes: 256, in_use: 768, limit: 1000 });
        pool.missed(768);
        pool.forget(1 << 30);
        assert_eq!(pool.statistics().in_use, 0);
        assert!(matches!(
            pool.take(MemoryKind::Device, 1000, None),
            Err(Error::PoolLimit { bytes: 1024, .. })
        ));
    }

    #[test]
    fn nothing_overflows() {
        assert_eq!(rounded(0), Some(256));
        assert_eq!(rounded(u64::MAX), None);
    }
}
