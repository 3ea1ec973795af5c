//! Memory mapped into this process: pages of our own that devices may reach, and parts of a device.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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

/// The largest page that a processor maps (a PUD's, of 1 GiB): no larger alignment of addresses is of use.
const LARGEST_PAGE: u64 = 1 << 30;

/// Addresses of this process with nothing behind them: `len` bytes of them, and where those begin, which is `offset` modulo
/// `align`, a power of two.
fn reserve(len: usize, offset: u64, align: u64) -> io::Result<(Range, NonNull<u8>)> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let room = usize::try_from(align).ok().and_then(|align| len.checked_add(align)).ok_or_else(invalid)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: an anonymous mapping at an address of the kernel's choice disturbs nothing that exists.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags) }?;
    let range = Range::from_map(start, room)?;
    let skip = offset.wrapping_sub(range.start.as_ptr().expose_provenance() as u64) & (align - 1);
    // Within the range, as `skip` is below `align`.
    let first = NonNull::new(range.start.as_ptr().wrapping_add(skip as usize)).ok_or_else(invalid)?;
    Ok((range, first))
}

/// A part of a device, mapped into this process.
///
/// The Linux kernel puts what it can of a BAR into pages of 2 MiB and 1 GiB, from 6.12 on, and KVM the same into the guest: where
/// addresses of the process, of the guest and of the BAR in the host are congruent modulo such a page. A BAR is aligned to its
/// size in the host and the guest, so it is in this process, too.
pub(in super::super) struct MappedRegion {
    /// What is reserved around it, and unmapped with it.
    _range: Range,
    start: NonNull<u8>,
    len: u64,
    /// Its region's index, and where in that it begins.
    region: u32,
    offset: u64,
    // Dropped after the range: the device's file is not closed while a mapping pins it in the Linux kernel.
    device: Arc<dyn AsFd + Send + Sync>,
}

// SAFETY: it is only addresses and a length; all access goes through volatile reads and writes.
unsafe impl Send for MappedRegion {}
// SAFETY: as above.
unsafe impl Sync for MappedRegion {}

impl MappedRegion {
    /// Maps `part`, in bytes of the region of index `region`, which has `size` bytes and begins at `position` of the device's
    /// file. It keeps the device until it is unmapped.
    pub(in super::super) fn new(
        device: Arc<dyn AsFd + Send + Sync>,
        region: u32,
        (position, size): (u64, u64),
        part: std::ops::Range<u64>,
        (readable, writable): (bool, bool),
    ) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let len = part.end.checked_sub(part.start).and_then(|len| usize::try_from(len).ok());
        let (len, position) = len.zip(position.checked_add(part.start)).ok_or_else(invalid)?;
        let mut protection = ProtFlags::empty();
        protection.set(ProtFlags::READ, readable);
        protection.set(ProtFlags::WRITE, writable);
        let align = 1 << size.clamp(page_size(), LARGEST_PAGE).ilog2();
        let (range, start) = reserve(len, part.start, align)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the addresses are within what was just reserved, where nothing is that anyone uses.
        unsafe { mmap(start.as_ptr().cast(), len, protection, flags, device.as_fd(), position) }?;
        Ok(Self { _range: range, start, len: len as u64, region, offset: part.start, device })
    }
}

impl fmt::Debug for MappedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedRegion({:?}+{:#x})", self.start, self.len)
    }
}

// SAFETY: the range is mapped until the value is dropped, whole pages, and has no Rust values in it.
unsafe impl Mapping for MappedRegion {
    fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn dma_buf(&self) -> io::Result<(OwnedFd, u64)> {
        let part = self.offset..self.offset.saturating_add(self.len);
        super::device::dma_buf(self.device.as_fd(), self.region, part).map(|file| (file, 0))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_region_are_congruent_to_it() {
        const GIB: u64 = 1 << 30;
        let file = rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = Arc::new(std::fs::File::from(file));
        // Sparse: no more than what is touched takes memory.
        file.set_len(260 * GIB).unwrap();
        let check = |position: u64, size: u64, part: std::ops::Range<u64>, modulo: u64| {
            let mapped =
                MappedRegion::new(file.clone(), 0, (position, size), part.clone(), (true, true)).unwrap();
            assert_eq!(mapped.address() % modulo, part.start % modulo, "{mapped:?} {part:x?}");
            assert_eq!(mapped.len(), part.end - part.start);
            for at in [0, mapped.len() / 8 * 4, mapped.len() - 4] {
                let value = (position + part.start + at) as u32 ^ 0x5a5a_5a5a;
                store_u32(&mapped, at, value).unwrap();
                let mut bytes = [0; 4];
                std::os::unix::fs::FileExt::read_exact_at(&*file, &mut bytes, position + part.start + at)
                    .unwrap();
                assert_eq!(u32::from_le_bytes(bytes), value, "{at:#x} of {mapped:?}");
            }
        };
        check(0, 4096, 0..4096, 4096);
        check(GIB, 16 << 20, 0..16 << 20, 16 << 20);
        check(0, 16 << 20, 0x3000..0x10_0000, 16 << 20);
        check(4096, 64 << 20, 0x10_1000..64 << 20, 64 << 20);
        check(2 * GIB, 256 * GIB, 0..256 * GIB, GIB);
        check(2 * GIB, 256 * GIB, (5 << 20) + 8192..256 * GIB, GIB);
        let map = |part| MappedRegion::new(file.clone(), 0, (u64::MAX - 4095, 1 << 40), part, (true, true));
        assert!(map(std::ops::Range { start: 8192, end: 4096 }).is_err(), "it ends before it starts");
        assert!(map(4096..8192).is_err(), "it lies past all files");
        assert!(map(0..!4095).is_err(), "it is more than there are addresses");
    }
}
