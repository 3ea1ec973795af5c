//! Host memory that devices can access: allocated or registered.

use crate::{
    error::{Error, Result},
    memory::PAGE,
    state::{self, State},
    sys,
};

/// Host memory known to the driver.
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) flags: u32,
    pub(crate) context: u64,
    pub(crate) device: usize,
    pub(crate) buffer: u64,
    registered: bool,
}

impl Allocation {
    #[cfg(feature = "cpu")]
    pub(crate) fn is_registered(&self) -> bool {
        self.registered
    }
}

impl State {
    /// The host memory at an address, and where it begins.
    pub(crate) fn host_span(&self, at: u64) -> Option<(u64, &Allocation)> {
        let (&start, allocation) = self.host.range(..=at).next_back()?;
        (at - start < allocation.len).then_some((start, allocation))
    }

    /// Whether all of a range is host memory that devices can access.
    pub(crate) fn host_memory(&self, at: u64, len: u64) -> bool {
        self.host_span(at).is_some_and(|(start, allocation)| len <= allocation.len - (at - start))
    }

    fn add_host(&mut self, at: u64, len: u64, flags: u32, context: u64, registered: bool) {
        let (device, buffer) = (self.contexts[&context].device, self.id());
        self.host.insert(at, Allocation { len, flags, context, device, buffer, registered });
    }

    /// Forgets the host memory of a context.
    pub(crate) fn release_host(&mut self, context: u64) {
        let of = self.host.extract_if(.., |_, allocation| allocation.context == context).collect::<Vec<_>>();
        for (at, allocation) in of {
            // Pages that stay cost memory and nothing else.
            let _ = self.release_pages(at, &allocation);
        }
    }

    /// Releases the pages of what was allocated.
    fn release_pages(&mut self, at: u64, allocation: &Allocation) -> Result {
        if !allocation.registered {
            let len = allocation.len.next_multiple_of(PAGE);
            sys::unmap(at, len)?;
            self.arena.give(at, len);
        }
        Ok(())
    }
}

/// `cuMemHostAlloc`.
pub(crate) fn alloc(len: usize, flags: u32) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    if len == 0 || flags & !7 != 0 {
        return Err(Error::InvalidValue);
    }
    state.refuse_in_capture()?;
    let pages = (len as u64).checked_next_multiple_of(PAGE).ok_or(Error::OutOfMemory)?;
    // In the arena, where kernels find it, too.
    let at = state.arena.take(pages, PAGE, 0)?;
    if let Err(error) = sys::map_pages(at, pages) {
        state.arena.give(at, pages);
        return Err(error.into());
    }
    state.add_host(at, len as u64, flags, context, false);
    Ok(at)
}

/// `cuMemFreeHost`: waits for all work of the context's device.
pub(crate) fn free(at: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let allocated = |state: &State| match state.host.get(&at) {
        Some(allocation) if !allocation.registered => Ok(allocation.device),
        _ => Err(Error::InvalidValue),
    };
    let device = allocated(&state)?;
    state.refuse_in_capture()?;
    state = crate::memory::drain_device(state, device)?;
    allocated(&state)?;
    state.host.remove(&at).map_or(Ok(()), |allocation| state.release_pages(at, &allocation))
}

/// `cuMemHostRegister`.
pub(crate) fn register(at: u64, len: usize, flags: u32) -> Result {
    let mut state = state::lock();
    let context = state.current()?;
    let end = at.checked_add(len as u64).ok_or(Error::InvalidValue)?;
    if at < sys::LOWEST || len == 0 || flags & !15 != 0 || state.arena.has(at) {
        return Err(Error::InvalidValue);
    }
    if !sys::is_mapped(at, len as u64) {
        return Err(Error::InvalidValue);
    }
    if state.host_span(at).is_some() || state.host.range(at..end).next().is_some() {
        return Err(Error::HostMemoryAlreadyRegistered);
    }
    state.add_host(at, len as u64, flags, context, true);
    Ok(())
}

/// `cuMemHostUnregister`: waits as [`free`] does.
pub(crate) fn unregister(at: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let registered = |state: &State| match state.host.get(&at) {
        Some(allocation) if allocation.registered => Ok(allocation.device),
        Some(_) => Err(Error::InvalidValue),
        None => Err(Error::HostMemoryNotRegistered),
    };
    let device = registered(&state)?;
    state = crate::memory::drain_device(state, device)?;
    registered(&state)?;
    state.host.remove(&at);
    Ok(())
}

/// `cuMemHostGetDevicePointer`: its own address.
pub(crate) fn device_pointer(at: u64) -> Result<u64> {
    let state = state::lock();
    state.current()?;
    state.host_span(at).map(|_| at).ok_or(Error::InvalidValue)
}

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const DEVICE_MAP: u32 = 2;

/// `cuMemHostGetFlags`.
pub(crate) fn flags(at: u64) -> Result<u32> {
    let state = state::lock();
    state.current()?;
    if state.is_managed(at) {
        return Ok(DEVICE_MAP);
    }
    state.host_span(at).map(|(_, allocation)| allocation.flags).ok_or(Error::InvalidValue)
}
