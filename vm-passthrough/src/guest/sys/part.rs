//! A part of memory as a [`Mapping`] of its own.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::vfio::Mapping;

/// A part of a mapping, which it keeps.
#[derive(Debug)]
pub(in crate::guest) struct Part {
    whole: Arc<dyn Mapping>,
    offset: u64,
    len: u64,
}

impl Part {
    /// At most `len` bytes from `offset` on; `None` where that is all of it, or nothing. `offset` must be of whole pages.
    pub(in crate::guest) fn of(whole: &Arc<dyn Mapping>, offset: u64, len: u64) -> Option<Self> {
        const LARGEST_PAGE: u64 = 64 << 10;
        let len = len.min(whole.len().checked_sub(offset)?);
        let is_part = len > 0 && len < whole.len() && offset.is_multiple_of(LARGEST_PAGE);
        is_part.then(|| Self { whole: whole.clone(), offset, len })
    }
}

// SAFETY: what the whole promises holds for the bytes of a part as well, which keeps it; it begins on a page, as the whole does
// and as its offset is of whole pages.
unsafe impl Mapping for Part {
    fn address(&self) -> u64 {
        self.whole.address() + self.offset
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn dma_buf(&self) -> io::Result<(OwnedFd, u64)> {
        let (file, start) = self.whole.dma_buf()?;
        Ok((file, start + self.offset))
    }
}
