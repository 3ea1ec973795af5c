//! How many blocks a multiprocessor has room for: of 2,048 threads, and of 227 KiB of shared memory.

use crate::device;
use crate::error::Result;
use crate::ffi::Launch;
use crate::sys::{self, SharedOf};

const THREADS: i32 = 2048;
const SHARED: usize = 227 << 10;
const WARP: i32 = 32;
const BLOCK: i32 = 1024;
const MULTIPROCESSORS: i32 = 16;

/// Blocks of so many threads, each with so much shared memory.
pub(crate) fn resident(block: i32, shared: usize) -> i32 {
    let by_shared =
        SHARED.checked_div(shared).map_or(i32::MAX, |blocks| i32::try_from(blocks).unwrap_or(i32::MAX));
    (THREADS / block.clamp(1, BLOCK)).min(by_shared)
}

/// The grid that fills the device, and the block with which most threads are resident: of whole warps, or as large as `limit` says where that is more than 0.
pub(crate) fn most(shared_of: Option<SharedOf>, shared: usize, limit: i32) -> Result<(i32, i32)> {
    let largest = if limit > 0 { limit.min(BLOCK) } else { BLOCK };
    let tried = (1..=(largest + WARP - 1) / WARP).map(|warps| (warps * WARP).min(largest));
    let blocks = |block| resident(block, shared_of.map_or(shared, |shared_of| shared_of(block)));
    let best =
        tried.map(|block| (blocks(block), block)).max_by_key(|(blocks, block)| (blocks * block, *block));
    let (blocks, block) = best.unwrap_or_default();
    Ok((blocks * device::attribute(MULTIPROCESSORS, 0)?, block))
}

/// How many clusters of blocks run at once: as many blocks each as an attribute of the launch says.
pub(crate) fn clusters(launch: &Launch) -> Result<i32> {
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`, which is three numbers behind the head of an attribute; words of one.
    const CLUSTER: u32 = 4;
    const WORDS: usize = 18;
    let word =
        |attribute: usize, at: usize| sys::read_at(launch.attributes.cast::<u32>(), attribute * WORDS + at);
    let of = (0..launch.attribute_count as usize).find(|attribute| word(*attribute, 0) == Some(CLUSTER));
    let sides = |attribute| (2..5).map(move |at| word(attribute, at).unwrap_or(1));
    let blocks: u32 = of.map_or(1, |attribute| sides(attribute).product()).max(1);
    let threads: u32 = launch.block.iter().product();
    let resident = resident(i32::try_from(threads).unwrap_or(BLOCK), launch.shared as usize);
    Ok(resident * device::attribute(MULTIPROCESSORS, 0)? / i32::try_from(blocks).unwrap_or(i32::MAX))
}
