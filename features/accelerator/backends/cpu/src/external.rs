//! Memory that another API shares, mapped: the host's, and dma-bufs.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{SealFlags, SeekFrom, fcntl_get_seals, fstat, fstatfs, seek};
use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl, opcode};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vm_accel::{Error, ExternalKind, ExternalMemory, Result};

/// A mapping of shared memory, of which the device reaches a part.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Where the part begins.
    pub(crate) address: u64,
    pub(crate) dma_buf: Option<Arc<DmaBuf>>,
}

fn host(cause: impl ToString) -> Error {
    Error::Host { what: "mapping shared memory", cause: cause.to_string() }
}

fn wrong(cause: impl Into<String>) -> Error {
    Error::NotShareable { cause: cause.into() }
}

impl Mapping {
    /// Maps what nobody can make smaller: a dma-buf, or host memory that is sealed against that. Whoever made other memory smaller would
    /// have this process killed at its next access.
    pub(crate) fn new(memory: ExternalMemory, device: &str) -> Result<Self> {
        memory.check()?;
        let size = match memory.kind {
            ExternalKind::HostFd => sealed_size(&memory.fd)?,
            ExternalKind::DmaBuf => DmaBuf::size(&memory.fd)?,
            _ => return Err(memory.refused(device)),
        };
        let bytes = usize::try_from(memory.allocation).ok().filter(|_| memory.allocation <= size);
        let bytes = bytes.ok_or_else(|| wrong(format!("it has {size} bytes, not {}", memory.allocation)))?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at no address in particular.
        let base = unsafe { mmap(null_mut(), bytes, access, flags, &memory.fd, 0) };
        let base = NonNull::new(base.map_err(host)?.cast::<u8>());
        let base = base.ok_or_else(|| host("it is mapped at address 0"))?;
        let dma_buf = (memory.kind == ExternalKind::DmaBuf)
            .then(|| Arc::new(DmaBuf { fd: memory.fd, begun: AtomicU32::new(0) }));
        Ok(Self { base, bytes, address: base.as_ptr() as u64 + memory.offset, dma_buf })
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

/// The bytes of a memfd that is sealed against shrinking.
fn sealed_size(fd: &OwnedFd) -> Result<u64> {
    let seals = fcntl_get_seals(fd).map_err(|error| wrong(format!("it is no memfd: {error}")))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(wrong("it is not sealed against shrinking (F_SEAL_SHRINK)"));
    }
    Ok(fstat(fd).map_err(host)?.st_size.max(0) as u64)
}

/// A dma-buf, at which the processor takes turns with devices.
///
/// Linux, `Documentation/driver-api/dma-buf.rst`, "CPU Access to DMA Buffer Objects" and "Implicit Fence Poll Support".
#[derive(Debug)]
pub(crate) struct DmaBuf {
    fd: OwnedFd,
    /// How many turns have begun and not ended.
    begun: AtomicU32,
}

/// `DMA_BUF_MAGIC`, what its file system is.
const MAGIC: i64 = 0x444d_4142;
/// `DMA_BUF_IOCTL_SYNC`.
const SYNC: rustix::ioctl::Opcode = opcode::write::<u64>(b'b', 0);
/// `DMA_BUF_SYNC_RW`, with `DMA_BUF_SYNC_START` and with `DMA_BUF_SYNC_END`.
const START: u64 = 3;
const END: u64 = 3 | 4;

impl DmaBuf {
    fn size(fd: &OwnedFd) -> Result<u64> {
        let system = fstatfs(fd).map_err(host)?;
        if system.f_type != MAGIC {
            return Err(wrong("it is no dma-buf"));
        }
        seek(fd, SeekFrom::End(0)).map_err(|error| wrong(format!("it does not say how long it is: {error}")))
    }

    /// Whether devices have done what they do with it now, by then.
    pub(crate) fn is_idle(&self, within: Duration) -> Result<bool> {
        // Behind all that read or write it, as the processor may write it.
        let mut polled = [PollFd::new(&self.fd, PollFlags::OUT)];
        let within = Timespec::try_from(within).map_err(host)?;
        match poll(&mut polled, Some(&within)) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) if polled[0].revents().contains(PollFlags::OUT) => Ok(true),
            Ok(_) => Err(host("waiting for a dma-buf failed")),
            Err(error) => Err(host(error)),
        }
    }

    /// The processor sees what devices wrote.
    pub(crate) fn begin(&self) -> Result<()> {
        self.sync(START)?;
        self.begun.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Devices see what the processor wrote, if a turn has begun.
    pub(crate) fn end(&self) -> Result<()> {
        let one_less = |begun: u32| begun.checked_sub(1);
        match self.begun.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less) {
            Ok(_) => self.sync(END),
            Err(_) => Ok(()),
        }
    }

    fn sync(&self, flags: u64) -> Result<()> {
        loop {
            // SAFETY: the request reads 64 bits.
            let request = unsafe { Setter::<SYNC, u64>::new(flags) };
            // SAFETY: the descriptor is a dma-buf's, and the request changes nothing but who sees what of its memory.
            match unsafe { ioctl(&self.fd, request) } {
                Err(Errno::INTR | Errno::AGAIN) => {}
                other => return other.map_err(|error| host(format!("DMA_BUF_IOCTL_SYNC: {error}"))),
            }
        }
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // Turns that nobody ended, as the queue was lost in them.
        for _ in 0..*self.begun.get_mut() {
            if let Err(error) = self.sync(END) {
                tracing::debug!(%error, "a turn at a dma-buf does not end");
            }
        }
    }
}
