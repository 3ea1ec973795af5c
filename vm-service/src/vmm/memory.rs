//! The guest's RAM.
//!
//! It is private anonymous memory rather than a memfd: nothing else has to share it, transparent huge pages apply
//! to it by default (for shared memory they are usually off), and pinning for DMA then needs 512 times fewer pages.

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::error::MachineError;
use super::layout::Layout;
use super::sys;

/// Reserves the RAM of `layout`, with advice to use huge pages.
///
/// # Errors
/// When the host has no room for it.
pub(super) fn create(layout: &Layout) -> Result<GuestMemoryMmap, MachineError> {
    let size = layout.ram.iter().map(|range| range.end - range.start).sum();
    let failed = |reason: String| MachineError::Memory { size, reason };
    let mut regions = Vec::new();
    for range in &layout.ram {
        let len = usize::try_from(range.end - range.start)
            .map_err(|_| failed("it does not fit this process".to_owned()))?;
        let region = MmapRegionBuilder::new(len)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
            .build()
            .map_err(|error| {
                failed(format!("{error}; lower `memory`, or raise the limit on virtual memory (ulimit -v)"))
            })?;
        if let Err(error) = sys::advise_huge_pages(&region) {
            tracing::debug!(%error, "the host has no transparent huge pages");
        }
        regions.push(
            GuestRegionMmap::new(region, GuestAddress(range.start))
                .ok_or_else(|| failed("it passes the end of the address space".to_owned()))?,
        );
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| failed(error.to_string()))
}
