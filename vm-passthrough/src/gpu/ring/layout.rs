//! Where the parts of a ring are in its memory.

use super::methods::ADDRESS_BITS;

/// Bytes of an entry (`NV_PPBDMA_GP_ENTRY__SIZE`).
pub const ENTRY_SIZE: u64 = 8;
/// Most entries of a ring.
pub const MOST_ENTRIES: u32 = 1 << 12;
/// Fewest: one is always empty.
pub const FEWEST_ENTRIES: u32 = 2;
/// Dwords of a pushbuffer segment.
pub(super) const SEGMENT_DWORDS: usize = 128;

/// `NV_RAMUSERD_GP_GET`, in bytes from the start of USERD: the entry that the device processes next. The device writes it.
pub const GP_GET: u64 = 0x88;
/// `NV_RAMUSERD_GP_PUT`: the entry that is written next.
pub const GP_PUT: u64 = 0x8c;
/// In the error notifier, which error it was (`NvNotification.info32`).
pub const NOTIFIER_INFO: u64 = 8;
/// In its upper half, the status: anything but 0 after an error (`NvNotification.status`).
pub const NOTIFIER_STATUS: u64 = 12;

const FENCE: u64 = 0x200;
const NOTIFIER: u64 = 0x210;
const ENTRIES: u64 = 0x1000;

/// Whether a ring can have that many entries.
pub(super) fn is_count(entries: u32) -> bool {
    entries.is_power_of_two() && (FEWEST_ENTRIES..=MOST_ENTRIES).contains(&entries)
}

/// The addresses of a ring's parts, as the device has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Where its memory begins.
    pub(super) iova: u64,
    /// Number of entries, a power of two.
    pub(super) entries: u32,
}

impl Layout {
    /// That of a ring whose memory begins there; `None` where that is out of a channel's reach, or the number of entries is no
    /// ring's.
    pub(crate) fn new(iova: u64, entries: u32) -> Option<Self> {
        let len = is_count(entries).then_some(Self { iova: 0, entries })?.len();
        let is_in_reach = iova.checked_add(len).is_some_and(|end| end <= 1 << ADDRESS_BITS);
        is_in_reach.then_some(Self { iova, entries })
    }

    /// User-driver accessible RAM: what both sides know of the ring.
    pub fn userd(&self) -> u64 {
        self.iova
    }

    /// The semaphore to which each submission writes its number when it is done.
    pub fn fence(&self) -> u64 {
        self.iova + FENCE
    }

    /// Where the device tells of an error: 16 bytes (`NvNotification`).
    pub fn notifier(&self) -> u64 {
        self.iova + NOTIFIER
    }

    /// The entries.
    pub fn entries(&self) -> u64 {
        self.iova + ENTRIES
    }

    /// How many there are, a power of two.
    pub fn count(&self) -> u32 {
        self.entries
    }

    /// Where an entry is.
    pub(super) fn entry(&self, index: u32) -> u64 {
        self.entries() + u64::from(index) * ENTRY_SIZE
    }

    /// Where the pushbuffer segment of an entry is.
    pub(super) fn segment(&self, index: u32) -> u64 {
        self.entry(self.entries) + u64::from(index) * SEGMENT_DWORDS as u64 * 4
    }

    /// Bytes of it all.
    pub(super) fn len(&self) -> u64 {
        self.segment(self.entries) - self.iova
    }
}
