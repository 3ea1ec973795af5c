//! The calls that Rust can't check: a worker's view of the guest's RAM, and its descriptors.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};
use vm_accel::{Accelerator, Buffer, Worker};
use vmm_sys_util::eventfd::EventFd;

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
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody uses it any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) } {
            tracing::error!(%error, "a view of the guest's memory was not unmapped");
        }
    }
}

/// A window that an accelerator reads and writes in place, as a buffer of a worker. It stays mapped for as long as the
/// accelerator may use it.
pub(super) struct Registered<A: Accelerator> {
    /// Taken when it is freed.
    buffer: Option<Buffer<A>>,
    /// Dropped by hand: not while the accelerator may still use it.
    window: ManuallyDrop<Window>,
    worker: Worker<A>,
}

impl<A: Accelerator> Registered<A> {
    /// Makes `window` a buffer of `worker`.
    ///
    /// # Errors
    /// The accelerator's.
    pub(super) fn new(window: Window, worker: &Worker<A>) -> vm_accel::Result<Self> {
        let mut window = ManuallyDrop::new(window);
        // SAFETY: the window is unmapped only where the accelerator has said that it does not use it, here or in `drop`;
        // no Rust reference is ever made to it.
        let registered = unsafe { worker.register(window.base, window.bytes as u64) };
        match registered {
            Ok(buffer) => Ok(Self { buffer: Some(buffer), window, worker: worker.clone() }),
            Err(error) => {
                // It was not answered: the accelerator may yet take it.
                use vm_accel::Error as E;
                if !matches!(error, E::Deadline { .. } | E::Stopped | E::Lost { .. } | E::Panicked { .. }) {
                    // SAFETY: it is used no more.
                    unsafe { ManuallyDrop::drop(&mut window) };
                }
                Err(error)
            }
        }
    }

    /// The buffer; `None` only while it is being freed.
    pub(super) fn buffer(&self) -> Option<&Buffer<A>> {
        self.buffer.as_ref()
    }
}

impl<A: Accelerator> Drop for Registered<A> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        match self.worker.free(buffer) {
            // SAFETY: it is used no more.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.window) },
            // Memory that the accelerator may still use stays mapped until the process ends.
            Err(error) => tracing::warn!(%error, "the guest's memory was not released by the accelerator"),
        }
    }
}
