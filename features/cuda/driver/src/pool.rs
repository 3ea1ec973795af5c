//! Pools: memory that is allocated and freed in the order of a stream.

use crate::{
    error::{Error, Result},
    graph_memory::Wanted,
    memory::{Kind, UNIT},
    state::{self, State},
    stream::Work,
};

/// A pool: what is freed is its device's again at once, but for what the threshold lets it keep.
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// What it keeps of freed memory.
    kept: u64,
    threshold: u64,
    /// The most bytes of its allocations.
    max: u64,
    reuse: [i32; 3],
    high: u64,
}

impl Pool {
    pub(crate) fn new(device: usize) -> Self {
        Self { device, kept: 0, threshold: 0, max: u64::MAX, reuse: [1; 3], high: 0 }
    }
}

impl State {
    fn used_of(&self, pool: u64) -> u64 {
        let of = self
            .spans
            .values()
            .filter(|span| matches!(span.kind, Kind::Pooled { pool: of, .. } if of == pool));
        of.map(|span| span.extent()).sum()
    }

    /// A pool keeps what it may of memory that was freed, and counted as its device's.
    pub(crate) fn keep(&mut self, id: u64, len: u64) {
        let used = self.used_of(id);
        let Some(pool) = self.pools.get_mut(&id) else { return };
        let kept = pool.threshold.saturating_sub(used + pool.kept).min(len);
        pool.kept += kept;
        self.devices[pool.device].used += kept;
    }

    /// Gives all back to a device that its pools keep.
    pub(crate) fn trim_all(&mut self, device: usize) {
        let pools = self.pools.iter().filter(|(_, pool)| pool.device == device);
        let pools: Vec<u64> = pools.map(|(id, _)| *id).collect();
        for pool in pools {
            self.give_up(pool, u64::MAX);
        }
    }

    /// Gives so much at most of what a pool keeps back to its device: how much it was.
    fn give_up(&mut self, id: u64, len: u64) -> u64 {
        let Some(pool) = self.pools.get_mut(&id) else { return 0 };
        let len = pool.kept.min(len);
        pool.kept -= len;
        self.devices[pool.device].used -= len;
        len
    }
}

/// `cuMemAllocAsync`, or `cuMemAllocFromPoolAsync` where there is a pool.
pub(crate) fn alloc(len: usize, pool: Option<u64>, handle: u64) -> Result<u64> {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    state.refuse_implicit(stream)?;
    let context = state.streams[&stream].context;
    if let Some(graph) = state.graph_of(stream)? {
        let device = match pool {
            Some(pool) => state.pools.get(&pool).ok_or(Error::InvalidValue)?.device,
            None => state.contexts[&context].device,
        };
        let at = state.reserve_for(graph, Wanted { device, len: len as u64 })?;
        state.record(stream, Work::Allocate { at })?;
        return Ok(at);
    }
    let pool = pool.unwrap_or(state.devices[state.contexts[&context].device].pool);
    let device = state.pools.get(&pool).ok_or(Error::InvalidValue)?.device;
    let (used, max) = (state.used_of(pool), state.pools.get(&pool).map_or(0, |pool| pool.max));
    let rounded = (len as u64).checked_next_multiple_of(UNIT).and_then(|len| len.checked_add(used));
    if rounded.is_none_or(|len| len > max) {
        return Err(Error::OutOfMemory);
    }
    let taken = state.give_up(pool, (len as u64).checked_next_multiple_of(UNIT).unwrap_or(0));
    let made = state.allocate(device, 0, len as u64, true, |offset| Kind::Pooled { offset, pool });
    let at = made.inspect_err(|_| state.keep(pool, taken))?;
    let used = state.used_of(pool);
    if let Some(pool) = state.pools.get_mut(&pool) {
        pool.high = pool.high.max(used);
    }
    Ok(at)
}

/// `cuMemFreeAsync`.
pub(crate) fn free(at: u64, handle: u64) -> Result {
    let mut state = state::lock();
    let stream = state.stream(handle)?;
    state.refuse_implicit(stream)?;
    if state.is_graphs(at) {
        return state.submit(stream, Work::Unallocate { at }, Vec::new()).map(drop);
    }
    state.refuse_capturing(stream)?;
    match state.spans.get(&at).map(|span| &span.kind) {
        Some(Kind::Pooled { .. } | Kind::Legacy { .. }) => {
            state.submit(stream, Work::Free { at }, Vec::new()).map(drop)
        }
        _ => Err(Error::InvalidValue),
    }
}

/// `cuDeviceGetDefaultMemPool`, or the device's current one.
pub(crate) fn of_device(device: i32, default: bool) -> Result<u64> {
    let state = state::lock();
    let device = &state.devices[state.device(device)?];
    Ok(if default { device.default_pool } else { device.pool })
}

/// `cuDeviceSetMemPool`.
pub(crate) fn set(device: i32, pool: u64) -> Result {
    let mut state = state::lock();
    let device = state.device(device)?;
    if state.pools.get(&pool).is_none_or(|pool| pool.device != device) {
        return Err(Error::InvalidValue);
    }
    state.devices[device].pool = pool;
    Ok(())
}

/// `cuMemPoolCreate`: of any size where `max` is 0.
pub(crate) fn create(device: i32, max: usize) -> Result<u64> {
    let mut state = state::lock();
    let device = state.device(device)?;
    let id = state.id();
    let max =
        if max == 0 { u64::MAX } else { (max as u64).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX) };
    state.pools.insert(id, Pool { max, ..Pool::new(device) });
    Ok(id)
}

/// `cuMemPoolDestroy`: not of a default pool.
pub(crate) fn destroy(pool: u64) -> Result {
    let mut state = state::lock();
    if !state.pools.contains_key(&pool) || state.devices.iter().any(|device| device.default_pool == pool) {
        return Err(Error::InvalidValue);
    }
    state.give_up(pool, u64::MAX);
    state.pools.remove(&pool);
    for device in state.devices.iter_mut().filter(|device| device.pool == pool) {
        device.pool = device.default_pool;
    }
    Ok(())
}

/// Whether it is a pool.
pub(crate) fn known(pool: u64) -> Result {
    if state::lock().pools.contains_key(&pool) { Ok(()) } else { Err(Error::InvalidValue) }
}

/// `cuMemPoolTrimTo`: no more is held than so much, or than is used.
pub(crate) fn trim(pool: u64, keep: usize) -> Result {
    known(pool)?;
    let mut state = state::lock();
    let used = state.used_of(pool);
    let kept = state.pools.get(&pool).map_or(0, |pool| pool.kept);
    state.give_up(pool, kept.saturating_sub((keep as u64).saturating_sub(used)));
    Ok(())
}

/// `cuMemPoolGetAttribute`: whether it is an `int` (those of reuse), and the value.
pub(crate) fn attribute(pool: u64, attribute: i32) -> Result<(bool, u64)> {
    let state = state::lock();
    let known = state.pools.get(&pool).ok_or(Error::InvalidValue)?;
    match attribute {
        1..=3 => Ok((true, known.reuse[attribute as usize - 1] as u64)),
        4 => Ok((false, known.threshold)),
        5 => Ok((false, state.used_of(pool) + known.kept)),
        7 => Ok((false, state.used_of(pool))),
        6 | 8 => Ok((false, known.high)),
        _ => Err(Error::InvalidValue),
    }
}

/// `cuMemPoolSetAttribute`; `value` reads an `int` (true) or a `cuuint64_t`.
pub(crate) fn set_attribute(pool: u64, attribute: i32, value: impl Fn(bool) -> Option<u64>) -> Result {
    let mut state = state::lock();
    let used = state.used_of(pool);
    let known = state.pools.get_mut(&pool).ok_or(Error::InvalidValue)?;
    let value = value((1..=3).contains(&attribute)).ok_or(Error::InvalidValue)?;
    match attribute {
        1..=3 => known.reuse[attribute as usize - 1] = (value != 0).into(),
        4 => known.threshold = value,
        6 | 8 if value == 0 => known.high = used,
        _ => return Err(Error::InvalidValue),
    }
    Ok(())
}
