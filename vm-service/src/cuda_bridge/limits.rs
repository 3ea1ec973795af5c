//! What programs may have of the device: of a server, or of a guest, all together.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use vm_bridge::orders;
use vm_bridge::server::{Pot, SLICE, SLOT, Slice};

use super::capacity::PROGRAMS;
use crate::config::TIME_PERIOD;
use crate::vmm::memory::memfd;

/// Places for workers: programs that are served, and as many that end.
const SLOTS: usize = 2 * PROGRAMS;

/// Host memory of a program where neither it nor the device's is limited.
const HOST_MEMORY: u64 = 4 << 30;
/// The least that a limit of device memory implies: images of large libraries take as much.
const LEAST_DEFAULT: u64 = 256 << 20;

/// What all programs together may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of device memory; `None` for as much as there is.
    pub(crate) memory: Option<u64>,
    /// Bytes of host memory that each worker may hold for its program; see [`Limits::host_memory`].
    pub(crate) host_memory: Option<u64>,
    /// How long what a program has on the device may make no progress; `None` for as long as it likes.
    pub(crate) deadline: Option<Duration>,
    /// How long of every [`TIME_PERIOD`] they may keep the device busy; `None`, and the period itself, for all of it.
    pub(crate) time_slice: Option<Duration>,
}

impl Limits {
    /// Returns how much host memory each worker may hold for its program: by default as much as device memory.
    pub(super) fn host_memory(&self) -> u64 {
        let device = || self.memory.map_or(HOST_MEMORY, |memory| memory.max(LEAST_DEFAULT));
        self.host_memory.unwrap_or_else(device)
    }
}

/// A time slice, and the file that says what is owed.
#[derive(Debug)]
pub(super) struct Share {
    slice: Duration,
    file: File,
}

impl Share {
    /// The slice, if it is one, of a file that is there already, or of one of which nothing is owed.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn new(slice: Option<Duration>, file: Option<OwnedFd>) -> io::Result<Option<Self>> {
        let Some(slice) = slice.filter(|slice| *slice < TIME_PERIOD) else { return Ok(None) };
        let file = match file {
            Some(file) => file.into(),
            None => memfd("bridge-time", SLICE, MemfdFlags::empty())?,
        };
        Ok(Some(Self { slice, file }))
    }

    /// The argument for a worker.
    pub(super) fn argument(&self) -> String {
        format!("--time-slice={}", self.slice.as_micros())
    }

    /// The file.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The device memory that workers hold, and their places in the file that says how much each.
#[derive(Clone, Debug)]
pub(super) struct Places(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    memory: u64,
    taken: Mutex<Vec<bool>>,
}

impl Places {
    /// Places of which none is taken.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn new(memory: u64) -> io::Result<Self> {
        let file = memfd("bridge-memory", SLOTS as u64 * SLOT, MemfdFlags::empty())?;
        Ok(Self(Arc::new(Inner { file, memory, taken: Mutex::new(vec![false; SLOTS]) })))
    }

    fn taken(&self) -> MutexGuard<'_, Vec<bool>> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn take(&self) -> io::Result<Place> {
        let mut taken = self.taken();
        let free = taken.iter().position(|taken| !taken);
        let slot = free.ok_or_else(|| io::Error::other(format!("there are {SLOTS} workers already")))?;
        taken[slot] = true;
        Ok(Place { of: self.clone(), slot })
    }
}

/// The place of a worker, which is gone when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    of: Places,
    slot: usize,
}

impl Place {
    /// Arguments for the worker.
    pub(super) fn arguments(&self) -> [String; 2] {
        [format!("--memory={}", self.of.0.memory), format!("--slot={}", self.slot)]
    }

    /// The file that it is a place of.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.of.0.file.as_fd()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.of.taken();
        taken[self.slot] = false;
        // A worker that was taken over may have written where nobody is, too.
        for (slot, _) in taken.iter().enumerate().filter(|(_, taken)| !**taken) {
            if let Err(error) = self.of.0.file.write_all_at(&[0; SLOT as usize], slot as u64 * SLOT) {
                tracing::error!(%error, "what a worker held of the device's memory is not given back");
            }
        }
    }
}

/// What a worker may have: the pot of these bytes and this slot, and a time slice, in files that its server gives in one order.
///
/// # Errors
/// When the files do not come, or are not what they should be.
pub(super) fn given(
    share: Option<(u64, usize)>,
    slice: Option<Duration>,
    mut server: &UnixStream,
) -> io::Result<(Option<Pot>, Option<Slice>)> {
    if share.is_none() && slice.is_none() {
        return Ok((None, None));
    }
    let (_, files) = orders::receive(server)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut files = files.into_iter().flatten();
    let mut next = || files.next().ok_or(io::Error::from(io::ErrorKind::UnexpectedEof));
    let pot = share.map(|(memory, slot)| Pot::open(&next()?, slot, memory)).transpose()?;
    let slice = slice.map(|slice| Slice::open(&next()?, slice)).transpose()?;
    server.write_all(&0u64.to_ne_bytes())?;
    Ok((pot, slice))
}

/// The socket to which a worker writes its recording, which its server gives after those files.
///
/// # Errors
/// When it does not come.
pub(super) fn given_recording(mut server: &UnixStream) -> io::Result<File> {
    let (_, files) = orders::receive(server)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let file = files.into_iter().flatten().next().ok_or(io::ErrorKind::UnexpectedEof)?;
    server.write_all(&0u64.to_ne_bytes())?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_as_much_as_device_memory_by_default() {
        let check = |memory, host_memory, expect: u64| {
            let limits = Limits { memory, host_memory, ..Limits::default() };
            assert_eq!(limits.host_memory(), expect << 20, "{limits:?}");
        };
        check(None, None, 4096);
        check(Some(64 << 20), None, 256);
        check(Some(8 << 30), None, 8192);
        check(Some(8 << 30), Some(32 << 20), 32);
    }

    #[test]
    fn what_a_worker_held_is_given_back_with_its_place() {
        let places = Places::new(100).unwrap();
        let word = |slot: u64| {
            let mut bytes = [0; 8];
            places.0.file.read_exact_at(&mut bytes, slot * SLOT).unwrap();
            u64::from_ne_bytes(bytes)
        };
        let write =
            |slot: u64, word: u64| places.0.file.write_all_at(&word.to_ne_bytes(), slot * SLOT).unwrap();
        let (one, two) = (places.take().unwrap(), places.take().unwrap());
        assert_eq!((one.slot, two.slot), (0, 1));
        assert_eq!(two.arguments(), ["--memory=100", "--slot=1"]);
        // The second writes where it is, and where nobody is.
        [(0, 7), (1, 8), (9, 9)].into_iter().for_each(|(slot, held)| write(slot, held));
        drop(two);
        assert_eq!((word(0), word(1), word(9)), (7, 0, 0));
        drop(one);
        assert_eq!(word(0), 0);
        let all: Vec<_> = (0..SLOTS).map(|_| places.take().unwrap()).collect();
        assert!(places.take().is_err());
        drop(all);
        assert!(places.take().is_ok());
    }
}
