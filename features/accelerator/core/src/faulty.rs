//! An accelerator behind a link that flips bits: what checked copies are tested with, on any accelerator.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::accelerator::{Accelerator, Queue};
use crate::artifact::Artifact;
use crate::checksum::Direction;
use crate::device::{DeviceInfo, MemoryInfo, QueueOptions};
use crate::error::Result;
use crate::external::{DriverResource, ExternalMemory, ExternalSemaphore, Pixels, Semaphore};
use crate::launch::{Arguments, Grid};
use crate::memory::{Memory, MemoryKind, Region};
use crate::sys::BorrowedResource;

/// How long a copy from the device may take whose bit is flipped.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A copy over the link.
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    /// Which way.
    pub direction: Direction,
    /// How many went before it, either way, since the queue was opened.
    pub number: u64,
    /// Its length.
    pub bytes: u64,
}

/// Says which bit of a copy flips, counted from its beginning.
pub type Flip = dyn Fn(Crossing) -> Option<u64> + Send + Sync;

/// An accelerator behind such a link.
pub struct Faulty<A> {
    inner: Arc<A>,
    flip: Arc<Flip>,
}

impl<A> Faulty<A> {
    /// It, with a link that flips what `flip` says.
    pub fn new(inner: Arc<A>, flip: impl Fn(Crossing) -> Option<u64> + Send + Sync + 'static) -> Self {
        Self { inner, flip: Arc::new(flip) }
    }
}

impl<A: Accelerator> Accelerator for Faulty<A> {
    type Queue = FaultyQueue<A::Queue>;

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn uuid(&self) -> Result<Option<[u8; 16]>> {
        self.inner.uuid()
    }

    fn luid(&self) -> Result<Option<[u8; 8]>> {
        self.inner.luid()
    }

    fn open(&self, options: &QueueOptions) -> Result<Self::Queue> {
        Ok(FaultyQueue {
            inner: self.inner.open(options)?,
            flip: Arc::clone(&self.flip),
            number: Cell::new(0),
        })
    }
}

/// Its queue: that of the accelerator, but for copies.
pub struct FaultyQueue<Q> {
    inner: Q,
    flip: Arc<Flip>,
    number: Cell<u64>,
}

#[allow(unsafe_code)]
impl<Q: Queue> Queue for FaultyQueue<Q> {
    type Kernel = Q::Kernel;
    type Event = Q::Event;
    type Graph = Q::Graph;

    unsafe fn stream(&self) -> Result<Self> {
        // SAFETY: as the caller promises.
        let inner = unsafe { self.inner.stream() }?;
        Ok(Self { inner, flip: Arc::clone(&self.flip), number: Cell::new(0) })
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.inner.allocate(kind, bytes)
    }

    fn allocate_polled(&self, bytes: u64) -> Result<Memory> {
        self.inner.allocate_polled(bytes)
    }

    fn free(&self, memory: Memory) -> Result<()> {
        self.inner.free(memory)
    }

    fn trim(&self, keep: u64) -> Result<()> {
        self.inner.trim(keep)
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.inner.memory()
    }

    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.register(host, bytes) }
    }

    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        self.inner.import_memory(memory)
    }

    fn import_image(&self, memory: ExternalMemory, pixels: &Pixels) -> Result<Vec<Memory>> {
        self.inner.import_image(memory, pixels)
    }

    fn register_resource(
        &self,
        resource: BorrowedResource,
        pixels: Option<&Pixels>,
    ) -> Result<DriverResource> {
        self.inner.register_resource(resource, pixels)
    }

    fn map_resource(&self, resource: &DriverResource) -> Result<Vec<Memory>> {
        self.inner.map_resource(resource)
    }

    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        self.inner.import_semaphore(semaphore)
    }

    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.inner.wait_semaphore(semaphore, value)
    }

    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.inner.signal_semaphore(semaphore, value)
    }

    fn acquire(&self, memory: Region<'_>) -> Result<()> {
        self.inner.acquire(memory)
    }

    fn release(&self, memory: Region<'_>) -> Result<()> {
        self.inner.release(memory)
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        self.inner.fill(target, value)
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        self.inner.copy(target, source)?;
        let direction = match (target.kind().host_visible(), source.kind().host_visible()) {
            (false, true) => Direction::HostToDevice,
            (true, false) => Direction::DeviceToHost,
            _ => return Ok(()),
        };
        let number = self.number.replace(self.number.get() + 1);
        let Some(bit) = (self.flip)(Crossing { direction, number, bytes: target.bytes() }) else {
            return Ok(());
        };
        let (there, here) = (target.slice(bit / 8, 1)?, source.slice(bit / 8, 1)?);
        let mut byte = [0];
        if direction == Direction::HostToDevice {
            here.read_host(&mut byte)?;
            return self.inner.fill(there, byte[0] ^ 1 << (bit % 8));
        }
        let event = self.inner.event(false)?;
        self.inner.record(&event)?;
        self.inner.wait(&event, Instant::now() + TIMEOUT)?;
        there.read_host(&mut byte)?;
        there.write_host(&[byte[0] ^ 1 << (bit % 8)])
    }

    fn event(&self, timed: bool) -> Result<Self::Event> {
        self.inner.event(timed)
    }

    fn record(&self, event: &Self::Event) -> Result<()> {
        self.inner.record(event)
    }

    fn wait_event(&self, event: &Self::Event) -> Result<()> {
        self.inner.wait_event(event)
    }

    fn done(&self, event: &Self::Event) -> Result<bool> {
        self.inner.done(event)
    }

    fn notify(&self, event: &Self::Event, thread: &Thread) -> Result<bool> {
        self.inner.notify(event, thread)
    }

    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }

    fn load(&self, artifact: &Artifact) -> Result<Self::Kernel> {
        self.inner.load(artifact)
    }

    fn unload(&self, kernel: Self::Kernel) -> Result<()> {
        self.inner.unload(kernel)
    }

    unsafe fn launch(&self, kernel: &Self::Kernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.launch(kernel, grid, arguments) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.inner.begin_capture()
    }

    fn end_capture(&self) -> Result<Self::Graph> {
        self.inner.end_capture()
    }

    unsafe fn replay(&self, graph: &Self::Graph) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.replay(graph) }
    }

    fn discard(&self, graph: Self::Graph) -> Result<()> {
        self.inner.discard(graph)
    }

    fn wait(&self, event: &Self::Event, deadline: Instant) -> Result<()> {
        self.inner.wait(event, deadline)
    }
}
