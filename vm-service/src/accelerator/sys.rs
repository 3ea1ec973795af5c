//! The calls that Rust can't check: a worker's view of the guest's RAM, and its descriptors.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};
use vm_accel::{Accelerator, Buffer, Worker};
use vmm_sys_util::eventfd::EventFd;

/// Closes every descriptor but the three standard ones, and answers with standard input, which is a worker's socket.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn keep_standard() -> io::Result<OwnedFd> {
    // SAFETY: called once, before this process has opened anything that safe code holds.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?)
}

/// Becomes another user, on all threads and for ever: its group has the same number, and it is a member of `groups`.
///
/// # Errors
/// The Linux kernel's; the user is as it was then.
pub(super) fn set_user(user: u32, groups: &[u32]) -> io::Result<()> {
    let done = |answer: libc::c_int| if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the pointer is to so many groups, which are only read.
    done(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: it takes numbers.
    done(unsafe { libc::setresgid(user, user, user) })?;
    // SAFETY: as above.
    done(unsafe { libc::setresuid(user, user, user) })
}

/// A descriptor as the eventfd that the sender says it is. Of another file, reads and writes fail or do something to that
/// file, of which the sender gave the right.
pub(super) fn eventfd(file: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open and this value's own.
    unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
}

/// Ranges of files, one behind the other in this process's addresses.
#[derive(Debug)]
pub(super) struct Window {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and nothing here reads or writes through the pointer.
unsafe impl Send for Window {}

impl Window {
    /// Maps `parts`: file, offset and length, both in whole pages. Writes go to the files.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn map<'a>(parts: impl Iterator<Item = (&'a File, u64, u64)> + Clone) -> io::Result<Self> {
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        let bytes = parts
            .clone()
            .try_fold(0usize, |sum, (_, _, bytes)| sum.checked_add(usize::try_from(bytes).ok()?))
            .ok_or_else(too_long)?;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, where the Linux kernel likes.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), reserve) }?;
        let window = Self { base: base.cast(), bytes };
        let mut at = 0;
        for (file, offset, bytes) in parts {
            let bytes = usize::try_from(bytes).map_err(|_| too_long())?;
            let place = window.base.wrapping_add(at).cast();
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            // SAFETY: the place lies in the reservation above, which nothing else uses: the lengths sum up to it.
            unsafe { rustix::mm::mmap(place, bytes, prot, flags, file.as_fd(), offset) }?;
            at += bytes;
        }
        Ok(window)
    }

    /// Makes it a buffer of a worker. Give the buffer back with [`Worker::free`] before this is dropped.
    ///
    /// # Errors
    /// The accelerator's.
    pub(super) fn register<A: Accelerator>(&self, worker: &Worker<A>) -> vm_accel::Result<Buffer<A>> {
        // SAFETY: it stays mapped until it is dropped, which the one caller, `Import`, does after `Worker::free` only;
        // no Rust reference is ever made to it.
        unsafe { worker.register(self.base, self.bytes as u64) }
    }

    /// Lets go of it without unmapping, for memory that an accelerator did not give back.
    pub(super) fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody uses it any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) } {
            tracing::error!(%error, "a view of the guest's memory was not unmapped");
        }
    }
}

/// Makes a system call.
///
/// # Safety
/// As the call says: pointers among the arguments are to memory that it may use as it does.
#[cfg(test)]
pub(super) unsafe fn call(number: libc::c_long, arguments: [u64; 6]) -> io::Result<u64> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    u64::try_from(answer).map_err(|_| io::Error::last_os_error())
}
