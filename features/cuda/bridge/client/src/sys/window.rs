//! Memory that both processes have, at one address: files of its own, or parts of a window.

use std::ffi::c_void;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vm_bridge::ring::Near;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Makes memory of so many bytes at an address where nothing is.
pub(crate) fn make(at: u64, len: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("vm-bridge", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    map(&file, at, 0, len)?;
    Ok(file)
}

/// Maps a part of a file at an address where nothing is.
pub(crate) fn map(file: impl AsFd, at: u64, offset: u64, len: u64) -> io::Result<()> {
    let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
    // SAFETY: nothing is mapped there, or it fails.
    let mapped = unsafe { mmap(at as *mut c_void, len as usize, READ_WRITE, flags, file, offset) }?;
    if mapped as u64 == at {
        return Ok(());
    }
    // An old system takes the address for a wish.
    free(mapped as u64, len);
    Err(io::ErrorKind::AddrInUse.into())
}

/// Has all pages of mapped memory of a file be there; false where there is no room for one. A system that can't tell has room.
pub(crate) fn populate(at: u64, len: u64) -> bool {
    // SAFETY: it is mapped to be read and written, and keeps what is in it.
    let populated = unsafe { libc::madvise(at as *mut c_void, len as usize, libc::MADV_POPULATE_WRITE) };
    populated == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}

/// Memory of this process alone.
pub(crate) fn own(len: u64) -> io::Result<u64> {
    // SAFETY: new memory, where nothing is.
    let at =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len as usize, READ_WRITE, MapFlags::PRIVATE) }?;
    Ok(at as u64)
}

/// Memory that all programs of this system share with the server.
pub(crate) struct Window {
    path: PathBuf,
    file: File,
    /// Where it begins in the file.
    base: u64,
    is_cached: bool,
}

/// All of the physical memory: what no driver has and is no RAM can be mapped of it, with caches where it was not opened with `O_SYNC`.
const PHYSICAL: &str = "/dev/mem";

impl Window {
    /// The window that is a regular file, as a memory file of the server's or a device's resource file in sysfs.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = vm_files::regular::open_with(OpenOptions::new().read(true).write(true), path);
        let file =
            file.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        // Files of sysfs are mapped without caches.
        Ok(Self { path: path.to_owned(), file, base: 0, is_cached: !path.starts_with("/sys") })
    }

    /// The window that is a device's. Linux maps it without caches by the file that it has in sysfs, and with them by its physical address,
    /// where that is known and may be used.
    pub(crate) fn of_device(path: &Path, address: Option<u64>, bytes: u64) -> io::Result<Self> {
        let cached = address.and_then(|address| {
            let file = OpenOptions::new().read(true).write(true).open(PHYSICAL).ok()?;
            let window = Self { path: PHYSICAL.into(), file, base: address, is_cached: true };
            // SAFETY: new memory, where nothing is; it is of the device whose address this is, which no program's memory is.
            let mapped = unsafe {
                mmap(ptr::null_mut(), bytes as usize, READ_WRITE, MapFlags::SHARED, &window.file, address)
            };
            free(mapped.ok()? as u64, bytes);
            Some(window)
        });
        cached.map_or_else(|| Self::open(path), Ok)
    }

    /// Is it memory that writes reach in their order, and reads quickly?
    pub(crate) fn is_cached(&self) -> bool {
        self.is_cached
    }

    /// A lane in a part of it that begins with `mark`, to be woken by what is told next.
    pub(crate) fn lane(&self, offset: u64, len: u64, mark: u64) -> io::Result<Near> {
        let lane = if self.has(offset, len) {
            Near::within(&self.file, self.base + offset, len, mark)?
        } else {
            None
        };
        lane.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the window is not the server's"))
    }

    /// Reads the two words of a challenge. `None` when there is no such place in the window.
    pub(crate) fn challenge(&self, offset: u64) -> Option<[u64; 2]> {
        const PAGE: u64 = 4096;
        const LAST: u64 = PAGE - 16;
        let (page, at) = (offset / PAGE * PAGE, offset % PAGE);
        if at > LAST || !offset.is_multiple_of(8) || !self.has(page, PAGE) {
            return None;
        }
        // SAFETY: new memory, where nothing is.
        let mapped = unsafe {
            mmap(ptr::null_mut(), PAGE as usize, READ_WRITE, MapFlags::SHARED, &self.file, self.base + page)
        };
        let mapped = mapped.ok()? as u64;
        let words = [at, at + 8].map(|at| {
            // SAFETY: it is within the page that was just mapped, and aligned.
            unsafe { ((mapped + at) as *const u64).read_volatile() }
        });
        free(mapped, PAGE);
        Some(words)
    }

    /// Whether the file has a part. Physical memory has no length, and has all.
    fn has(&self, offset: u64, len: u64) -> bool {
        let Some(end) = self.base.checked_add(offset).and_then(|start| start.checked_add(len)) else {
            return false;
        };
        self.file.metadata().is_ok_and(|metadata| !metadata.is_file() || end <= metadata.len())
    }

    /// Maps a part of it at an address where nothing is.
    pub(crate) fn map(&self, at: u64, offset: u64, len: u64) -> io::Result<()> {
        if !self.has(offset, len) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is shorter than the server's"));
        }
        map(&self.file, at, self.base + offset, len)
    }
}

impl fmt::Display for Window {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} at {:#x}", self.path.display(), self.base)
    }
}

/// The first word of mapped memory, which is replaced by 0.
pub(crate) fn take_mark(at: u64) -> u64 {
    let at = at as *mut u64;
    // SAFETY: who asks has just mapped it, and knows it to be whole pages.
    let mark = unsafe { at.read_volatile() };
    // SAFETY: as above.
    unsafe { at.write_volatile(0) };
    mark
}

/// Ends memory that was made or mapped here.
pub(crate) fn free(at: u64, len: u64) {
    // SAFETY: it is memory of this module, which its owner has freed.
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
