//! What a process has at each event of its log.
//!
//! A log may have lost lines, so nothing of it is taken for granted: what is freed may be unknown, and what is allocated may lie where something
//! else still is, which then has ended.

use std::collections::BTreeMap;

use vm_hook::driver::GRANULE;
use vm_hook::manager::{Id, Kind};

use crate::trace::{Event, What};

/// How many allocations are kept at a time.
const MOST: usize = 4 << 20;

/// That an allocation has memory of another's from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) time: u64,
    /// Where it was.
    pub(crate) from: u64,
    pub(crate) bytes: u64,
}

/// An allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Of what has no address the handle.
    pub(crate) id: Id,
    pub(crate) bytes: u64,
    /// What it is of the driver's own, if it is.
    pub(crate) native: Option<Kind>,
    /// When it was allocated.
    pub(crate) since: u64,
    /// When it was freed, if it was.
    pub(crate) until: Option<u64>,
    /// So many bytes of its beginning had no memory at first.
    pub(crate) missing: u64,
    /// When they got some.
    pub(crate) filled: Option<u64>,
    /// When its memory became another's.
    pub(crate) left: Option<u64>,
    /// Is what filled it the host's?
    pub(crate) of_host: bool,
    /// Whose memory it took over.
    pub(crate) moved: Option<Move>,
    /// All blocks that one memory moved through have the same number, which others have not; 0 is of what never moved.
    pub(crate) family: usize,
}

impl Block {
    /// All that is reserved for it.
    fn reserved(&self) -> u64 {
        if self.native.is_some() { self.bytes } else { self.bytes.next_multiple_of(GRANULE) }
    }

    fn lacks(&self) -> u64 {
        match (self.left, self.filled) {
            (Some(_), _) => self.reserved(),
            (None, Some(_)) => 0,
            (None, None) => self.missing,
        }
    }

    /// The memory that it takes.
    pub(crate) fn taken(&self) -> u64 {
        self.reserved().saturating_sub(self.lacks())
    }
}

/// How often things happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) allocated: u64,
    pub(crate) freed: u64,
    pub(crate) moved: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) copied: u64,
    pub(crate) of_host: u64,
    pub(crate) failed: u64,
}

/// Bytes of all allocations together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// Of the driver's own allocations.
    pub(crate) native: u64,
    /// Of virtual memory that has physical memory.
    pub(crate) mapped: u64,
    /// Of virtual memory that has none yet.
    pub(crate) missing: u64,
    /// Of what is mapped, what is given back while the process is paused.
    pub(crate) paused: u64,
}

impl Sums {
    /// Of virtual memory what takes the device's.
    pub(crate) fn there(&self) -> u64 {
        self.mapped.saturating_sub(self.paused)
    }

    /// All that takes memory.
    pub(crate) fn taken(&self) -> u64 {
        self.native.saturating_add(self.there())
    }

    fn add(&mut self, block: &Block, sign: i8) {
        let (taken, lacks) = (block.taken(), block.lacks());
        let sum = if block.native.is_some() { &mut self.native } else { &mut self.mapped };
        // A log that means ill may have more than any machine.
        let apply = |sum: &mut u64, bytes| {
            *sum = if sign > 0 { sum.saturating_add(bytes) } else { sum.saturating_sub(bytes) };
        };
        apply(sum, taken);
        apply(&mut self.missing, lacks);
    }
}

/// What a process has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    live: BTreeMap<Id, Block>,
    pub(crate) sums: Sums,
    /// The most that was taken at a time.
    pub(crate) peak: u64,
    pub(crate) counts: Counts,
    families: usize,
}

impl Memory {
    /// The allocations that are there.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Block> {
        self.live.values()
    }

    /// Takes an event, and answers what ended by it.
    pub(crate) fn apply(&mut self, event: &Event) -> Option<Block> {
        let mut ended = None;
        match event.what {
            What::Allocated { id, bytes, missing, native } => {
                self.counts.allocated += 1;
                ended = self.end(id, event.time);
                if self.live.len() >= MOST {
                    return ended;
                }
                let block = Block {
                    id,
                    bytes,
                    native,
                    since: event.time,
                    until: None,
                    missing,
                    filled: None,
                    left: None,
                    of_host: false,
                    moved: None,
                    family: 0,
                };
                self.sums.add(&block, 1);
                self.live.insert(id, block);
            }
            What::Freed { id } => {
                self.counts.freed += 1;
                ended = self.end(id, event.time);
            }
            What::Moved { from, to, bytes } => {
                self.counts.moved += 1;
                self.counts.moved_bytes = self.counts.moved_bytes.saturating_add(bytes);
                let family = match self.live.get_mut(&Id::Address(from)) {
                    Some(source) if source.family != 0 => source.family,
                    source => {
                        self.families += 1;
                        source.into_iter().for_each(|source| source.family = self.families);
                        self.families
                    }
                };
                self.change(to, |target| {
                    target.moved = Some(Move { time: event.time, from, bytes });
                    target.filled = Some(event.time);
                    target.family = family;
                });
                // Its memory is another's now.
                self.change(from, |source| source.left = Some(event.time));
            }
            What::Filled { address, of_host, .. } => {
                self.counts.of_host += u64::from(of_host);
                self.change(address, |block| {
                    block.filled = Some(event.time);
                    block.of_host = of_host;
                });
            }
            What::Failed { .. } => self.counts.failed += 1,
            What::Copied => self.counts.copied += 1,
            What::Paused { bytes } => self.sums.paused = bytes,
            What::Resumed => self.sums.paused = 0,
            What::Start { .. } | What::Other => {}
        }
        self.peak = self.peak.max(self.sums.taken());
        ended
    }

    fn end(&mut self, id: Id, time: u64) -> Option<Block> {
        let mut block = self.live.remove(&id)?;
        self.sums.add(&block, -1);
        block.until = Some(time);
        Some(block)
    }

    fn change(&mut self, address: u64, change: impl FnOnce(&mut Block)) {
        if let Some(block) = self.live.get_mut(&Id::Address(address)) {
            self.sums.add(block, -1);
            change(block);
            self.sums.add(block, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn all(whats: impl IntoIterator<Item = What>) -> (Memory, Vec<Block>) {
        let mut memory = Memory::default();
        let events = (1..).zip(whats).map(|(time, what)| Event { time, pid: 1, what });
        let ended = events.filter_map(|event| memory.apply(&event)).collect();
        (memory, ended)
    }

    fn allocated(address: u64, bytes: u64, missing: u64) -> What {
        What::Allocated { id: Id::Address(address), bytes, missing, native: None }
    }

    #[test]
    fn memory_moves_from_one_to_the_next() {
        let moved = |from, to| What::Moved { from, to, bytes: 4 * MIB };
        let grown = || {
            [
                allocated(10, 4 * MIB, 0),
                allocated(20, 5 * MIB, 4 * MIB),
                moved(10, 20),
                What::Freed { id: Id::Address(10) },
            ]
        };
        let (memory, ended) = all(grown());
        assert_eq!((memory.sums, memory.peak), (Sums { mapped: 6 * MIB, ..Sums::default() }, 6 * MIB));
        assert_eq!((ended.len(), ended[0].left, ended[0].until, ended[0].family), (1, Some(3), Some(4), 1));
        let block = memory.live().next().expect("the second");
        assert_eq!((block.moved, block.family), (Some(Move { time: 3, from: 10, bytes: 4 * MIB }), 1));
        // The next of the same memory is of the same family, another's is not.
        let (memory, ended) = all(grown().into_iter().chain([
            allocated(30, 6 * MIB, 4 * MIB),
            moved(20, 30),
            What::Freed { id: Id::Address(20) },
            moved(77, 30),
        ]));
        assert_eq!((ended[1].family, memory.counts.moved, memory.counts.moved_bytes), (1, 3, 12 * MIB));
        assert_eq!(memory.live().next().map(|block| block.family), Some(2));
    }

    #[test]
    fn sums_are_of_what_is_there() {
        let check = |whats: Vec<What>, native: u64, mapped: u64, missing: u64| {
            let (memory, _) = all(whats.clone());
            assert_eq!(memory.sums, Sums { native, mapped, missing, paused: 0 }, "{whats:?}");
        };
        let own =
            |kind: Kind, bytes| What::Allocated { id: kind.id(1), bytes, missing: 0, native: Some(kind) };
        let native = |bytes| own(Kind::Device, bytes);
        let filled = What::Filled { address: 9, bytes: 2 * MIB, of_host: true };
        check(vec![native(5)], 5, 0, 0);
        check(vec![native(5), native(7)], 7, 0, 0);
        // What has a handle is not at an address.
        check(vec![native(5), own(Kind::Array, 7), own(Kind::Physical, 9), own(Kind::Pool, 1)], 17, 0, 0);
        check(vec![own(Kind::Array, 7), What::Freed { id: Id::Address(1) }], 7, 0, 0);
        check(
            vec![native(5), What::Freed { id: Id::Address(1) }, What::Freed { id: Id::Address(1) }],
            0,
            0,
            0,
        );
        check(vec![allocated(9, 3 * MIB, 2 * MIB)], 0, 2 * MIB, 2 * MIB);
        check(vec![allocated(9, 3 * MIB, 2 * MIB), filled.clone(), filled], 0, 4 * MIB, 0);
        let (memory, _) = all([allocated(9, 4 * MIB, 0), What::Paused { bytes: 3 * MIB }]);
        assert_eq!((memory.sums.taken(), memory.peak), (MIB, 4 * MIB));
        check(vec![allocated(9, 4 * MIB, 0), What::Paused { bytes: 9 * MIB }, What::Resumed], 0, 4 * MIB, 0);
        // Nonsense has some answer.
        check(vec![allocated(9, 2 * MIB, 0), What::Moved { from: 9, to: 9, bytes: 1 }], 0, 0, 2 * MIB);
        all((0..400).map(|address| allocated(address, 1 << 56, 0)));
    }
}
