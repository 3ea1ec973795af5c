//! Host memory that another API shares, mapped.
#![allow(unsafe_code)]

use std::ptr::{NonNull, null_mut};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vm_accel::{Error, ExternalKind, ExternalMemory, Result};

/// A mapping of shared memory, of which the device reaches a part.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Where the part begins.
    pub(crate) address: u64,
}

impl Mapping {
    /// Maps what is host memory. Nobody can make it smaller: what is not sealed against that is refused, as whoever does so would
    /// have this process killed at its next access.
    pub(crate) fn new(memory: &ExternalMemory, device: &str) -> Result<Self> {
        memory.check()?;
        if memory.kind != ExternalKind::HostFd {
            return Err(memory.refused(device));
        }
        let host = |cause: String| Error::Host { what: "mapping shared memory", cause };
        let wrong = |cause: String| Error::NotShareable { cause };
        let seals = fcntl_get_seals(&memory.fd).map_err(|error| wrong(format!("it is no memfd: {error}")))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(wrong("it is not sealed against shrinking (F_SEAL_SHRINK)".into()));
        }
        let size = fstat(&memory.fd).map_err(|error| host(error.to_string()))?.st_size;
        let bytes =
            usize::try_from(memory.allocation).ok().filter(|_| memory.allocation <= size.max(0) as u64);
        let bytes = bytes.ok_or_else(|| wrong(format!("it has {size} bytes, not {}", memory.allocation)))?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at no address in particular.
        let base = unsafe { mmap(null_mut(), bytes, access, flags, &memory.fd, 0) };
        let base = NonNull::new(base.map_err(|error| host(error.to_string()))?.cast::<u8>());
        let base = base.ok_or_else(|| host("it is mapped at address 0".into()))?;
        Ok(Self { base, bytes, address: base.as_ptr() as u64 + memory.offset })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is this mapping, all of it; whoever drops it sees to it that no command uses it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::debug!(%error, "shared memory stays mapped");
        }
    }
}
