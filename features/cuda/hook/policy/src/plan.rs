//! What is done with an allocation and with a copy: decisions alone.

use crate::driver::{Context, Device, GRANULE};
use crate::tracker::{Allocation, Tracker};

/// From how many bytes on moving memory beats copying it: where a move of a few hundred microseconds is less than a copy and a release.
pub const BREAK_EVEN: u64 = 256 << 20;
/// What must be free beside an allocation that puts some of it off.
pub const SPARE: u64 = 64 << 20;

/// The least and the most that memory is mapped again in: the first part is soon done, and none keeps other calls of the driver waiting for long.
const PART: (u64, u64) = (256 << 20, 1 << 30);

/// How much memory is mapped again at once, behind so much that is. Mapping is several times as fast as the copies that follow it, so these do not
/// wait for parts that grow.
pub fn part(mapped: u64) -> u64 {
    mapped.clamp(PART.0, PART.1)
}

/// How an allocation is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// By the driver's own function.
    Native,
    /// All of it is virtual memory.
    Whole,
    /// So is what lies behind so many bytes, which wait for the memory of another allocation that is likely to be copied there.
    Behind(u64),
}

/// How `bytes` are allocated for a context of a device. `could_wait` tells whether no work runs that might look at memory, and so many bytes are free;
/// it is asked only where that matters.
pub fn allocate(
    tracker: &Tracker,
    context: Context,
    device: Device,
    bytes: u64,
    could_wait: impl FnOnce(u64) -> bool,
) -> Backing {
    // Of which there is none the driver says so itself.
    let Some(reserved) = bytes.checked_next_multiple_of(GRANULE) else { return Backing::Native };
    // 512 bytes must not cost 2 MiB.
    if bytes < GRANULE || reserved - bytes > bytes / 8 {
        return Backing::Native;
    }
    let is_like = |from: &&Allocation| {
        (from.context, from.device) == (context, device)
            && !from.is_pinned
            && from.missing == 0
            && from.reserved() >= BREAK_EVEN
            && from.reserved() <= reserved
    };
    let from = tracker.all().filter(is_like).max_by_key(|from| (from.reserved(), from.number));
    match from.map(Allocation::reserved) {
        Some(first) if could_wait(reserved.saturating_add(SPARE)) => Backing::Behind(first),
        _ => Backing::Whole,
    }
}

/// May a copy of `bytes` from one allocation's beginning to another's wait for the first to be freed?
pub fn may_wait(from: &Allocation, to: &Allocation, bytes: u64) -> bool {
    bytes != 0
        && bytes <= from.bytes
        && from.address != to.address
        && from.missing == 0
        && !from.is_pinned
        && !to.is_pinned
        && (from.context, from.device) == (to.context, to.device)
        && from.reserved() >= BREAK_EVEN
        && from.reserved() <= to.missing
}
