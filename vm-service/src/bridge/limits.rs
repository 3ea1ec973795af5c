//! What programs may have of the device: of a server, or of a guest, all together.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use vm_bridge::orders;
use vm_bridge::server::{Pot, SLOT};

use super::gateway::PROGRAMS;
use crate::vmm::memory::memfd;

/// Places for workers: programs that are served, by each way, and as many that end.
const SLOTS: usize = 4 * PROGRAMS;

/// What all programs together may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of device memory; `None` for as much as there is.
    pub(crate) memory: Option<u64>,
    /// How long what a program has on the device may make no progress; `None` for as long as it likes.
    pub(crate) deadline: Option<Duration>,
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

/// The pot of a worker that was given these bytes and this slot, in a file that its server gives.
///
/// # Errors
/// When the file does not come, or is not one.
pub(super) fn pot(share: Option<(u64, usize)>, mut server: &UnixStream) -> io::Result<Option<Pot>> {
    let Some((memory, slot)) = share else { return Ok(None) };
    let Some((_, [Some(file), None])) = orders::receive(server)? else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    server.write_all(&0u64.to_ne_bytes())?;
    Pot::open(&file, slot, memory).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

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
