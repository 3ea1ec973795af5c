//! Virtual memory management: physical memory by handles, reserved addresses, what is mapped there, and who may access it.

use crate::{
    config::DEVICES,
    error::{Error, Result},
    ffi::{AccessOf, Location, Properties},
    memory::{BLOCK, Kind, READ_WRITE, Span},
    state::{self, State},
    sys::{self, Access},
};
use std::{
    fs::File,
    os::{
        fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
};

const PINNED: i32 = 1;
const DEVICE: i32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`, and of a node of the host.
const HOSTS: std::ops::RangeInclusive<i32> = 2..=4;
const POSIX_FD: i32 = 1;

/// Memory of `cuMemCreate`.
pub(crate) struct Physical {
    pub(crate) len: u64,
    pub(crate) device: usize,
    pub(crate) handle_types: i32,
    gpu_direct: u8,
    usage: u16,
    /// A file of its own, if it can be exported; else it is in its device's.
    file: Option<File>,
    offset: u64,
    /// Whether it counts as its device's memory: not what another process made.
    counted: bool,
    references: u64,
    mappings: u64,
}

impl State {
    fn live(&self, handle: u64) -> Result<&Physical> {
        self.physical.get(&handle).filter(|physical| physical.references > 0).ok_or(Error::InvalidValue)
    }

    fn ready(&self) -> Result {
        if self.initialized { Ok(()) } else { Err(Error::NotInitialized) }
    }

    /// Frees physical memory that has neither references nor mappings.
    fn settle(&mut self, handle: u64) {
        let unused = |physical: &mut Physical| physical.references == 0 && physical.mappings == 0;
        let Some(physical) = self.physical.get_mut(&handle) else { return };
        if !unused(physical) {
            return;
        }
        if let Some(physical) = self.physical.remove(&handle) {
            let device = &mut self.devices[physical.device];
            if physical.counted {
                device.used -= physical.len;
            }
            if physical.file.is_none() {
                // Pages that stay cost memory and nothing else: no other memory gets their offset.
                let _ = sys::punch(device.file.as_raw_fd(), physical.offset, physical.len);
            }
        }
    }

    /// The reservation that has all of a range.
    /// How much was reserved around an address.
    pub(crate) fn reservation(&self, at: u64) -> Option<u64> {
        let (start, size) = self.reservations.range(..=at).next_back()?;
        (at - start < *size).then_some(*size)
    }

    fn reserved(&self, at: u64, len: u64) -> Result {
        let end = at.checked_add(len).ok_or(Error::InvalidValue)?;
        let (&start, &size) = self.reservations.range(..=at).next_back().ok_or(Error::InvalidValue)?;
        if end <= start + size { Ok(()) } else { Err(Error::InvalidValue) }
    }

    /// The mappings that make up exactly this range.
    fn mappings(&self, at: u64, len: u64) -> Result<Vec<u64>> {
        if len == 0 {
            return Err(Error::InvalidValue);
        }
        let end = at.checked_add(len).ok_or(Error::InvalidValue)?;
        let (mut next, mut found) = (at, Vec::new());
        while next < end {
            let span = self.spans.get(&next).filter(|span| matches!(span.kind, Kind::Virtual { .. }));
            found.push(next);
            next += span.ok_or(Error::InvalidValue)?.len;
        }
        if next == end { Ok(found) } else { Err(Error::InvalidValue) }
    }

    /// The memory of a mapping's handle.
    pub(crate) fn backing(&self, span: &Span) -> Option<&Physical> {
        match span.kind {
            Kind::Virtual { handle } => self.physical.get(&handle),
            _ => None,
        }
    }
}

fn checked(state: &State, properties: &Properties) -> Result<usize> {
    if properties.kind != PINNED || properties.location.kind != DEVICE {
        return Err(Error::InvalidValue);
    }
    match properties.handle_types {
        0 | POSIX_FD => state.device(properties.location.id),
        _ => Err(Error::NotSupported),
    }
}

/// `cuMemGetAllocationGranularity`.
pub(crate) fn granularity(properties: &Properties, option: i32) -> Result<usize> {
    let state = state::lock();
    state.ready()?;
    // It knows that of the host's memory too, though it has none: `create` refuses it.
    if !HOSTS.contains(&properties.location.kind) {
        checked(&state, properties)?;
    }
    if (0..=1).contains(&option) { Ok(BLOCK as usize) } else { Err(Error::InvalidValue) }
}

/// `cuMemCreate`.
pub(crate) fn create(len: usize, properties: &Properties, flags: u64) -> Result<u64> {
    let mut state = state::lock();
    state.ready()?;
    let device = checked(&state, properties)?;
    let len = len as u64;
    if len == 0 || !len.is_multiple_of(BLOCK) || flags != 0 {
        return Err(Error::InvalidValue);
    }
    let mut offset = state.claim(device, len)?;
    let mut file = None;
    if properties.handle_types == POSIX_FD {
        // What another process needs to know of it is in the file's name.
        match sys::memory_file(&format!("vm-cuda-driver:{device}:{POSIX_FD}"), len) {
            Ok(made) => file = Some(File::from(made)),
            Err(_) => {
                state.devices[device].used -= len;
                return Err(Error::OutOfMemory);
            }
        }
        offset = 0;
    }
    let handle = state.id();
    state.physical.insert(
        handle,
        Physical {
            len,
            device,
            handle_types: properties.handle_types,
            gpu_direct: properties.gpu_direct,
            usage: properties.usage,
            file,
            offset,
            counted: true,
            references: 1,
            mappings: 0,
        },
    );
    Ok(handle)
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64) -> Result {
    let mut state = state::lock();
    state.ready()?;
    state.live(handle)?;
    if let Some(physical) = state.physical.get_mut(&handle) {
        physical.references -= 1;
    }
    state.settle(handle);
    Ok(())
}

/// `cuMemRetainAllocationHandle`.
pub(crate) fn retain(at: u64) -> Result<u64> {
    let mut state = state::lock();
    state.ready()?;
    let Some((_, &Span { kind: Kind::Virtual { handle }, .. })) = state.span(at) else {
        return Err(Error::InvalidValue);
    };
    let physical = state.physical.get_mut(&handle).ok_or(Error::InvalidValue)?;
    physical.references += 1;
    Ok(handle)
}

/// `cuMemGetAllocationPropertiesFromHandle`.
pub(crate) fn properties(handle: u64) -> Result<Properties> {
    let state = state::lock();
    state.ready()?;
    let physical = state.live(handle)?;
    Ok(Properties {
        kind: PINNED,
        handle_types: physical.handle_types,
        location: Location { kind: DEVICE, id: physical.device as i32 },
        security: std::ptr::null(),
        compression: 0,
        gpu_direct: physical.gpu_direct,
        usage: physical.usage,
        reserved: [0; 4],
    })
}

/// `cuMemAddressReserve`.
pub(crate) fn reserve(len: usize, align: usize, hint: u64, flags: u64) -> Result<u64> {
    let mut state = state::lock();
    state.ready()?;
    let (len, align) = (len as u64, align as u64);
    if len == 0 || !len.is_multiple_of(BLOCK) || (align != 0 && !align.is_power_of_two()) || flags != 0 {
        return Err(Error::InvalidValue);
    }
    let at = state.arena.take(len, align.max(BLOCK), hint)?;
    state.reservations.insert(at, len);
    Ok(at)
}

/// `cuMemAddressFree`.
pub(crate) fn address_free(at: u64, len: usize) -> Result {
    let mut state = state::lock();
    state.ready()?;
    let len = len as u64;
    if state.reservations.get(&at) != Some(&len) || state.spans.range(at..at + len).next().is_some() {
        return Err(Error::InvalidValue);
    }
    state.reservations.remove(&at);
    state.arena.give(at, len);
    Ok(())
}

/// `cuMemMap`.
pub(crate) fn map(at: u64, len: usize, offset: usize, handle: u64, flags: u64) -> Result {
    let mut state = state::lock();
    state.ready()?;
    let (len, device) = (len as u64, state.live(handle)?.device);
    let whole = offset == 0 && len == state.live(handle)?.len;
    // As driver 580 says it.
    if offset != 0 || len < state.live(handle)?.len {
        return Err(Error::NotSupported);
    }
    if !whole || flags != 0 || !at.is_multiple_of(BLOCK) {
        return Err(Error::InvalidValue);
    }
    state.reserved(at, len)?;
    if state.spans.range(at..at + len).next().is_some() || state.span(at).is_some() {
        return Err(Error::InvalidValue);
    }
    if let Some(physical) = state.physical.get_mut(&handle) {
        physical.mappings += 1;
    }
    let (kind, access, buffer) = (Kind::Virtual { handle }, [0; DEVICES], state.id());
    state.spans.insert(at, Span { len, kind, device, context: 0, access, buffer, sync: false });
    Ok(())
}

/// `cuMemUnmap`: does not wait for work that uses the memory.
pub(crate) fn unmap(at: u64, len: usize) -> Result {
    let mut state = state::lock();
    state.ready()?;
    for at in state.mappings(at, len as u64)? {
        sys::unmap(at, state.spans[&at].len)?;
        if let Some(Span { kind: Kind::Virtual { handle }, .. }) = state.spans.remove(&at) {
            if let Some(physical) = state.physical.get_mut(&handle) {
                physical.mappings -= 1;
            }
            state.settle(handle);
        }
    }
    Ok(())
}

/// `cuMemSetAccess`.
pub(crate) fn set_access(at: u64, len: usize, descriptions: &[AccessOf]) -> Result {
    let mut state = state::lock();
    state.ready()?;
    let mappings = state.mappings(at, len as u64)?;
    let mut wanted = Vec::new();
    for description in descriptions {
        let flags =
            Access::try_from(description.flags).ok().filter(|flags| [0, 1, READ_WRITE].contains(flags));
        if description.location.kind != DEVICE {
            return Err(Error::InvalidValue);
        }
        wanted.push((state.device(description.location.id)?, flags.ok_or(Error::InvalidValue)?));
    }
    if wanted.is_empty() {
        return Err(Error::InvalidValue);
    }
    for at in mappings {
        let span = &state.spans[&at];
        let physical = state.backing(span).ok_or(Error::InvalidValue)?;
        let mut access = span.access;
        wanted.iter().for_each(|&(device, flags)| access[device] = flags);
        let (before, after) = (union(&span.access), union(&access));
        let device_file = &state.devices[physical.device].file;
        let fd = physical.file.as_ref().map_or(device_file.as_raw_fd(), AsRawFd::as_raw_fd);
        if before == 0 && after != 0 {
            sys::map(at, span.len, fd, physical.offset, after)?;
        } else if before != after {
            sys::protect(at, span.len, after)?;
        }
        if let Some(span) = state.spans.get_mut(&at) {
            span.access = access;
        }
    }
    Ok(())
}

fn union(access: &[Access; DEVICES]) -> Access {
    access.iter().fold(0, |all, one| all | one)
}

/// `cuMemGetAccess`.
pub(crate) fn access(at: u64, location: Location) -> Result<u64> {
    let state = state::lock();
    state.ready()?;
    let device = state.device(location.id)?;
    match state.span(at) {
        Some((_, Span { kind: Kind::Virtual { .. }, access, .. })) if location.kind == DEVICE => {
            Ok(access[device].into())
        }
        _ => Err(Error::InvalidValue),
    }
}

/// `cuMemExportToShareableHandle`.
pub(crate) fn export(handle: u64, kind: i32, flags: u64) -> Result<RawFd> {
    let state = state::lock();
    state.ready()?;
    let physical = state.live(handle)?;
    if kind != POSIX_FD || physical.handle_types & kind == 0 || flags != 0 {
        return Err(Error::InvalidValue);
    }
    let file = physical.file.as_ref().ok_or(Error::InvalidValue)?;
    Ok(file.try_clone()?.into_raw_fd())
}

/// `cuMemImportFromShareableHandle`.
pub(crate) fn import(fd: u64, kind: i32) -> Result<u64> {
    let mut state = state::lock();
    state.ready()?;
    if kind != POSIX_FD {
        return Err(Error::NotSupported);
    }
    let fd = RawFd::try_from(fd as i64).map_err(|_| Error::InvalidValue)?;
    let file: OwnedFd = sys::duplicate(fd).map_err(|_| Error::InvalidValue)?;
    let name =
        std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| Error::InvalidValue)?;
    let name = name.to_string_lossy().into_owned();
    let made =
        name.strip_prefix("/memfd:vm-cuda-driver:").and_then(|rest| rest.split(':').next()?.parse().ok());
    let device: usize = made.filter(|device| *device < state.devices.len()).ok_or(Error::InvalidValue)?;
    let file = File::from(file);
    let data = file.metadata().map_err(|_| Error::InvalidValue)?;
    let same = |physical: &Physical| {
        let other = physical.file.as_ref().and_then(|file| file.metadata().ok());
        other.is_some_and(|other| (other.dev(), other.ino()) == (data.dev(), data.ino()))
    };
    if let Some((&handle, physical)) = state.physical.iter_mut().find(|(_, physical)| same(physical)) {
        physical.references += 1;
        return Ok(handle);
    }
    if data.len() == 0 || !data.len().is_multiple_of(BLOCK) {
        return Err(Error::InvalidValue);
    }
    let handle = state.id();
    state.physical.insert(
        handle,
        Physical {
            len: data.len(),
            device,
            handle_types: POSIX_FD,
            gpu_direct: 0,
            usage: 0,
            file: Some(file),
            offset: 0,
            counted: false,
            references: 1,
            mappings: 0,
        },
    );
    Ok(handle)
}
