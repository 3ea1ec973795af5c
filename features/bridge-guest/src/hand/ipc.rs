//! Memory and events of other programs of the server: a handle is a token that the server gave.

use vm_bridge::wire::{Reader, code, put, put_bytes};

use crate::client::{client, locked};
use crate::sys::caller;
use crate::{forward, say};

/// Bytes of a handle.
const HANDLE: usize = 64;

fn export(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, of] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let reply = client()?.ask(number, &(of as u64).to_ne_bytes(), false)?;
    caller::write_bytes(to, reply.get(..HANDLE).ok_or(code::UNAVAILABLE)?);
    Ok(())
}

pub(crate) fn cuEventCreate(number: usize, words: &[usize]) -> Result<(), u32> {
    /// `CU_EVENT_INTERPROCESS`.
    const INTERPROCESS: usize = 4;
    let made = forward::ask(number, words);
    if made == Err(code::NOT_SUPPORTED) && words.get(1).is_some_and(|flags| flags & INTERPROCESS != 0) {
        say::once(
            "an event for other processes is not supported: the server's confined workers have no files for it",
        );
    }
    made
}

pub(crate) fn cuIpcGetMemHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    export(number, words)
}

pub(crate) fn cuIpcGetEventHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    export(number, words)
}

pub(crate) fn cuIpcOpenMemHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, handle, flags] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let mut payload = Vec::new();
    put_bytes(&mut payload, caller::bytes(handle, HANDLE));
    put(&mut payload, flags as u32 as u64);
    let client = client()?;
    let reply = client.ask(number, &payload, false)?;
    let mut reader = Reader(&reply);
    let (Ok(at), Ok(len)) = (reader.word(), reader.word()) else { return Err(code::UNAVAILABLE) };
    locked(&client.devices).insert(at, len);
    caller::write(to, at);
    Ok(())
}

pub(crate) fn cuIpcOpenMemHandle_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    cuIpcOpenMemHandle(number, words)
}

/// What was opened several times is still there. Whoever copies to where nothing is any more is told so by the server.
pub(crate) fn cuIpcCloseMemHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::wait(number, words)
}

pub(crate) fn cuIpcOpenEventHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, handle] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let reply = client()?.ask(number, caller::bytes(handle, HANDLE), false)?;
    caller::write(to, Reader(&reply).word().map_err(|_| code::UNAVAILABLE)?);
    Ok(())
}
