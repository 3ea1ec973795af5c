//! Which address has which physical memory. Nothing here asks a driver.

use std::collections::BTreeMap;

use crate::driver::{Context, Device, GRANULE, Handle};
use crate::plan;

/// Physical memory that is mapped as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins, from the allocation's beginning on.
    pub offset: u64,
    /// How large it is.
    pub bytes: u64,
    /// Its handle.
    pub handle: Handle,
    /// Is it the host's memory?
    pub of_host: bool,
}

/// What has no memory while the program is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Away {
    /// Where it begins, from the allocation's beginning on.
    pub offset: u64,
    /// How large it is.
    pub bytes: u64,
    /// Where its contents are in the context's host memory; none if they were dropped.
    pub saved: Option<u64>,
    /// Memory that is mapped there although resuming failed, as it could not be unmapped.
    pub left: Option<Handle>,
}

/// What a program says of its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// What it is.
    pub name: String,
    /// Need its contents not outlive a pause?
    pub is_droppable: bool,
}

/// Memory that a program was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its address.
    pub address: u64,
    /// What was asked for.
    pub bytes: u64,
    /// Where it was allocated.
    pub context: Context,
    /// The context's device.
    pub device: Device,
    /// What is mapped, in order, without gaps from [`missing`](Allocation::missing) on.
    pub pieces: Vec<Piece>,
    /// So many bytes from the beginning have no memory yet.
    pub missing: u64,
    /// Somebody else may reach its memory by other ways: it is never moved again.
    pub is_pinned: bool,
    /// Which allocation it was, counted from 1.
    pub number: u64,
    /// Pieces without memory while the program is paused.
    pub away: Vec<Away>,
    /// What the program says of it.
    pub tag: Option<Tag>,
    /// The call stack that allocated it, if stacks are recorded.
    pub stack: Option<Stack>,
}

/// Return addresses, the innermost first.
pub type Stack = std::sync::Arc<[usize]>;

impl Allocation {
    /// All that is reserved for it.
    pub fn reserved(&self) -> u64 {
        self.bytes.next_multiple_of(GRANULE)
    }

    /// How much physical memory it has.
    pub fn backed(&self) -> u64 {
        self.reserved() - self.missing - self.paused()
    }

    /// Cuts what has no memory into the parts that it gets it in, behind so much of others.
    pub fn cut(&mut self, mapped: &mut u64) {
        for mut away in std::mem::take(&mut self.away) {
            loop {
                let bytes =
                    if away.left.is_some() { away.bytes } else { away.bytes.min(plan::part(*mapped)) };
                *mapped += bytes;
                self.away.push(Away { bytes, ..away });
                if bytes == away.bytes {
                    break;
                }
                away.offset += bytes;
                away.bytes -= bytes;
                away.saved = away.saved.map(|saved| saved + bytes);
            }
        }
    }

    /// How much of it has no memory as the program is paused.
    pub fn paused(&self) -> u64 {
        self.away.iter().map(|away| away.bytes).sum()
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Tracker {
    by_address: BTreeMap<u64, Allocation>,
    count: u64,
    /// All that is reserved.
    reserved: u64,
}

impl Tracker {
    /// Adds one, and numbers it.
    pub fn insert(&mut self, mut allocation: Allocation) -> &Allocation {
        self.count += 1;
        allocation.number = self.count;
        self.reserved += allocation.reserved();
        let address = allocation.address;
        self.by_address.entry(address).insert_entry(allocation).into_mut()
    }

    /// Takes one out by its address.
    pub fn remove(&mut self, address: u64) -> Option<Allocation> {
        let removed = self.by_address.remove(&address)?;
        self.reserved -= removed.reserved();
        Some(removed)
    }

    /// How many there have been.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// All that is reserved for them.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The one at an address.
    pub fn at(&self, address: u64) -> Option<&Allocation> {
        self.by_address.get(&address)
    }

    /// The same, to be changed.
    pub fn at_mut(&mut self, address: u64) -> Option<&mut Allocation> {
        self.by_address.get_mut(&address)
    }

    /// The one that an address lies in.
    pub fn around(&self, address: u64) -> Option<&Allocation> {
        let (_, allocation) = self.by_address.range(..=address).next_back()?;
        (address - allocation.address < allocation.reserved()).then_some(allocation)
    }

    /// The one that an address lies in, to be changed.
    pub fn around_mut(&mut self, address: u64) -> Option<&mut Allocation> {
        let (_, allocation) = self.by_address.range_mut(..=address).next_back()?;
        (address - allocation.address < allocation.reserved()).then_some(allocation)
    }

    /// All, by address.
    pub fn all(&self) -> impl Iterator<Item = &Allocation> {
        self.by_address.values()
    }

    /// All, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Allocation> {
        self.by_address.values_mut()
    }

    /// Does any lack memory?
    pub fn is_missing(&self) -> bool {
        self.all().any(|allocation| allocation.missing != 0)
    }
}
