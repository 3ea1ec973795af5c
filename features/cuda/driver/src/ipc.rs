//! Legacy memory, and events, in other processes: the handle says where in `/proc` its file is.

use crate::{
    config::DEVICES,
    error::{Error, Result},
    memory::{BLOCK, Kind, PAGE, READ_WRITE, Span},
    state, sys,
};
use std::{fs::OpenOptions, io, os::fd::AsRawFd};

const MAGIC: u32 = 0x6661_6b65;
const EVENT: u32 = 0x6576_6e74;

/// A `CUipcMemHandle`'s 64 bytes.
pub(crate) type Handle = [u8; 64];

/// `cuIpcGetMemHandle`.
pub(crate) fn handle(at: u64) -> Result<Handle> {
    let mut state = state::lock();
    state.current()?;
    let Some((start, Span { kind: Kind::Legacy { offset }, len, device, .. })) = state.span(at) else {
        return Err(Error::InvalidValue);
    };
    let fd = state.devices[*device].file.as_raw_fd() as u32;
    let mut handle = [0; 64];
    for (at, word) in [MAGIC, std::process::id(), fd, *device as u32].iter().enumerate() {
        handle[at * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }
    handle[16..24].copy_from_slice(&offset.to_le_bytes());
    handle[24..32].copy_from_slice(&len.to_le_bytes());
    state.exported.insert(start);
    Ok(handle)
}

/// Returns why a file of another process cannot be opened: this process may not, or there is none.
pub(crate) fn refusal(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::PermissionDenied { Error::NotSupported } else { Error::InvalidValue }
}

/// `cuIpcOpenMemHandle`: in another process. An open handle has its address again.
pub(crate) fn open(handle: &Handle, flags: u32) -> Result<u64> {
    let mut state = state::lock();
    let context = state.current()?;
    let (halves, words) = (handle.as_chunks::<4>().0, handle.as_chunks::<8>().0);
    let (magic, pid, fd) =
        (u32::from_le_bytes(halves[0]), u32::from_le_bytes(halves[1]), u32::from_le_bytes(halves[2]));
    let (offset, len) = (u64::from_le_bytes(words[2]), u64::from_le_bytes(words[3]));
    if magic != MAGIC || flags & !1 != 0 || len == 0 || len > 1 << 40 || !offset.is_multiple_of(PAGE) {
        return Err(Error::InvalidValue);
    }
    if pid == std::process::id() {
        return Err(Error::InvalidContext);
    }
    let known = state.spans.iter_mut().find_map(|(&at, span)| match &mut span.kind {
        Kind::Imported { from, count } if *from == (pid, offset) && span.context == context => {
            Some((at, count))
        }
        _ => None,
    });
    if let Some((at, count)) = known {
        *count += 1;
        return Ok(at);
    }
    let path = format!("/proc/{pid}/fd/{fd}");
    let name = std::fs::read_link(&path).map_err(|error| refusal(&error))?;
    if !name.to_string_lossy().starts_with("/memfd:vm-cuda-driver-") {
        return Err(Error::InvalidValue);
    }
    let file = OpenOptions::new().read(true).write(true).open(&path).map_err(|error| refusal(&error))?;
    let device = state.contexts[&context].device;
    let pages = len.next_multiple_of(PAGE);
    let at = state.arena.take(pages, BLOCK, 0)?;
    if sys::map(at, pages, file.as_raw_fd(), offset, READ_WRITE).is_err() {
        state.arena.give(at, pages);
        return Err(Error::OutOfMemory);
    }
    let (kind, buffer) = (Kind::Imported { from: (pid, offset), count: 1 }, state.id());
    state.spans.insert(at, Span { len, kind, device, context, access: [0; DEVICES], buffer, sync: false });
    Ok(at)
}

/// `cuIpcCloseMemHandle`.
pub(crate) fn close(at: u64) -> Result {
    let mut state = state::lock();
    state.current()?;
    let Some(Span { kind: Kind::Imported { count, .. }, .. }) = state.spans.get_mut(&at) else {
        return Err(Error::InvalidValue);
    };
    *count -= 1;
    if *count == 0 { state.release(at) } else { Ok(()) }
}

/// `cuIpcGetEventHandle`.
pub(crate) fn event_handle(event: u64) -> Result<Handle> {
    let [pid, fd] = crate::event::handle(event)?;
    let mut handle = [0; 64];
    for (at, word) in [EVENT, pid, fd].iter().enumerate() {
        handle[at * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }
    Ok(handle)
}

/// `cuIpcOpenEventHandle`: in another process.
pub(crate) fn open_event(handle: &Handle) -> Result<u64> {
    let word = |at: usize| u32::from_le_bytes(handle.as_chunks::<4>().0[at]);
    if word(0) != EVENT {
        return Err(Error::InvalidValue);
    }
    if word(1) == std::process::id() {
        return Err(Error::InvalidContext);
    }
    crate::event::open(&format!("/proc/{}/fd/{}", word(1), word(2)))
}
