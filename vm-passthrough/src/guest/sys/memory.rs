//! RAM of vm-memory as a [`Mapping`].

use std::fmt;
use std::sync::Arc;

use vm_memory::MmapRegion;
use vm_memory::bitmap::Bitmap;

use crate::vfio::Mapping;

/// An `mmap` of vm-memory, kept for as long as this lives: guest RAM, for [`RamRegion`](crate::guest::RamRegion).
pub struct SharedMemory<B = ()>(Arc<MmapRegion<B>>);

impl<B> SharedMemory<B> {
    /// Shares `region`.
    pub fn new(region: Arc<MmapRegion<B>>) -> Self {
        Self(region)
    }
}

impl<B: Bitmap> fmt::Debug for SharedMemory<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({:p}, {:#x})", self.0.as_ptr(), self.0.size())
    }
}

// SAFETY: the region is mapped until the last `Arc` is gone, `mmap` aligns it to pages, and vm-memory gives out no
// references into it: all its accesses are volatile.
unsafe impl<B: Bitmap + Send + Sync> Mapping for SharedMemory<B> {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn len(&self) -> u64 {
        self.0.size() as u64
    }
}
