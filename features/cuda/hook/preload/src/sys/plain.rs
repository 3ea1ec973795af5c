//! Memory of the host for contents of devices: in large pages, which no child and no dump has.

use std::ffi::c_void;
use std::path::Path;
use std::ptr;

use vm_hook::driver::{OUT_OF_MEMORY, Result};
use vm_hook::host;

/// Pages of the host that are as large as the device's.
pub(super) const LARGE: usize = 2 << 20;

/// A mapping.
pub(super) struct Plain {
    mapping: usize,
    mapped: usize,
}

impl Plain {
    /// Memory that can be had without harm to the machine.
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        if host::available(read).is_some_and(|available| available < bytes) {
            return Err(OUT_OF_MEMORY);
        }
        let mapped = bytes as usize + LARGE;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the system picks the place.
        let at = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: the mapping is this function's; what is not followed only costs time.
            unsafe { libc::madvise(at, mapped, advice) };
        }
        Ok(Self { mapping: at as usize, mapped })
    }

    /// The first address, of a large page.
    pub(super) fn start(&self) -> usize {
        self.mapping.next_multiple_of(LARGE)
    }

    /// Gives it its pages. Where the system does not know this, whoever uses them does.
    pub(super) fn populate(&self) {
        let (start, bytes) = (self.start(), self.mapped - LARGE);
        // SAFETY: the range is within the mapping, and what is there stays.
        unsafe { libc::madvise(start as *mut c_void, bytes, libc::MADV_POPULATE_WRITE) };
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: it is a mapping of this type's alone, and nobody has its address.
        unsafe { libc::munmap(self.mapping as *mut c_void, self.mapped) };
    }
}
