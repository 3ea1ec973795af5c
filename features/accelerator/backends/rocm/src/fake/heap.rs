//! The fake's memory, which is the host's.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

/// What an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Device,
    Managed,
    Pinned,
    Registered,
}

impl Kind {
    /// Whether it is memory of the host, which all devices reach.
    pub(super) fn is_hosts(self) -> bool {
        matches!(self, Self::Pinned | Self::Registered)
    }
}

struct Block {
    kind: Kind,
    bytes: u64,
    /// How it was allocated, if it was.
    layout: Option<Layout>,
}

/// What was allocated and registered, by the first address.
pub(super) struct Heap {
    total: u64,
    blocks: BTreeMap<u64, Block>,
}

/// As the manual promises.
const ALIGN: usize = 4096;
/// What memory holds that nobody wrote.
const FRESH: u8 = 0xa5;

impl Heap {
    pub(super) fn new(total: u64) -> Self {
        Self { total, blocks: BTreeMap::new() }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn free(&self) -> u64 {
        let used = self.blocks.values().filter(|block| !block.kind.is_hosts()).map(|block| block.bytes);
        self.total - used.sum::<u64>()
    }

    /// Allocates, if there is room.
    pub(super) fn allocate(&mut self, kind: Kind, bytes: usize) -> Option<u64> {
        if bytes as u64 > self.free() {
            return None;
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the layout has at least one byte.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: that many bytes were allocated just now.
        unsafe { start.write_bytes(FRESH, bytes) };
        let address = start.expose_provenance() as u64;
        self.blocks.insert(address, Block { kind, bytes: bytes as u64, layout: Some(layout) });
        Some(address)
    }

    /// Registers memory that nobody has.
    pub(super) fn register(&mut self, at: u64, bytes: u64) -> bool {
        let before = self.blocks.range(..at.saturating_add(bytes)).next_back();
        let is_free = bytes > 0 && before.is_none_or(|(from, block)| from + block.bytes <= at);
        if is_free {
            self.blocks.insert(at, Block { kind: Kind::Registered, bytes, layout: None });
        }
        is_free
    }

    /// The length of what begins at an address, if it is of one of these kinds.
    pub(super) fn at(&self, at: u64, kinds: &[Kind]) -> Option<u64> {
        self.blocks.get(&at).filter(|block| kinds.contains(&block.kind)).map(|block| block.bytes)
    }

    /// Gives back what begins at an address.
    pub(super) fn give(&mut self, at: u64) {
        if let Some(Block { layout: Some(layout), .. }) = self.blocks.remove(&at) {
            // SAFETY: it was allocated so, and is no longer known.
            unsafe { dealloc(std::ptr::with_exposed_provenance_mut(at as usize), layout) };
        }
    }

    /// What these bytes are part of.
    pub(super) fn find(&self, at: u64, bytes: u64) -> Option<Kind> {
        let (from, block) = self.blocks.range(..=at).next_back()?;
        (bytes <= block.bytes && at - from <= block.bytes - bytes).then_some(block.kind)
    }

    pub(super) fn left(&self) -> Vec<String> {
        self.blocks
            .iter()
            .map(|(at, block)| format!("{:?} memory {at:#x}, {} bytes", block.kind, block.bytes))
            .collect()
    }
}
