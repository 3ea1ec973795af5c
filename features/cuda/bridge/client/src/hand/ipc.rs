//! Memory and events of other programs of the server: a handle is a token that the server gave.

use std::io::{self, Read as _, Write as _};
use std::os::fd::IntoRawFd as _;
use std::os::unix::net::UnixStream;

use vm_bridge::wire::{Reader, code, control, put, put_bytes};

use crate::client::{client, locked};
use crate::known::Memory;
use crate::sys::caller;
use crate::{current, forward, say};

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

/// Reports why a driver refuses to open what another program shares.
fn explain(code: u32, what: &str) -> u32 {
    if code == code::NOT_SUPPORTED {
        say::once(&format!(
            "cannot open {what} of another program: the driver in this program's worker cannot reach the other worker; copy through the host"
        ));
    }
    code
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
    let reply = client.ask(number, &payload, false).map_err(|code| explain(code, "memory"))?;
    let mut reader = Reader(&reply);
    let (Ok(at), Ok(len)) = (reader.word(), reader.word()) else { return Err(code::UNAVAILABLE) };
    locked(&client.devices).insert(at, Memory { len, owners: [current::get(), 0], home: 0 });
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
    let event = caller::bytes(handle, HANDLE);
    let reply = client()?.ask(number, event, false).map_err(|code| explain(code, "an event"))?;
    caller::write(to, Reader(&reply).word().map_err(|_| code::UNAVAILABLE)?);
    Ok(())
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE: u32 = 1;

/// Has the server close what the program has no file of any more.
fn forget_closed() -> Result<(), u32> {
    let client = client()?;
    let closed: Vec<_> = {
        let mut exported = locked(&client.exported);
        let is_open = |(end, _): &mut (UnixStream, _)| match end.read(&mut [0]) {
            Ok(bytes) => bytes > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        exported.extract_if(.., |of| !is_open(of)).map(|(_, token)| token).collect()
    };
    closed.into_iter().try_for_each(|[first, second]| client.order([control::FORGET, first, second, 0], None))
}

/// The program's file is an end of a stream, in which what the server gave waits for who looks at it: once all who have it have closed it, the
/// other end shows that.
pub(crate) fn cuMemExportToShareableHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, memory, kind, flags] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 || flags != 0 {
        return Err(code::INVALID_VALUE);
    }
    if kind as u32 != FILE {
        return Err(code::NOT_SUPPORTED);
    }
    forget_closed()?;
    let client = client()?;
    let pair = UnixStream::pair().and_then(|(near, far)| near.set_nonblocking(true).map(|()| (near, far)));
    let (mut near, far) = pair.map_err(|_| code::OPERATING_SYSTEM)?;
    let reply = client.ask(number, &(memory as u64).to_ne_bytes(), false)?;
    let given = reply.get(..HANDLE).ok_or(code::UNAVAILABLE)?;
    near.write_all(given).map_err(|_| code::OPERATING_SYSTEM)?;
    let mut reader = Reader(given);
    let (Ok(first), Ok(second)) = (reader.word(), reader.word()) else { return Err(code::UNAVAILABLE) };
    locked(&client.exported).push((near, [first, second]));
    caller::write_half(to, far.into_raw_fd() as u32);
    Ok(())
}

pub(crate) fn cuMemImportFromShareableHandle(number: usize, words: &[usize]) -> Result<(), u32> {
    let [to, file, kind] = *words else { return Err(code::INVALID_VALUE) };
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    if kind as u32 != FILE {
        return Err(code::NOT_SUPPORTED);
    }
    let given = caller::peek::<HANDLE>(file as i32).ok_or(code::INVALID_VALUE)?;
    let reply = client()?.ask(number, &given, false)?;
    caller::write(to, Reader(&reply).word().map_err(|_| code::UNAVAILABLE)?);
    Ok(())
}

pub(crate) fn cuMemRelease(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    forget_closed()
}
