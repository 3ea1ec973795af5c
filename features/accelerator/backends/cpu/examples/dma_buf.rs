//! A dma-buf that the processor and somebody else use in turns: `cargo run -p vm-cpu --example dma_buf`
//!
//! It is made of a memfd by `/dev/udmabuf`, so that this program sees by the memfd what the worker does by the dma-buf. In each of 100 turns
//! this program writes the first half, and the worker copies it to the second and fills the first.

use std::error::Error as StdError;
use std::fs::{File, OpenOptions};
use std::num::NonZero;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_accel::{
    ExternalKind, ExternalMemory, ExternalSemaphore, HostTimeline, Result, Shareable, Timeline, Worker,
    WorkerOptions,
};
use vm_cpu::CpuAccelerator;

const HALF: u64 = 1 << 20;
const TURNS: u64 = 100;
const TIMEOUT: Duration = Duration::from_secs(20);

/// `struct udmabuf_create` of `linux/udmabuf.h`, and the request that takes it.
mod sys {
    #![allow(unsafe_code)]

    use std::fs::File;
    use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }

    /// A dma-buf of the first bytes of a memfd.
    pub(crate) fn create(device: &File, memfd: RawFd, size: u64) -> std::io::Result<OwnedFd> {
        use std::os::fd::AsRawFd as _;
        const CLOEXEC: u32 = 1;
        let request = libc::_IOW::<Create>(u32::from(b'u'), 0x42);
        let create = Create { memfd: memfd as u32, flags: CLOEXEC, offset: 0, size };
        // SAFETY: the request reads such a structure, and gives a new descriptor.
        match unsafe { libc::ioctl(device.as_raw_fd(), request, &raw const create) } {
            // SAFETY: it is this process's, and nobody else's.
            fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

struct Frame(File);

impl Shareable for Frame {
    type Layout = u64;

    fn name(&self) -> &str {
        "frame"
    }

    fn layout(&self) -> u64 {
        2 * HALF
    }

    fn export(&self) -> Result<ExternalMemory> {
        let fd = self
            .0
            .try_clone()
            .map_err(|error| vm_accel::Error::Host { what: "sharing a dma-buf", cause: error.to_string() })?;
        let bytes = 2 * HALF;
        let kind = ExternalKind::DmaBuf;
        Ok(ExternalMemory { fd: fd.into(), kind, allocation: bytes, offset: 0, bytes, dedicated: false })
    }
}

fn pattern(turn: u64) -> Vec<u8> {
    (0..HALF).map(|at| (at * 7 + turn) as u8).collect()
}

fn main() -> std::result::Result<(), Box<dyn StdError>> {
    let memory: File = memfd_create("frame", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?.into();
    ftruncate(&memory, 2 * HALF)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK)?;
    let device = OpenOptions::new().read(true).write(true).open("/dev/udmabuf");
    let device =
        device.map_err(|error| format!("/dev/udmabuf: {error}; Linux has it with CONFIG_UDMABUF"))?;
    let buffer = sys::create(&device, memory.as_raw_fd(), 2 * HALF)?;

    let accelerator = Arc::new(CpuAccelerator::with_threads(NonZero::<usize>::MIN)?);
    let worker = Worker::start(accelerator, WorkerOptions::default())?;
    let (host, computed): (Arc<HostTimeline>, Arc<HostTimeline>) = Default::default();
    let shared = |timeline: &Arc<HostTimeline>| ExternalSemaphore::of_host(Arc::clone(timeline) as _);
    let link = worker.link(shared(&host), shared(&computed))?;
    let mut frame = worker.register_resource(Frame(buffer.into()))?;
    for turn in 1..=TURNS {
        let mapped = frame.map(&link, turn)?;
        worker.copy(mapped.buffer().view(HALF, HALF)?, mapped.buffer().view(0, HALF)?)?;
        worker.fill(mapped.buffer().view(0, HALF)?, turn as u8)?;
        frame = mapped.unmap()?;
        // The worker waits for this.
        memory.write_all_at(&pattern(turn), 0)?;
        host.signal(turn)?;
        if !computed.wait(frame.ready(), Instant::now() + TIMEOUT)? {
            return Err(format!("turn {turn} does not end").into());
        }
        let mut found = vec![0; 2 * HALF as usize];
        memory.read_exact_at(&mut found, 0)?;
        let (first, second) = found.split_at(HALF as usize);
        if second != pattern(turn) || first.iter().any(|byte| *byte != turn as u8) {
            return Err(format!("turn {turn} is wrong").into());
        }
    }
    drop(frame.unregister()?);
    worker.stop(TIMEOUT)?;
    println!("{TURNS} turns of {HALF} bytes each way are right");
    Ok(())
}
