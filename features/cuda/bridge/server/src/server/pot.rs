//! Device memory that several programs may hold together: a file of slots, one for each worker.
//!
//! A worker writes what it holds into its slot, and sees by the sum of all whether that is too much. It says so before it looks: of two that take the
//! last memory at once both may be refused, but never have both. Who made the file clears the slot of a worker that has ended, and those that no
//! worker has. A worker that was taken over can write any slot: it starves the others of its pot, until each of them writes its own again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

use super::session::locked;
use super::sys::Slots;

/// Bytes of a slot in the file.
pub const SLOT: u64 = 8;

/// What a session may hold, of which it has a part.
#[derive(Debug)]
pub struct Pot {
    limit: u64,
    own: usize,
    slots: Slots,
    held: Mutex<u64>,
}

impl Pot {
    /// The pot of a file of slots, of which `own` is this process's, with `limit` bytes.
    ///
    /// # Errors
    /// When the file can't be mapped, may shrink, or has no such slot.
    pub fn open(file: &OwnedFd, own: usize, limit: u64) -> io::Result<Self> {
        let slots = Slots::map(file)?;
        if own >= slots.all().len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { limit, own, slots, held: Mutex::new(0) })
    }

    /// How much it is for all.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    fn sum(&self) -> u64 {
        self.slots.all().iter().fold(0, |sum: u64, slot| sum.saturating_add(slot.load(SeqCst)))
    }

    /// How much of it nobody holds.
    pub(super) fn left(&self) -> u64 {
        self.limit.saturating_sub(self.sum())
    }

    /// Is more held than there is?
    pub(super) fn is_over(&self) -> bool {
        self.sum() > self.limit
    }

    fn write(&self, held: u64) {
        self.slots.all()[self.own].store(held, SeqCst);
    }

    /// Takes so much more, unless it is too much for all.
    #[must_use]
    pub(super) fn take(&self, bytes: u64) -> bool {
        let mut held = locked(&self.held);
        let before = *held;
        let Some(more) = before.checked_add(bytes) else { return false };
        self.write(more);
        if bytes > 0 && self.is_over() {
            self.write(before);
            return false;
        }
        *held = more;
        true
    }

    /// Has so much more, whatever that comes to: the driver has given it already.
    pub(super) fn owe(&self, bytes: u64) {
        let mut held = locked(&self.held);
        *held = held.saturating_add(bytes);
        self.write(*held);
    }

    /// Gives so much back.
    pub(super) fn give(&self, bytes: u64) {
        let mut held = locked(&self.held);
        *held = held.saturating_sub(bytes);
        self.write(*held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    fn file(slots: u64, seals: SealFlags) -> OwnedFd {
        let file = memfd_create("pot", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, slots * SLOT).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn workers_have_no_more_together_than_there_is() {
        let file = file(3, SealFlags::SHRINK);
        let open = |own| Pot::open(&file, own, 100).unwrap();
        let (one, two) = (open(0), open(2));
        assert!(one.take(60) && !two.take(41) && two.take(40) && !one.take(1) && one.take(0));
        assert_eq!((one.left(), two.left()), (0, 0));
        one.give(30);
        assert!(!two.take(31) && two.take(30) && !two.take(u64::MAX));
        // The driver gave more than was asked for.
        two.owe(10);
        assert_eq!(one.left(), 0);
        assert!(!one.take(1));
        // One that has ended: its server clears its slot.
        rustix::io::pwrite(&file, &[0; 8], 2 * SLOT).unwrap();
        assert_eq!(one.left(), 70);
        // What another has written into one's slot is gone with the next change.
        rustix::io::pwrite(&file, &[0; 8], 0).unwrap();
        assert!(one.take(10));
        assert_eq!(one.left(), 60);
    }

    #[test]
    fn a_file_that_may_shrink_or_is_too_short_is_no_pot() {
        let check = |slots, seals, own, is_one: bool| {
            assert_eq!(Pot::open(&file(slots, seals), own, 1).is_ok(), is_one, "{slots} {seals:?} {own}");
        };
        check(1, SealFlags::SHRINK, 0, true);
        check(1, SealFlags::SHRINK, 1, false);
        check(0, SealFlags::SHRINK, 0, false);
        check(1, SealFlags::GROW, 0, false);
    }

    #[test]
    fn threads_of_two_workers_never_have_too_much() {
        let file = file(2, SealFlags::SHRINK);
        let pots = [0, 1].map(|own| Pot::open(&file, own, 1000).unwrap());
        std::thread::scope(|scope| {
            for pot in pots.iter().chain(&pots) {
                scope.spawn(move || {
                    for bytes in (1..300).cycle().take(20_000) {
                        if pot.take(bytes) {
                            pot.give(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(pots[0].left(), 1000);
    }
}
