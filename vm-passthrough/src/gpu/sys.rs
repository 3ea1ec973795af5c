//! A BAR of a function that a driver of the host may have, mapped to be read (`resourceN` in sysfs). All unsafe code of
//! [`gpu`](super) is here.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::vfio::Mapping;

/// The first bytes of a file, mapped to be read until it is dropped.
#[derive(Debug)]
pub(super) struct ReadOnlyMap {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is only an address and a length; all access goes through volatile reads.
unsafe impl Send for ReadOnlyMap {}
// SAFETY: as above.
unsafe impl Sync for ReadOnlyMap {}

impl ReadOnlyMap {
    /// Maps the first `len` bytes of `file`, rounded up to whole pages.
    pub(super) fn new(file: &File, len: usize) -> io::Result<Self> {
        let len = len
            .checked_next_multiple_of(rustix::param::page_size())
            .filter(|&len| len != 0 && len <= isize::MAX as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a mapping at an address of the kernel's choice disturbs nothing that exists.
        let start = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, len })
    }
}

impl Drop for ReadOnlyMap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by us, and nobody can use it once this value is gone.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            tracing::error!(address = ?self.start, len = self.len, %error, "munmap failed");
        }
    }
}

// SAFETY: the range is mapped until the value is dropped, whole pages, and has no Rust values in it. It is only read.
unsafe impl Mapping for ReadOnlyMap {
    fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> u64 {
        self.len as u64
    }
}
