//! The host's side of a checksum: CRC-32 of memory that the device reaches too, by several threads.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, available_parallelism};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::memory::Region;

/// Bytes that are copied and summed while they are in the cache.
const PIECE: usize = 64 << 10;
/// The most threads. One reads a few times more slowly than a fast link writes; more would not help.
const THREADS: usize = 4;

/// Copies `bytes` to a region as long, and gives the CRC-32 of what was copied.
pub(super) fn write(region: Region<'_>, bytes: &[u8]) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for (index, piece) in bytes.chunks(PIECE).enumerate() {
        region.slice((index * PIECE) as u64, piece.len() as u64)?.write_host(piece)?;
        hasher.update(piece);
    }
    Ok(hasher.finalize())
}

/// Copies a region to `bytes`, as long, and gives the CRC-32 of what came.
pub(super) fn read(region: Region<'_>, bytes: &mut [u8]) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for (index, piece) in bytes.chunks_mut(PIECE).enumerate() {
        region.slice((index * PIECE) as u64, piece.len() as u64)?.read_host(piece)?;
        hasher.update(piece);
    }
    Ok(hasher.finalize())
}

/// The CRC-32 of a region. It is summed in a copy: the device may write the region itself at any time.
pub(super) fn sum(region: Region<'_>) -> Result<u32> {
    let mut copy = vec![0; PIECE.min(region.bytes() as usize)];
    let mut hasher = crc32fast::Hasher::new();
    let mut at = 0;
    while at < region.bytes() {
        let piece = &mut copy[..PIECE.min((region.bytes() - at) as usize)];
        region.slice(at, piece.len() as u64)?.read_host(piece)?;
        hasher.update(piece);
        at += piece.len() as u64;
    }
    Ok(hasher.finalize())
}

/// Regions by number, of which the CRC-32 is computed.
pub(super) struct Sums {
    /// To the threads; without any, the caller does the work.
    regions: Option<Sender<(usize, Region<'static>)>>,
    sums: Receiver<(usize, Result<u32>)>,
    done: HashMap<usize, Result<u32>>,
}

impl Sums {
    /// Begins with a region. Its memory stays there as long as these sums.
    pub(super) fn begin(&mut self, number: usize, region: Region<'static>) {
        let left = match &self.regions {
            Some(regions) => regions.send((number, region)).is_err(),
            None => true,
        };
        if left {
            self.done.insert(number, sum(region));
        }
    }

    /// The sum of a region that was begun with.
    ///
    /// # Errors
    /// [`Error::Deadline`].
    pub(super) fn wait(&mut self, number: usize, deadline: Instant) -> Result<u32> {
        loop {
            if let Some(sum) = self.done.remove(&number) {
                return sum;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let late = |_| Error::Deadline { what: "the host's checksum of a copy".into() };
            let (number, sum) = self.sums.recv_timeout(left).map_err(late)?;
            self.done.insert(number, sum);
        }
    }
}

/// Runs `f` with sums of up to `regions` regions. When it returns, nobody reads them any more.
pub(super) fn with<R>(regions: usize, f: impl FnOnce(Sums) -> R) -> R {
    // One of the processors is the caller's, and two regions hardly pay for a thread.
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = THREADS.min(cores - 1).min(regions / 2);
    let (give, take) = channel::<(usize, Region<'static>)>();
    let take = Mutex::new(take);
    let (tell, sums) = channel();
    let work = |tell: Sender<_>| {
        loop {
            let next = take.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((number, region)) = next else { return };
            if tell.send((number, sum(region))).is_err() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        let started = (0..threads).filter(|_| {
            let (tell, work) = (tell.clone(), &work);
            Builder::new().name("crc32".into()).spawn_scoped(scope, move || work(tell)).is_ok()
        });
        let regions = (started.count() > 0).then_some(give);
        f(Sums { regions, sums, done: HashMap::new() })
    })
}
