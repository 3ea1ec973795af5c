//! Memory and events of other programs of the server: the program has tokens, the driver its handles and files ([`exports`](super::exports)).

use std::os::fd::AsRawFd;

use vm_cuda_api::Object;

use super::exports::{HANDLE, Handle, Kind};
use super::hand::Parts;
use super::lane::Call;
use super::pack::Refused;
use super::sys::{self, Word};
use crate::wire::{Malformed, Reader, code, put, put_bytes};

/// Flags. An event for other processes is a file in `/dev/shm` to NVIDIA's driver, where a confined worker opens none: the driver says that a mapping failed.
pub(super) fn event(call: &mut Call<'_>, parts: Parts<'_>) -> Result<u32, Refused> {
    /// `CU_EVENT_INTERPROCESS`.
    const INTERPROCESS: u64 = 4;
    let mut reader = Reader(parts.reader.0);
    let (_, flags) = (reader.word()?, reader.word()?);
    match super::pack::make(call.session, call.number, parts.reader.0, parts.reply)? {
        code::MAP_FAILED if flags & INTERPROCESS != 0 => Ok(code::NOT_SUPPORTED),
        result => Ok(result),
    }
}

/// Gives what a program is given for what a function exports.
fn export(call: &Call<'_>, parts: Parts<'_>, kind: Kind, real: u64) -> Result<u32, Refused> {
    let sharing = call.session.sharing().ok_or(code::NOT_SUPPORTED)?;
    let mut memory = [0u64; HANDLE / 8];
    let result = call.make(&[Word::At(0), Word::Is(real)], &mut memory)?;
    if result == 0 {
        let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let handle: Handle = bytes.try_into().map_err(|_| Malformed)?;
        put_bytes(parts.reply, &sharing.export(kind, handle)?);
    }
    Ok(result)
}

/// The driver's handle for what a program gives.
fn find(call: &Call<'_>, parts: &mut Parts<'_>, kind: Kind) -> Result<Handle, Refused> {
    let given = *parts.reader.bytes(HANDLE)?.first_chunk().ok_or(Malformed)?;
    Ok(call.session.sharing().ok_or(code::NOT_SUPPORTED)?.find(kind, given)?)
}

/// An address of memory that the program has.
pub(super) fn export_memory(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let at = parts.reader.word()?;
    if !call.session.ranges().has(at, 1) {
        return Err(code::INVALID_VALUE.into());
    }
    export(call, parts, Kind::Memory, at)
}

/// An event.
pub(super) fn export_event(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let event = call.session.handles().real(Object::Event, parts.reader.word()?)?;
    export(call, parts, Kind::Event, event)
}

/// What the program was given, and flags: the address, and how long the memory is.
pub(super) fn open_memory(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let handle = find(call, &mut parts, Kind::Memory)?;
    let flags = parts.reader.word()? as u32;
    let (result, at) = sys::open_memory(call.session.driver(), call.number, handle, flags);
    if result != 0 {
        return Ok(result);
    }
    let mut memory = [0; 2];
    let words = [Word::At(0), Word::At(1), Word::Is(at)];
    let result = call.session.driver().named("cuMemGetAddressRange_v2", &words, &mut memory);
    let len = if result == 0 { memory[1].saturating_sub(at - memory[0].min(at)) } else { 0 };
    call.session.ranges().open(at, len);
    put(parts.reply, at);
    put(parts.reply, len);
    Ok(0)
}

/// Where such memory begins.
pub(super) fn close_memory(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let at = parts.reader.word()?;
    if !call.session.ranges().is_open(at) {
        return Err(code::INVALID_VALUE.into());
    }
    // It waits for the device.
    call.pass();
    let result = call.make(&[Word::Is(at)], &mut [])?;
    if result == 0 {
        call.session.ranges().close(at);
    }
    Ok(result)
}

/// What the program was given.
pub(super) fn open_event(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let handle = find(call, &mut parts, Kind::Event)?;
    let (result, event) = sys::open_event(call.session.driver(), call.number, handle);
    if result == 0 {
        put(parts.reply, call.session.give(Object::Event, event, None, true)?);
    }
    Ok(result)
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE: u64 = 1;

/// Memory of `cuMemCreate`.
pub(super) fn export_file(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let sharing = call.session.sharing().ok_or(code::NOT_SUPPORTED)?;
    let real = call.session.handles().real(Object::Memory, parts.reader.word()?)?;
    let mut memory = [u64::MAX];
    let words = [Word::At(0), Word::Is(real), Word::Is(FILE), Word::Is(0)];
    let result = call.make(&words, &mut memory)?;
    if result == 0 {
        let file = sys::given_file(memory[0]).ok_or(code::INVALID_VALUE)?;
        let quota = call.session.quota();
        let (given, token) = sharing.export_file(&file, quota.bytes(real))?;
        quota.export(token, real);
        put_bytes(parts.reply, &given);
    }
    Ok(result)
}

/// What the program found in its file.
pub(super) fn import_file(call: &mut Call<'_>, mut parts: Parts<'_>) -> Result<u32, Refused> {
    let given = *parts.reader.bytes(HANDLE)?.first_chunk().ok_or(Malformed)?;
    let (file, bytes) = call.session.sharing().ok_or(code::NOT_SUPPORTED)?.find_file(given)?;
    let driver = call.session.driver();
    let (result, real) = call.session.quota().import(driver, bytes, || {
        let mut memory = [0];
        let words = [Word::At(0), Word::Is(file.as_raw_fd() as u64), Word::Is(FILE)];
        (call.make(&words, &mut memory).unwrap_or_else(|code| code), memory[0])
    });
    if result == 0 {
        put(parts.reply, call.session.handles().give(Object::Memory, real)?);
    }
    Ok(result)
}
