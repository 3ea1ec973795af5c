//! Memory that both processes have, at one address.

use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Makes memory of so many bytes at an address where nothing is.
pub(crate) fn make(at: u64, len: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("vm-bridge", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
    // SAFETY: nothing is mapped there, or it fails.
    let mapped = unsafe { mmap(at as *mut c_void, len as usize, protection, flags, &file, 0) }?;
    if mapped as u64 == at {
        return Ok(file);
    }
    // An old system takes the address for a wish.
    free(mapped as u64, len);
    Err(io::ErrorKind::AddrInUse.into())
}

/// Ends memory that [`make`] made.
pub(crate) fn free(at: u64, len: u64) {
    // SAFETY: it is memory of `make`, which its owner has freed.
    let _ = unsafe { munmap(at as *mut c_void, len as usize) };
}

/// Is there any memory of this process at an address?
pub(crate) fn is_mapped(at: usize) -> bool {
    const PAGE: usize = 4096;
    let mut present = 0u8;
    let page = (at & !(PAGE - 1)) as *mut c_void;
    // SAFETY: it looks at no memory, and writes a byte for the one page.
    unsafe { libc::mincore(page, 1, &raw mut present) == 0 }
}
