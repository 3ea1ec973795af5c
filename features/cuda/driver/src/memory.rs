//! Device memory by address: the arena that addresses come from, the table of what is mapped, and legacy allocations.
//!
//! Addresses are of this process. What is not mapped is inaccessible to all, as is what is mapped without access; what is
//! mapped with access is pages of a memory file, so that the same memory can be at several addresses and in other processes.

use crate::{
    error::{Error, Result},
    state::{self, State},
    sys::{self, Access, Range},
};
use std::{collections::BTreeMap, ops::Range as Addresses, os::fd::AsRawFd, sync::MutexGuard};
use vm_cuda_api::hints::{Hints, Location};

/// The system's pages, and what legacy allocations begin at multiples of.
pub(crate) const PAGE: u64 = 4096;
/// What memory is counted in.
pub(crate) const UNIT: u64 = 512;
/// The driver's blocks, and the granularity of virtual memory.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Address space of all devices: half of what one view of a kernel reaches.
const REGION: u64 = 1 << 39;
/// Where it is if that is free: right before addresses at which a process may have memory that it registers for kernels, as the bridge does.
const HOME: u64 = 0x2000_0000_0000 - BLOCK - REGION;
/// How many such addresses kernels reach, behind the arena.
#[cfg(feature = "cpu")]
const BEHIND: u64 = (1 << 40) - REGION;

/// Reads and writes, in `CUmemAccess_flags`.
pub(crate) const READ_WRITE: Access = 3;

/// What kind of memory is at an address.
pub(crate) enum Kind {
    /// Of `cuMemAlloc`, and its offset in the device's file.
    Legacy { offset: u64 },
    /// Of `cuMemMap`.
    Virtual { handle: u64 },
    /// Of `cuMemAllocManaged`.
    Managed { offset: u64 },
    /// Of `cuMemAllocAsync`.
    Pooled { offset: u64, pool: u64 },
    /// Of a graph's node, and whether it is allocated.
    Graph { offset: u64, there: bool },
    /// Of variables of a module.
    Data { offset: u64 },
    /// Of `cuIpcOpenMemHandle`: the process and its offset, and how often it was opened.
    Imported { from: (u32, u64), count: u64 },
}

/// What is mapped at an address of the arena.
pub(crate) struct Span {
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    pub(crate) device: usize,
    /// The context it was allocated in: 0 where it has none.
    pub(crate) context: u64,
    /// What each device may do, of virtual memory.
    pub(crate) access: [Access; crate::config::DEVICES],
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) buffer: u64,
    pub(crate) sync: bool,
}

impl Span {
    /// The bytes that are there: an allocation is rounded up.
    pub(crate) fn extent(&self) -> u64 {
        self.len.next_multiple_of(UNIT)
    }
}

/// Free address space: ranges by their start.
#[derive(Default)]
pub(crate) struct Arena {
    start: u64,
    end: u64,
    free: BTreeMap<u64, u64>,
}

impl Arena {
    pub(crate) fn new() -> std::io::Result<Self> {
        let start = sys::reserve(HOME, REGION + BLOCK)?.next_multiple_of(BLOCK);
        // The last page is never mapped: kernels that trap write there.
        Ok(Self { start, end: start + REGION, free: BTreeMap::from([(start, REGION - PAGE)]) })
    }

    /// The page that kernels write to when they trap.
    #[cfg(feature = "cpu")]
    pub(crate) fn trap(&self) -> std::ops::Range<u64> {
        self.end - PAGE..self.end
    }

    /// Where in it an address is.
    pub(crate) fn offset(&self, at: u64) -> u64 {
        at.saturating_sub(self.start)
    }

    /// Whether an address is one that only a device can have.
    pub(crate) fn has(&self, at: u64) -> bool {
        (self.start..self.end).contains(&at)
    }

    /// Takes `len` bytes at a multiple of `align`: at `hint` if that is free, else the lowest ones.
    pub(crate) fn take(&mut self, len: u64, align: u64, hint: u64) -> Result<u64> {
        let fits = |start: u64, free: u64, at: u64| {
            at >= start && at.checked_add(len).is_some_and(|end| end <= start + free)
        };
        let hinted = (hint != 0 && hint.is_multiple_of(align))
            .then(|| self.free.range(..=hint).next_back().map(|(&start, &free)| (start, free, hint)))
            .flatten()
            .filter(|&(start, free, at)| fits(start, free, at));
        let lowest = || {
            let at =
                |(&start, &free): (&u64, &u64)| Some((start, free, start.checked_next_multiple_of(align)?));
            self.free.iter().filter_map(at).find(|&(start, free, at)| fits(start, free, at))
        };
        let (start, free, at) = hinted.or_else(lowest).ok_or(Error::OutOfMemory)?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + len < start + free {
            self.free.insert(at + len, start + free - at - len);
        }
        Ok(at)
    }

    /// Releases what [`Self::take`] returned.
    pub(crate) fn give(&mut self, at: u64, len: u64) {
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &free)) = self.free.range(..at).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(free) = self.free.remove(&end) {
            end += free;
        }
        self.free.insert(start, end - start);
    }
}

/// Who touches memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum By {
    /// A copy or a memset of a context.
    Copy(u64),
    /// A kernel of a context.
    Kernel(u64),
}

impl State {
    /// What is mapped at an address, and where it begins.
    pub(crate) fn span(&self, at: u64) -> Option<(u64, &Span)> {
        let (&start, span) = self.spans.range(..=at).next_back()?;
        (at - start < span.extent()).then_some((start, span))
    }

    /// Whether an address is of managed memory.
    pub(crate) fn is_managed(&self, at: u64) -> bool {
        match self.span(at) {
            Some((_, Span { kind: Kind::Managed { .. }, .. })) => true,
            Some((start, Span { kind: Kind::Data { .. }, .. })) => self.is_managed_variable(start, at),
            _ => false,
        }
    }

    /// The range of `len` bytes at `at`, if a device may access all of it.
    ///
    /// `host` says that the operand may also be the caller's own memory, which is then the caller's promise.
    pub(crate) fn reach(&self, at: u64, len: usize, by: By, need: Access, host: bool) -> Option<Range<'_>> {
        let end = at.checked_add(len as u64)?;
        let own = host && at >= sys::LOWEST && !self.arena.has(at) && !self.arena.has(end);
        if own || self.host_memory(at, len as u64) {
            return Some(Range::promised(self, at, len));
        }
        let mut next = at;
        while next < end {
            let (start, span) = self.span(next)?;
            if !self.allows(span, by, need) {
                return None;
            }
            next = start + span.extent();
        }
        Some(Range::promised(self, at, len))
    }

    /// Returns memory of a module's variables, which the driver initializes.
    pub(crate) fn variables(&self, at: u64, len: usize) -> Option<Range<'_>> {
        let (start, span) = self.span(at)?;
        let is_within = matches!(span.kind, Kind::Data { .. }) && at - start + len as u64 <= span.len;
        is_within.then(|| Range::promised(self, at, len))
    }

    /// Returns whether `len` bytes at `at` are in one allocation, or in adjacent mappings. `host` is as for [`Self::reach`]. Calls reject copies and
    /// memsets of other memory with `InvalidValue`.
    pub(crate) fn is_allocated(&self, at: u64, len: u64, host: bool) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        let own = host && at >= sys::LOWEST && !self.arena.has(at) && !self.arena.has(end);
        if own || self.host_memory(at, len) {
            return true;
        }
        let mut next = at;
        while let Some((start, span)) = self.span(next) {
            next = start + span.extent();
            if next >= end || !matches!(span.kind, Kind::Virtual { .. }) {
                return next >= end;
            }
        }
        false
    }

    /// What kernels reach: the arena, and memory right behind it that the program has registered. Nothing else is mapped there, or it is the program's own
    /// matter.
    #[cfg(feature = "cpu")]
    pub(crate) fn kernels_range(&self) -> std::ops::Range<u64> {
        let Arena { start, end, .. } = self.arena;
        let most = if start == HOME { start + REGION + BEHIND } else { end };
        let mut behind =
            self.host.range(end..most).rev().filter(|(_, allocation)| allocation.is_registered());
        let last =
            behind.next().map(|(at, allocation)| at.saturating_add(allocation.len).next_multiple_of(PAGE));
        start..last.map_or(end, |last| last.min(most))
    }

    fn allows(&self, span: &Span, by: By, need: Access) -> bool {
        let (By::Copy(context) | By::Kernel(context)) = by;
        let Some(context) = self.contexts.get(&context) else { return false };
        match (&span.kind, by) {
            (Kind::Graph { there: false, .. }, _) => false,
            (Kind::Virtual { .. }, _) => span.access[context.device] & need == need,
            (Kind::Managed { .. }, _) | (_, By::Copy(_)) => true,
            (_, By::Kernel(_)) => span.device == context.device || context.peers.contains(&span.context),
        }
    }

    /// Maps new memory of a device; `kind` is told its offset.
    pub(crate) fn allocate(
        &mut self,
        device: usize,
        context: u64,
        len: u64,
        counted: bool,
        kind: impl FnOnce(u64) -> Kind,
    ) -> Result<u64> {
        if len == 0 {
            return Err(Error::InvalidValue);
        }
        let counted_len =
            if counted { len.checked_next_multiple_of(UNIT).ok_or(Error::OutOfMemory)? } else { 0 };
        let pages = len.checked_next_multiple_of(PAGE).ok_or(Error::OutOfMemory)?;
        if pages > REGION {
            return Err(Error::OutOfMemory);
        }
        let offset =
            if counted { self.claim(device, counted_len)? } else { self.claim_uncounted(device, pages)? };
        let align = if len >= BLOCK / 2 { BLOCK } else { PAGE };
        let fd = self.devices[device].file.as_raw_fd();
        let place = self.arena.take(pages, align, 0);
        let mapped = place.and_then(|at| {
            sys::map(at, pages, fd, offset, READ_WRITE).map_err(|_| {
                self.arena.give(at, pages);
                Error::OutOfMemory
            })?;
            Ok(at)
        });
        let Ok(at) = mapped else {
            self.devices[device].used -= counted_len;
            return Err(Error::OutOfMemory);
        };
        let buffer = self.id();
        let access = [0; crate::config::DEVICES];
        self.spans.insert(at, Span { len, kind: kind(offset), device, context, access, buffer, sync: false });
        Ok(at)
    }

    fn claim_uncounted(&mut self, device: usize, len: u64) -> Result<u64> {
        let used = self.devices.get(device).ok_or(Error::InvalidDevice)?.used;
        let total = std::mem::replace(&mut self.memory, u64::MAX);
        let offset = self.claim(device, len);
        self.memory = total;
        self.devices[device].used = used;
        offset
    }

    /// Unmaps an allocation that is not virtual memory, and counts it as free.
    pub(crate) fn release(&mut self, at: u64) -> Result {
        let span = self.spans.remove(&at).ok_or(Error::InvalidValue)?;
        let pages = span.len.next_multiple_of(PAGE);
        sys::unmap(at, pages)?;
        self.arena.give(at, pages);
        self.hints.forget(at..at + pages);
        let device = &mut self.devices[span.device];
        if let Kind::Legacy { offset }
        | Kind::Managed { offset }
        | Kind::Pooled { offset, .. }
        | Kind::Graph { offset, .. }
        | Kind::Data { offset } = span.kind
        {
            // Pages that stay cost memory and nothing else: no other allocation gets their offset. Other processes may have them.
            if !self.exported.remove(&at) {
                let _ = sys::punch(device.file.as_raw_fd(), offset, pages);
            }
        }
        if let Kind::Legacy { .. } | Kind::Pooled { .. } | Kind::Graph { .. } | Kind::Data { .. } = span.kind
        {
            device.used -= span.extent();
        }
        if let Kind::Pooled { pool, .. } = span.kind {
            self.keep(pool, span.extent());
        }
        Ok(())
    }
}

/// `cuMemAlloc`.
pub(crate) fn alloc(len: usize) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    state.refuse_in_capture()?;
    let device = state.contexts[&context].device;
    state.allocate(device, context, len as u64, true, |offset| Kind::Legacy { offset })
}

/// `cuMemAllocPitch`.
pub(crate) fn alloc_pitch(width: usize, height: usize, element: u32) -> Result<(u64, usize)> {
    if ![4, 8, 16].contains(&element) {
        return Err(Error::InvalidValue);
    }
    let pitch = width.checked_next_multiple_of(UNIT as usize).ok_or(Error::InvalidValue)?;
    Ok((alloc(pitch.checked_mul(height).ok_or(Error::InvalidValue)?)?, pitch))
}

/// `cuMemAllocManaged`: memory of the host and of all devices.
pub(crate) fn alloc_managed(len: usize, flags: u32) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    if !(1..=2).contains(&flags) {
        return Err(Error::InvalidValue);
    }
    state.refuse_in_capture()?;
    let device = state.contexts[&context].device;
    state.allocate(device, context, len as u64, false, |offset| Kind::Managed { offset })
}

/// `cuMemFree`: waits for all work of the device.
pub(crate) fn free(at: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    if at == 0 {
        return Ok(());
    }
    state.refuse_in_capture()?;
    let kind = |state: &State| match state.spans.get(&at).map(|span| (&span.kind, span.device)) {
        Some((Kind::Legacy { .. } | Kind::Managed { .. } | Kind::Pooled { .. }, device)) => Ok(device),
        Some((Kind::Graph { there: true, .. }, device)) => Ok(device),
        _ => Err(Error::InvalidValue),
    };
    let device = kind(&state)?;
    state = drain_device(state, device)?;
    // It waited unlocked: another thread may have freed it, or the work have failed.
    state.current()?;
    kind(&state)?;
    if state.is_graphs(at) { state.set_there(at, false) } else { state.release(at) }
}

/// Waits for all work of a device's contexts.
pub(crate) fn drain_device(
    state: MutexGuard<'static, State>,
    device: usize,
) -> Result<MutexGuard<'static, State>> {
    let marks: Vec<_> = state
        .streams
        .iter()
        .filter(|(_, stream)| {
            state.contexts.get(&stream.context).is_some_and(|context| context.device == device)
        })
        .map(|(&id, stream)| (id, stream.submitted))
        .collect();
    state::wait(state, |state| marks.iter().all(|&mark| state.is_done(mark)))
}

/// `cuMemGetInfo`.
pub(crate) fn info() -> Result<(usize, usize)> {
    let state = state::lock();
    let device = state.contexts[&state.current()?].device;
    Ok(((state.memory - state.devices[device].used) as usize, state.memory as usize))
}

/// `cuMemGetAddressRange`.
pub(crate) fn address_range(at: u64) -> Result<(u64, usize)> {
    let state = state::lock();
    state.current()?;
    if let Some((start, span)) = state.span(at) {
        return Ok((start, span.len as usize));
    }
    state.host_span(at).map(|(start, allocation)| (start, allocation.len as usize)).ok_or(Error::NotFound)
}

/// Checks a range of managed memory and the location that a hint about it names.
fn hinted(state: &State, at: u64, len: usize, location: Option<Location>) -> Result<Addresses<u64>> {
    state.current()?;
    if let Some(device) = location.and_then(Location::device) {
        state.device(device)?;
    }
    let end = state.span(at).and_then(|(start, span)| start.checked_add(span.len));
    let last = at.checked_add(len as u64).filter(|last| end.is_some_and(|end| *last <= end));
    last.filter(|_| len > 0 && state.is_managed(at)).map(|last| at..last).ok_or(Error::InvalidValue)
}

/// `cuMemAdvise`.
pub(crate) fn advise(at: u64, len: usize, advice: i32, location: Option<Location>) -> Result {
    let mut state = state::lock();
    let used = location.filter(|_| !Hints::ignores_location(advice));
    let range = hinted(&state, at, len, used)?;
    let location = location.unwrap_or(Location::HOST);
    if state.hints.advise(range, advice, location) { Ok(()) } else { Err(Error::InvalidValue) }
}

/// `cuMemPrefetchAsync`: nothing moves.
pub(crate) fn prefetch(at: u64, len: usize, to: Option<Location>, stream: u64) -> Result {
    let to = to.ok_or(Error::InvalidValue)?;
    let range = hinted(&state::lock(), at, len, Some(to))?;
    crate::stream::submit(stream, crate::stream::Work::Nothing)?;
    state::lock().hints.prefetch(range, to);
    Ok(())
}

/// `cuMemRangeGetAttribute`: the value as numbers of 32 bits.
pub(crate) fn range_attribute(at: u64, len: usize, attribute: i32, bytes: usize) -> Result<Vec<i32>> {
    let state = state::lock();
    let range = hinted(&state, at, len, None)?;
    state.hints.attribute(range, attribute, bytes).ok_or(Error::InvalidValue)
}

/// `cuStreamAttachMemAsync`: all of managed memory, or none of its length, which devices reach at any time anyway.
pub(crate) fn attach(at: u64, len: usize, flags: u32, stream: u64) -> Result {
    let is_whole = |state: &State| {
        let span = state.spans.get(&at).filter(|_| state.is_managed(at));
        span.is_some_and(|span| len == 0 || len as u64 == span.len)
    };
    if !is_whole(&state::lock()) || !matches!(flags, 1 | 2 | 4) {
        return Err(Error::InvalidValue);
    }
    crate::stream::submit(stream, crate::stream::Work::Nothing)
}
