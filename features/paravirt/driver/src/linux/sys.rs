//! The accesses that Rust can't check: memory that others write.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use rustix::mm::{MapFlags, ProtFlags};

/// Locks a range of a file for this open file alone, until it is closed. Answers with where the first range that another
/// has there ends, if there is one.
pub(super) fn lock(file: &File, start: u64, bytes: u64) -> io::Result<Option<u64>> {
    let out = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let wanted = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::try_from(start).map_err(out)?,
        l_len: i64::try_from(bytes).map_err(out)?,
        l_pid: 0,
    };
    let mut found = wanted;
    // SAFETY: the descriptor is open, and the call reads and writes one `flock`, which is borrowed for it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if found.l_type != libc::F_UNLCK as libc::c_short {
        // A length of 0 goes to the end.
        let end = if found.l_len == 0 { i64::MAX } else { found.l_start.saturating_add(found.l_len) };
        return Ok(Some(u64::try_from(end).unwrap_or(u64::MAX)));
    }
    // SAFETY: as above; this one only reads it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) } == 0 {
        return Ok(None);
    }
    match io::Error::last_os_error() {
        // Another was faster: where it ends is read again.
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(Some(start)),
        error => Err(error),
    }
}

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

    pub(super) fn address(&self) -> usize {
        self.base.expose_provenance()
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
