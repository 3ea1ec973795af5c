//! A guest's balance of accelerator time, beyond the life of its workers: a file of the VMM's that each worker is given in
//! turn. A guest that resets its device, or whose worker is killed, owes what it owed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::time::{ClockId, clock_gettime};

use vm_bridge::server::SLICE;

use crate::vmm::memory::memfd;

/// Three numbers of 8 bytes. Behind them is what workers of CUDA programs say.
const BYTES: usize = 24;

/// The time that has passed since the machine was started: the same for the VMM and its workers.
pub(crate) fn now() -> Duration {
    // The Linux kernel's is never below zero.
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// What stands in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The balance in nanoseconds; below zero it is a debt.
    pub(crate) balance: i64,
    /// When that was the balance.
    pub(crate) at: Duration,
    /// Since when the accelerator has worked for the guest, which is not in the balance yet.
    pub(crate) since: Option<Duration>,
}

/// The file. It holds [`None`] until a worker writes to it.
#[derive(Debug)]
pub(crate) struct Meter(File);

impl Meter {
    /// A meter of which nothing is known yet.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn new() -> io::Result<Self> {
        let file = memfd("guest-time", SLICE, MemfdFlags::empty())?;
        // Its page is there from now on, so that no worker's write fails.
        file.write_all_at(&[0; BYTES], 0)?;
        Ok(Self(file))
    }

    /// The same file again.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// What the worker before left.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn read(&self) -> io::Result<Option<Reading>> {
        let mut bytes = [0; BYTES];
        self.0.read_exact_at(&mut bytes, 0)?;
        let (numbers, _) = bytes.as_chunks();
        let [balance, at, since] = [0, 1, 2].map(|index| u64::from_le_bytes(numbers[index]));
        let time = |nanos| (nanos != 0).then(|| Duration::from_nanos(nanos));
        Ok(time(at).map(|at| Reading { balance: balance as i64, at, since: time(since) }))
    }

    /// Leaves what the next worker goes on with.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn write(&self, reading: &Reading) -> io::Result<()> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let numbers = [reading.balance as u64, nanos(reading.at), reading.since.map_or(0, nanos)];
        let mut bytes = [0; BYTES];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        self.0.write_all_at(&bytes, 0)
    }

    /// Takes of the balance what a worker that is gone by `now` had under way.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn settle(&self, now: Duration) -> io::Result<()> {
        let Some(reading @ Reading { since: Some(since), .. }) = self.read()? else { return Ok(()) };
        let used = i64::try_from(now.saturating_sub(since).as_nanos()).unwrap_or(i64::MAX);
        self.write(&Reading { balance: reading.balance.saturating_sub(used), since: None, ..reading })
    }
}

impl AsFd for Meter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Meter {
    fn from(file: OwnedFd) -> Self {
        Self(file.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_under_way_at_the_end_is_owed() {
        let meter = Meter::new().unwrap();
        let second = Duration::from_secs;
        assert_eq!(meter.read().unwrap(), None);
        meter.settle(second(9)).unwrap();
        assert_eq!(meter.read().unwrap(), None);
        let check = |balance, since, now, left| {
            meter.write(&Reading { balance, at: second(5), since }).unwrap();
            meter.settle(now).unwrap();
            // A second time changes nothing.
            meter.settle(now.saturating_add(second(3))).unwrap();
            let expect = Reading { balance: left, at: second(5), since: None };
            assert_eq!(meter.try_clone().unwrap().read().unwrap(), Some(expect));
        };
        check(7, None, second(9), 7);
        check(7, Some(second(6)), second(9), 7 - 3_000_000_000);
        // Whatever a worker writes.
        check(-7, Some(second(10)), second(9), -7);
        check(i64::MIN, Some(second(6)), second(9), i64::MIN);
        check(0, Some(Duration::from_nanos(1)), Duration::MAX, -i64::MAX);
    }
}
