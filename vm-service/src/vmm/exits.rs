//! Counts what makes the guest leave to user space, and notes what it is doing there.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// What a guest accessed when it left to user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HotSpot {
    /// Read from an I/O port.
    PortRead(u16),
    /// Wrote to an I/O port.
    PortWrite(u16),
    /// Read memory in this page.
    MemoryRead(u64),
    /// Wrote memory in this page.
    MemoryWrite(u64),
}

impl fmt::Display for HotSpot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortRead(port) => write!(f, "read of port {port:#x}"),
            Self::PortWrite(port) => write!(f, "write of port {port:#x}"),
            Self::MemoryRead(page) => write!(f, "read of page {page:#x}"),
            Self::MemoryWrite(page) => write!(f, "write of page {page:#x}"),
        }
    }
}

/// Exits to user space by kind, since the machine started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCounts {
    /// Reads of I/O ports.
    pub port_reads: u64,
    /// Writes of I/O ports.
    pub port_writes: u64,
    /// Reads of memory that is not RAM.
    pub memory_reads: u64,
    /// Writes of memory that is not RAM.
    pub memory_writes: u64,
    /// Signals to the vCPU's thread.
    pub interrupted: u64,
    /// Everything else.
    pub other: u64,
    #[serde(with = "spots")]
    spots: HashMap<HotSpot, u64>,
}

/// The counts by spot as pairs, as keys of JSON are text.
mod spots {
    use serde::{Deserializer, Serializer};

    use super::{Deserialize as _, HashMap, HotSpot};

    pub(super) fn serialize<S: Serializer>(spots: &HashMap<HotSpot, u64>, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(spots)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<HashMap<HotSpot, u64>, D::Error> {
        Ok(Vec::deserialize(from)?.into_iter().collect())
    }
}

/// A guest can touch any number of addresses; those first seen after this number are counted by kind only.
const MAX_SPOTS: usize = 1024;

impl ExitCounts {
    /// All exits.
    pub fn total(&self) -> u64 {
        self.port_reads
            + self.port_writes
            + self.memory_reads
            + self.memory_writes
            + self.interrupted
            + self.other
    }

    /// What was accessed most, most frequent first.
    pub fn hot_spots(&self) -> Vec<(HotSpot, u64)> {
        let mut spots: Vec<_> = self.spots.iter().map(|(spot, count)| (*spot, *count)).collect();
        spots.sort_by_key(|&(spot, count)| (std::cmp::Reverse(count), spot));
        spots
    }

    /// Counts an access.
    pub(super) fn count(&mut self, spot: HotSpot) {
        let kind = match spot {
            HotSpot::PortRead(_) => &mut self.port_reads,
            HotSpot::PortWrite(_) => &mut self.port_writes,
            HotSpot::MemoryRead(_) => &mut self.memory_reads,
            HotSpot::MemoryWrite(_) => &mut self.memory_writes,
        };
        *kind += 1;
        if self.spots.len() < MAX_SPOTS || self.spots.contains_key(&spot) {
            *self.spots.entry(spot).or_default() += 1;
        }
    }

    /// Adds another vCPU's counts.
    pub(super) fn add(&mut self, other: &Self) {
        self.port_reads += other.port_reads;
        self.port_writes += other.port_writes;
        self.memory_reads += other.memory_reads;
        self.memory_writes += other.memory_writes;
        self.interrupted += other.interrupted;
        self.other += other.other;
        for (spot, count) in &other.spots {
            *self.spots.entry(*spot).or_default() += count;
        }
    }
}

/// The access that a vCPU's thread serves now, for another thread to see.
#[derive(Debug)]
pub(super) struct Access(AtomicU64);

/// What stands there before the first access.
const NEVER: u64 = 5;

impl Default for Access {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

/// Pages leave this number of bits for what is done to them.
const KIND_BITS: u32 = 12;

impl Access {
    /// Notes that an access begins. Memory is named by its page.
    pub(super) fn begin(&self, spot: HotSpot) {
        let (kind, place) = match spot {
            HotSpot::PortRead(port) => (1, u64::from(port) << KIND_BITS),
            HotSpot::PortWrite(port) => (2, u64::from(port) << KIND_BITS),
            HotSpot::MemoryRead(page) => (3, page),
            HotSpot::MemoryWrite(page) => (4, page),
        };
        self.0.store(place >> KIND_BITS << KIND_BITS | kind, Ordering::Relaxed);
    }

    /// Notes that it is over.
    pub(super) fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether there was one.
    pub(super) fn has_begun(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NEVER
    }

    /// The access; `None` when there is none.
    pub(super) fn now(&self) -> Option<HotSpot> {
        let noted = self.0.load(Ordering::Relaxed);
        let (place, port) = (noted >> KIND_BITS << KIND_BITS, (noted >> KIND_BITS) as u16);
        match noted - place {
            1 => Some(HotSpot::PortRead(port)),
            2 => Some(HotSpot::PortWrite(port)),
            3 => Some(HotSpot::MemoryRead(place)),
            4 => Some(HotSpot::MemoryWrite(place)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_is_seen_until_it_ends() {
        let access = Access::default();
        assert!(!access.has_begun());
        for spot in [
            HotSpot::PortRead(0),
            HotSpot::PortWrite(u16::MAX),
            HotSpot::MemoryRead(0),
            HotSpot::MemoryWrite(!0xfff),
        ] {
            assert_eq!(access.now(), None);
            access.begin(spot);
            assert_eq!(access.now(), Some(spot));
            access.end();
            assert!(access.has_begun());
        }
    }

    #[test]
    fn the_most_frequent_comes_first_and_the_table_is_bounded() {
        let mut counts = ExitCounts::default();
        for page in 0..3 * MAX_SPOTS as u64 {
            counts.count(HotSpot::MemoryRead(page));
        }
        counts.count(HotSpot::MemoryRead(7));
        assert_eq!(counts.memory_reads, 3 * MAX_SPOTS as u64 + 1);
        assert_eq!(counts.hot_spots()[0], (HotSpot::MemoryRead(7), 2));
        assert_eq!(counts.hot_spots().len(), MAX_SPOTS);
        let mut sum = ExitCounts::default();
        sum.add(&counts);
        assert_eq!(sum, counts);
    }
}
