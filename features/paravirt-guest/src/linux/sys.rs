//! The accesses that Rust can't check: memory that others write.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use rustix::mm::{MapFlags, ProtFlags};

/// Mapped memory.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and no Rust reference to it is ever made.
unsafe impl Send for Mapping {}
// SAFETY: as above; what two threads copy at once may be mixed, as it may be with the accelerator, and is only bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the Linux kernel likes.
        let base =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), bytes, prot, MapFlags::SHARED, file, 0) }?;
        Ok(Self { base: base.cast(), bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies in what the caller has seen to fit.
    pub(super) fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset <= self.bytes && data.len() <= self.bytes - offset, "outside of the mapping");
        // SAFETY: it lies in the mapping, as was checked, which is no memory of Rust's, so that the two do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(data.as_ptr(), self.base.wrapping_add(offset), data.len()) }
    }

    /// Copies out what the caller has seen to be there.
    pub(super) fn read(&self, offset: usize, data: &mut [u8]) {
        assert!(offset <= self.bytes && data.len() <= self.bytes - offset, "outside of the mapping");
        // SAFETY: as for `write`.
        unsafe {
            core::ptr::copy_nonoverlapping(self.base.wrapping_add(offset), data.as_mut_ptr(), data.len())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody has a pointer into it any more.
        // It fails only for what is no mapping.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}
