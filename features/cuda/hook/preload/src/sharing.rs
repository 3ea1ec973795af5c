//! Virtual memory in other processes with the hook, by `cuIpcGetMemHandle` and its like, for which the driver has none: the handle names the
//! allocation, and the importer asks the exporter's socket for descriptors of its memory.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vm_hook::client;
use vm_hook::control::{self, Answer, Request};
use vm_hook::driver::{Context, Device, Driver as _, Failure, GRANULE, INVALID_VALUE, Result};
use vm_hook::log::{self, Level, Value};

use crate::hook::{inside, with};
use crate::sys::{self, Of};

/// How long the exporter may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The most bytes of its answer.
const ANSWER: usize = 16 << 10;
const MAGIC: [u8; 8] = *b"vmhook\0\x01";
/// `CUDA_ERROR_INVALID_CONTEXT`: what the driver says of a process's own handle.
const OWN: Failure = Failure(201);
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Failure = Failure(801);

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    pid: u32,
    /// Of the process, as numbers of processes come again.
    nonce: u64,
    number: u64,
}

impl Name {
    fn to_bytes(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.pid.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// None of a handle of the driver's.
    fn of(bytes: &[u8; 64]) -> Option<Self> {
        let words = bytes.as_chunks::<8>().0;
        let word = |at: usize| u64::from_le_bytes(words[at]);
        (words[0] == MAGIC && word(1) >> 32 == 0).then(|| Name {
            pid: word(1) as u32,
            nonce: word(2),
            number: word(3),
        })
    }
}

fn nonce() -> u64 {
    static NONCE: OnceLock<u64> = OnceLock::new();
    *NONCE.get_or_init(|| std::hash::RandomState::new().build_hasher().finish())
}

/// Memory of another process.
struct Import {
    name: Name,
    of: Of,
    /// How often it was opened.
    count: u32,
    bytes: u64,
    /// What is mapped.
    pieces: Vec<u64>,
}

/// Was anything imported?
static ANY: AtomicBool = AtomicBool::new(false);
static IMPORTS: Mutex<BTreeMap<u64, Import>> = Mutex::new(BTreeMap::new());

/// A handle for what an address lies in; none where that is no virtual memory. It stays where it is from here on.
pub(crate) fn handle(address: u64) -> Option<Result<[u8; 64]>> {
    with(|manager| {
        manager.tracker().around(address)?;
        if let Err(failure) = manager.pin(address) {
            return Some(Err(failure));
        }
        let of = manager.tracker().around(address)?;
        // Memory of the host stands in where the device had none, and is not exported.
        if of.pieces.iter().any(|piece| piece.of_host) || of.pieces.len() > crate::control::DESCRIPTORS {
            return Some(Err(NOT_SUPPORTED));
        }
        let number = of.number;
        Some(Ok(Name { pid: std::process::id(), nonce: nonce(), number }.to_bytes()))
    })
}

/// The memory of an allocation that has a handle: its size, its pieces, and a descriptor of each.
pub(crate) fn export(asked: u64, number: u64) -> std::result::Result<(u64, Vec<u64>, Vec<OwnedFd>), String> {
    if asked != nonce() {
        return Err("the handle is of another process, which has ended".into());
    }
    with(|manager| {
        let of = manager.tracker().all().find(|of| of.number == number && of.is_pinned);
        let of = of.ok_or("the memory was freed")?;
        let files = of.pieces.iter().map(|piece| sys::export(piece.handle)).collect::<Result<_>>();
        let files = files.map_err(|failure| format!("it can't be exported: {failure}"))?;
        Ok((of.bytes, of.pieces.iter().map(|piece| piece.bytes).collect(), files))
    })
}

/// Maps what a handle names in the current context; none where it is a handle of the driver's.
pub(crate) fn open(handle: &[u8; 64]) -> Option<Result<u64>> {
    let name = Name::of(handle)?;
    if name.pid == std::process::id() {
        return Some(Err(OWN));
    }
    let Some((context, device)) = with(|manager| manager.driver().current()) else {
        return Some(Err(OWN));
    };
    let mut imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = imports.iter_mut().find(|(_, import)| (import.name, import.of.context) == (name, context));
    if let Some((address, import)) = known {
        import.count += 1;
        return Some(Ok(*address));
    }
    let made = ask(name).and_then(|(bytes, pieces, files)| {
        let address = map(&pieces, files, device).map_err(|failure| failure.to_string())?;
        ANY.store(true, Ordering::Release);
        imports.insert(address, Import { name, of: Of::context(context), count: 1, bytes, pieces });
        Ok(address)
    });
    Some(made.map_err(|text| {
        let from = Value::Number(name.pid.into());
        log::line(Level::Error, "import", &[("from", from), ("text", Value::Text(text))]);
        INVALID_VALUE
    }))
}

/// Asks the exporter.
fn ask(name: Name) -> std::result::Result<(u64, Vec<u64>, Vec<OwnedFd>), String> {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = client::program(name.pid).map_err(|error| error.to_string())?;
    let request = Request::Import { nonce: name.nonce, number: name.number };
    control::write(&mut stream, &request, deadline).map_err(|error| error.to_string())?;
    let (line, files) = receive(&stream, deadline).map_err(|error| error.to_string())?;
    match serde_json::from_slice(&line).map_err(|error| error.to_string())? {
        Answer::Exported { bytes, pieces } => {
            let sum = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(*piece));
            let are_whole = pieces.iter().all(|piece| *piece != 0 && piece.is_multiple_of(GRANULE));
            let is_right =
                bytes != 0 && sum == bytes.checked_next_multiple_of(GRANULE) && pieces.len() == files.len();
            if is_right && are_whole {
                Ok((bytes, pieces, files))
            } else {
                Err("the answer makes no sense".into())
            }
        }
        Answer::Error(text) => Err(text),
        _ => Err("the answer is to another question".into()),
    }
}

/// A line, and the descriptors that came with it.
fn receive(stream: &UnixStream, deadline: Instant) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut line, mut files) = (Vec::new(), Vec::new());
    while line.last() != Some(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || line.len() > ANSWER {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut part = [0; 4 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(crate::control::DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [io::IoSliceMut::new(&mut part)];
        let got = match recvmsg(stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            got => got?.bytes,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                files.extend(descriptors);
            }
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&part[..got]);
    }
    Ok((line, files))
}

fn map(pieces: &[u64], files: Vec<OwnedFd>, device: Device) -> Result<u64> {
    with(|manager| {
        let driver = manager.driver();
        let all = pieces.iter().sum();
        let address = driver.reserve(all)?;
        let mut done = 0;
        let mapped = pieces.iter().zip(&files).try_for_each(|(bytes, file)| {
            let handle = sys::import(file)?;
            let mapped = driver.map(address + done, *bytes, handle, device);
            // What is mapped stays there without it.
            driver.release(handle)?;
            mapped?;
            done += bytes;
            Ok(())
        });
        match mapped {
            Ok(()) => Ok(address),
            Err(failure) => {
                let mut at = address;
                for bytes in pieces {
                    if at < address + done {
                        driver.unmap(at, *bytes)?;
                    }
                    at += bytes;
                }
                driver.unreserve(address, all)?;
                Err(failure)
            }
        }
    })
}

/// Unmaps what [`open`] mapped, if it was opened as often as this closes it; none where it mapped nothing there.
pub(crate) fn close(address: u64) -> Option<Result<()>> {
    let mut imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let import = imports.get_mut(&address)?;
    import.count -= 1;
    if import.count != 0 {
        return Some(Ok(()));
    }
    let import = imports.remove(&address)?;
    drop(imports);
    Some(inside(|| sys::synchronize(import.of.context)).and_then(|()| unmap(address, &import)))
}

fn unmap(address: u64, import: &Import) -> Result<()> {
    with(|manager| {
        let driver = manager.driver();
        let mut at = address;
        for bytes in &import.pieces {
            driver.unmap(at, *bytes)?;
            at += bytes;
        }
        driver.unreserve(address, at - address)
    })
}

/// What an address lies in, if it was imported: its address, bytes, and whose it is.
pub(crate) fn around(address: u64) -> Option<(u64, u64, Of)> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    let imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let (start, import) = imports.range(..=address).next_back()?;
    (address - start < import.bytes).then_some((*start, import.bytes, import.of))
}

/// All that is mapped: addresses and bytes.
pub(crate) fn pieces() -> Vec<(u64, u64)> {
    let imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let each = imports.iter().flat_map(|(start, import)| {
        import.pieces.iter().scan(*start, |at, bytes| Some((std::mem::replace(at, *at + bytes), *bytes)))
    });
    each.collect()
}

/// A context is gone, and with it what was imported there when there were so many things of contexts.
pub(crate) fn end_context(context: Context, until: u64) {
    let mut imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    imports.retain(|address, import| {
        // It fails only where nothing can be given back anyway.
        !import.of.ended(context, until) || unmap(*address, import).is_err()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_the_driver_are_not_taken_for_the_hooks() {
        let name = Name { pid: 7, nonce: u64::MAX - 3, number: 5 };
        let bytes = name.to_bytes();
        assert_eq!(Name::of(&bytes), Some(name));
        for at in [0, 7, 12, 15] {
            let mut other = bytes;
            other[at] ^= 0x10;
            assert_eq!(Name::of(&other), None, "byte {at}");
        }
        assert_eq!(Name::of(&[0; 64]), None);
    }
}
