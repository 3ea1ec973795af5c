//! Memory mapped into this process: pages of our own that devices may reach, and parts of a device.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::super::interface::Mapping;

/// Size of a page of this process in bytes, a power of two.
pub(in super::super) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// A range of this process's address space that is unmapped when dropped.
struct Range {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is only an address and a length; all access goes through volatile reads and writes.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Range {
    fn from_map(start: *mut std::ffi::c_void, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, len })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by us, and whoever could still use it holds what owns this value.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            tracing::error!(address = ?self.start, len = self.len, %error, "munmap failed");
        }
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}+{:#x}", self.start, self.len)
    }
}

/// Page-aligned, zeroed, shared memory of this process that a device may read and write: a DMA buffer.
///
/// A device writes to it at any time, so it is only ever copied in and out; there is no reference to its bytes.
#[derive(Debug)]
pub struct HostMemory {
    range: Range,
}

impl HostMemory {
    /// At least `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// When `len` is 0 or too much, or the system is out of memory.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len
            .checked_next_multiple_of(page_size() as usize)
            .filter(|&len| len != 0 && len <= isize::MAX as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice disturbs nothing that exists.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::SHARED) }?;
        Ok(Self { range: Range::from_map(start, len)? })
    }

    /// Copies out `data.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// When they are not all within the memory; nothing is copied then.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> io::Result<()> {
        let start = self.check(offset, data.len())?;
        for (index, byte) in data.iter_mut().enumerate() {
            // SAFETY: `start + index` is within the mapping. The read is volatile as a device may write there.
            *byte = unsafe { ptr::read_volatile(start.wrapping_add(index)) };
        }
        Ok(())
    }

    /// Copies in `data` from `offset` on.
    ///
    /// # Errors
    /// When it does not all fit; nothing is copied then.
    pub fn write(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        let start = self.check(offset, data.len())?;
        for (index, byte) in data.iter().enumerate() {
            // SAFETY: `start + index` is within the mapping, which is writable. No reference to it exists.
            unsafe { ptr::write_volatile(start.wrapping_add(index), *byte) };
        }
        Ok(())
    }

    fn check(&self, offset: usize, len: usize) -> io::Result<*mut u8> {
        match offset.checked_add(len) {
            // The pointer stays within, or one past the end of, the mapping.
            Some(end) if end <= self.range.len => Ok(self.range.start.as_ptr().wrapping_add(offset)),
            _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
        }
    }
}

// SAFETY: the range is mapped until the value is dropped, whole pages, and has no Rust values in it.
unsafe impl Mapping for HostMemory {
    fn address(&self) -> u64 {
        self.range.start.as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> u64 {
        self.range.len as u64
    }
}

/// A part of a device, mapped into this process.
pub(in super::super) struct MappedRegion {
    range: Range,
    // Dropped after the range: the device's file is not closed while a mapping pins it in the Linux kernel.
    _keep: Arc<dyn Any + Send + Sync>,
}

impl MappedRegion {
    /// Maps `len` bytes at `offset` of a device's file, and keeps `keep` until it is unmapped.
    pub(in super::super) fn new(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        readable: bool,
        writable: bool,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let mut protection = ProtFlags::empty();
        protection.set(ProtFlags::READ, readable);
        protection.set(ProtFlags::WRITE, writable);
        // SAFETY: a mapping at an address of the kernel's choice disturbs nothing that exists.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, offset) }?;
        Ok(Self { range: Range::from_map(start, len)?, _keep: keep })
    }
}

impl fmt::Debug for MappedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MappedRegion").field(&self.range).finish()
    }
}

// SAFETY: the range is mapped until the value is dropped, whole pages, and has no Rust values in it.
unsafe impl Mapping for MappedRegion {
    fn address(&self) -> u64 {
        self.range.start.as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> u64 {
        self.range.len as u64
    }
}

/// Reads the aligned 32-bit little-endian register at `offset` of a mapping.
///
/// A part of a device that cannot be reached at the moment, because its memory decoding is off or it sleeps, raises
/// SIGBUS, as for any access to such a mapping.
///
/// # Errors
/// When the register is not aligned or not within the mapping.
pub fn load_u32(mapping: &dyn Mapping, offset: u64) -> io::Result<u32> {
    let register = register(mapping, offset)?;
    // SAFETY: the register is aligned and within the mapping, which is mapped while the reference lives and holds no
    // Rust values.
    Ok(u32::from_le(unsafe { ptr::read_volatile(register) }))
}

/// Writes the aligned 32-bit little-endian register at `offset` of a mapping. See [`load_u32`].
///
/// # Errors
/// When the register is not aligned or not within the mapping.
pub fn store_u32(mapping: &dyn Mapping, offset: u64, value: u32) -> io::Result<()> {
    let register = register(mapping, offset)?;
    // SAFETY: as for reads.
    unsafe { ptr::write_volatile(register, value.to_le()) };
    Ok(())
}

fn register(mapping: &dyn Mapping, offset: u64) -> io::Result<*mut u32> {
    let inside = offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= mapping.len());
    let address = mapping.address().checked_add(offset).and_then(|address| usize::try_from(address).ok());
    match address {
        Some(address) if inside => Ok(ptr::with_exposed_provenance_mut(address)),
        _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
    }
}
