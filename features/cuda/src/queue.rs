//! A context, one stream and one pool: the queue of a CUDA device.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vm_accel::{
    Arguments, Artifact, Error, Grid, Link, Memory, MemoryInfo, MemoryKind, Queue, QueueOptions, Region,
    Result, Tensor, deadline,
};

use crate::images::Images;
use crate::result::{Context, Device, Event, Function, Graph, Module, OUT_OF_MEMORY, Pool, Stream};
use crate::sys::{Driver, Status};

/// What the queue must know of its device.
#[derive(Clone, Debug)]
pub(crate) struct Traits {
    pub(crate) name: String,
    pub(crate) unified: bool,
    pub(crate) host_registration: bool,
}

/// A loaded kernel.
#[derive(Debug)]
pub struct CudaKernel {
    function: Function,
    /// The number of the queue that loaded it, and unloads it when it ends.
    queue: u64,
    artifact: Artifact,
}

/// A point in a stream.
pub struct CudaEvent(Event);

/// An executable graph.
pub struct CudaGraph(Graph);

/// Bytes of unified memory that this process has allocated and not freed. A device whose unified memory is more than
/// its free memory can stop answering, to everybody.
static UNIFIED: AtomicU64 = AtomicU64::new(0);

/// Tensor maps that a queue keeps for the launches of the same views that follow.
const MAPS: usize = 1024;

/// One allocation of a queue.
#[derive(Clone, Copy, Debug)]
struct Live {
    kind: MemoryKind,
    host: u64,
    bytes: u64,
}

/// The queue of a CUDA device. Its objects are dropped in the order of its fields.
pub struct CudaQueue {
    /// No other queue of the process has it.
    number: u64,
    driver: &'static Driver,
    device: Device,
    traits: Traits,
    timeout: Duration,
    /// What was allocated and not freed, by address.
    live: RefCell<HashMap<u64, Live>>,
    images: RefCell<Images<Module>>,
    maps: RefCell<HashMap<Tensor, [u64; 16]>>,
    /// Set when the device did not finish in time: what it may still use is left to the end of the process.
    stuck: Cell<bool>,
    stream: Option<Stream>,
    pool: Option<Pool>,
    context: Option<Rc<Context>>,
}

impl CudaQueue {
    pub(crate) fn open(
        driver: &'static Driver,
        device: Device,
        traits: Traits,
        options: &QueueOptions,
    ) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let context = Rc::new(Context::retain(driver, device)?);
        let stream = Stream::new(&context)?;
        let pool = Pool::new(&context, device, options.keep_bytes)?;
        Ok(Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            driver,
            device,
            traits,
            timeout: options.timeout,
            live: RefCell::default(),
            images: RefCell::default(),
            maps: RefCell::default(),
            stuck: Cell::new(false),
            stream: Some(stream),
            pool: Some(pool),
            context: Some(context),
        })
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.traits.name.clone() }
    }

    fn stream(&self) -> Result<&Stream> {
        self.context()?;
        self.stream.as_ref().ok_or(Error::Stopped)
    }

    fn pool(&self) -> Result<&Pool> {
        self.context()?;
        self.pool.as_ref().ok_or(Error::Stopped)
    }

    /// The context, which is the thread's current one then.
    fn context(&self) -> Result<&Rc<Context>> {
        let context = self.context.as_ref().ok_or(Error::Stopped)?;
        context.enter()?;
        Ok(context)
    }

    fn out_of(&self, kind: MemoryKind, bytes: u64, call: &'static str, status: Status) -> Error {
        if status != OUT_OF_MEMORY {
            return self.driver.error(call, status);
        }
        let (free, total) = self.driver.memory().unwrap_or((0, 0));
        Error::OutOfMemory { kind: kind.name(), bytes, free, total }
    }

    /// That a kernel is of this queue, and arguments may be the kernel's.
    fn check(&self, kernel: &CudaKernel, arguments: &Arguments) -> Result<()> {
        if kernel.queue != self.number {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        let wanted = kernel.artifact.parameter_bytes();
        if arguments.bytes() != wanted {
            return Err(Error::Arguments {
                kernel: kernel.artifact.entry().to_owned(),
                parameter: "all".into(),
                reason: format!("{} bytes given, {wanted} wanted", arguments.bytes()),
            });
        }
        Ok(())
    }

    /// A kernel's arguments with its tensor maps; none for a kernel without. What does not belong together is refused.
    fn with_maps(&self, kernel: &CudaKernel, arguments: &Arguments) -> Result<Option<Arguments>> {
        self.check(kernel, arguments)?;
        arguments.with_maps(&kernel.artifact, |tensor| {
            self.context()?;
            let mut maps = self.maps.borrow_mut();
            if let Some(map) = maps.get(tensor) {
                return Ok(*map);
            }
            if maps.len() >= MAPS {
                maps.clear();
            }
            let map = self.driver.tensor_map(tensor)?;
            maps.insert(*tensor, map);
            Ok(map)
        })
    }

    /// Gives up a kernel that no command uses, and unloads its image with the last of its kernels.
    #[allow(unsafe_code)]
    fn give(&self, artifact: &Artifact) -> Result<()> {
        let module = self.images.borrow_mut().give(artifact);
        // SAFETY: all of its kernels were given up; whoever gives one up promises that no command uses it.
        module.map_or(Ok(()), |module| unsafe { module.unload(self.driver) })
    }

    /// Waits for all that was started.
    fn drained(&self) -> Result<()> {
        let event = self.event(false)?;
        self.record(&event)?;
        self.wait(&event, deadline(self.timeout))
    }

    /// Frees one allocation.
    ///
    /// # Safety
    /// It is among the live, and taken out of them if this succeeds. Commands that use it were given to this queue before; if it is
    /// not the device's own, they have run.
    #[allow(unsafe_code)]
    unsafe fn release(&self, address: u64, live: Live) -> Result<()> {
        self.context()?;
        match live.kind {
            // SAFETY: the queue's pool gave it; the caller promises the rest.
            MemoryKind::Device => unsafe { self.driver.free_async(address, self.stream()?) },
            // SAFETY: the driver gave it as pinned memory; the caller promises the rest.
            MemoryKind::Pinned => unsafe { self.driver.free_pinned(live.host) },
            MemoryKind::Unified => {
                // SAFETY: the driver gave it as unified memory; the caller promises the rest.
                unsafe { self.driver.free_unified(address) }?;
                UNIFIED.fetch_sub(live.bytes, Ordering::Relaxed);
                Ok(())
            }
            // SAFETY: it was registered here; the caller promises the rest.
            MemoryKind::Registered => unsafe { self.driver.unregister(live.host) },
        }
    }

    /// Allocates unified memory, if all of the process's fits into what is free on the device.
    fn allocate_unified(&self, bytes: u64) -> Result<u64> {
        let (free, total) = self.driver.memory()?;
        let fits = |used: u64| used.checked_add(bytes).filter(|all| *all <= free);
        UNIFIED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|_| Error::OutOfMemory {
            kind: MemoryKind::Unified.name(),
            bytes,
            free,
            total,
        })?;
        self.driver.allocate_unified(bytes).map_err(|status| {
            UNIFIED.fetch_sub(bytes, Ordering::Relaxed);
            self.out_of(MemoryKind::Unified, bytes, "cuMemAllocManaged", status)
        })
    }
}

impl Drop for CudaQueue {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Err(error) = self.drained() {
            tracing::warn!(device = self.traits.name, %error, "the queue ends before its work");
            self.stuck.set(matches!(error, Error::Deadline { .. }));
        }
        if self.stuck.get() {
            // Ending any of these would wait for the device, without a deadline.
            std::mem::forget(self.stream.take());
            std::mem::forget(self.pool.take());
            std::mem::forget(self.context.take());
            return;
        }
        for (address, live) in std::mem::take(&mut *self.live.borrow_mut()) {
            // SAFETY: it is no longer among the live; all commands have run, and there will be no more.
            if let Err(error) = unsafe { self.release(address, live) } {
                tracing::debug!(%error, "memory was not freed");
            }
        }
        for module in self.images.borrow_mut().drain() {
            // SAFETY: this queue takes its kernels no more; all commands have run.
            if let Err(error) = unsafe { module.unload(self.driver) } {
                tracing::debug!(%error, "a module was not unloaded");
            }
        }
    }
}

impl Queue for CudaQueue {
    type Kernel = CudaKernel;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    #[allow(unsafe_code)]
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.context()?;
        let (address, host) = match kind {
            MemoryKind::Device => {
                let address = self.pool()?.allocate(bytes, self.stream()?);
                (address.map_err(|status| self.out_of(kind, bytes, "cuMemAllocFromPoolAsync", status))?, 0)
            }
            MemoryKind::Pinned => {
                let (host, address) = self
                    .driver
                    .allocate_pinned(bytes)
                    .map_err(|status| self.out_of(kind, bytes, "cuMemHostAlloc", status))?;
                (address, host)
            }
            MemoryKind::Unified => {
                if !self.traits.unified {
                    return Err(self.unsupported("unified memory that host and device use at once"));
                }
                let address = self.allocate_unified(bytes)?;
                (address, address)
            }
            MemoryKind::Registered => return Err(self.unsupported("allocating registered memory")),
        };
        self.live.borrow_mut().insert(address, Live { kind, host, bytes });
        // SAFETY: the driver keeps the memory until it is freed, which happens once: here when it comes back, or when
        // the queue is dropped.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn allocate_watched(&self, bytes: u64) -> Result<Memory> {
        // In pinned memory each look of a warp goes to the host, one after another: a microsecond each on an H200. Of
        // unified memory that is mostly read the device has a copy, until somebody writes.
        if self.traits.unified {
            match self.allocate(MemoryKind::Unified, bytes) {
                Ok(memory) => {
                    if let Err(error) = self.driver.mostly_read(memory.address(), bytes, self.device) {
                        tracing::debug!(%error, "looks at stop words go to the host");
                    }
                    return Ok(memory);
                }
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => tracing::debug!(%error, "looks at stop words go to the host"),
            }
        }
        self.allocate(MemoryKind::Pinned, bytes)
    }

    #[allow(unsafe_code)]
    fn free(&self, memory: Memory) -> Result<()> {
        let address = memory.address();
        let live = self.live.borrow().get(&address).copied().ok_or(Error::WrongWorker { what: "buffer" })?;
        if live.kind != MemoryKind::Device {
            self.drained()?;
        }
        // SAFETY: whoever gives the memory back uses it no more, and what he had done by this queue comes before or has ended.
        unsafe { self.release(address, live) }?;
        self.live.borrow_mut().remove(&address);
        Ok(())
    }

    fn trim(&self, keep: u64) -> Result<()> {
        // Freed memory that the host has not seen come free stays with the pool. Looking at an event does not count.
        self.drained()?;
        self.stream()?.synchronize()?;
        self.pool()?.trim(keep)
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.context()?;
        let (free, total) = self.driver.memory()?;
        Ok(MemoryInfo { free, total, reserved: self.pool()?.reserved()? })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        if !self.traits.host_registration {
            return Err(self.unsupported("registering host memory"));
        }
        self.context()?;
        // SAFETY: the caller promises that it stays mapped until it is freed or the queue is dropped; both unregister.
        let address = unsafe { self.driver.register(host, bytes) }?;
        let (kind, host) = (MemoryKind::Registered, host as u64);
        self.live.borrow_mut().insert(address, Live { kind, host, bytes });
        // SAFETY: as above.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    #[allow(unsafe_code)]
    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        match target.bytes() {
            0 => Ok(()),
            // SAFETY: the region is of memory that a queue gave out and that comes back to it behind this at the earliest.
            bytes => unsafe { self.stream()?.fill(target.address(), value, bytes) },
        }
    }

    #[allow(unsafe_code)]
    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        match source.bytes() {
            0 => Ok(()),
            // SAFETY: as for `fill`, both.
            bytes => unsafe { self.stream()?.copy(target.address(), source.address(), bytes) },
        }
    }

    fn event(&self, timed: bool) -> Result<CudaEvent> {
        Event::new(self.context()?, timed).map(CudaEvent)
    }

    fn record(&self, event: &CudaEvent) -> Result<()> {
        event.0.record(self.stream()?)
    }

    fn done(&self, event: &CudaEvent) -> Result<bool> {
        event.0.done()
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<Duration> {
        from.0.until(&to.0)
    }

    fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        self.context()?;
        let mut images = self.images.borrow_mut();
        let module = images.take(artifact, || Module::load(self.driver, artifact))?;
        let function = Function::find(self.driver, module, artifact);
        drop(images);
        match function {
            Ok(function) => Ok(CudaKernel { function, queue: self.number, artifact: artifact.clone() }),
            Err(error) => {
                if let Err(error) = self.give(artifact) {
                    tracing::debug!(%error, "a module was not unloaded");
                }
                Err(error)
            }
        }
    }

    fn unload(&self, kernel: CudaKernel) -> Result<()> {
        self.context()?;
        if kernel.queue != self.number {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        self.give(&kernel.artifact)
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, kernel: &CudaKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        let whole = self.with_maps(kernel, arguments)?;
        let arguments = whole.as_ref().unwrap_or(arguments);
        // SAFETY: the kernel is of this queue, which unloads none that is there; the caller promises the rest.
        unsafe { self.stream()?.launch(&kernel.function, grid, arguments) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.stream()?.begin_capture()
    }

    fn end_capture(&self) -> Result<CudaGraph> {
        self.stream()?.end_capture().map(CudaGraph)
    }

    #[allow(unsafe_code)]
    fn chain(&self, links: &[Link<'_, Self>]) -> Result<CudaGraph> {
        let whole = links.iter().map(|link| self.with_maps(link.kernel, &link.arguments));
        let whole = whole.collect::<Result<Vec<_>>>()?;
        let launches = links.iter().zip(&whole).map(|(link, whole)| {
            let arguments = whole.as_ref().unwrap_or(&link.arguments);
            (&link.kernel.function, link.grid, arguments, link.then.map(|event| &event.0))
        });
        // SAFETY: the kernels are of this queue, which unloads none that is there.
        unsafe { Graph::chain(self.context()?, launches) }.map(CudaGraph)
    }

    #[allow(unsafe_code)]
    fn amend(
        &self,
        graph: &CudaGraph,
        place: usize,
        kernel: &CudaKernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        let whole = self.with_maps(kernel, arguments)?;
        let arguments = whole.as_ref().unwrap_or(arguments);
        self.context()?;
        // SAFETY: the kernel is of this queue, which unloads none that is there.
        unsafe { graph.0.amend(place, &kernel.function, grid, arguments) }
    }

    #[allow(unsafe_code)]
    unsafe fn replay(&self, graph: &CudaGraph) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { graph.0.launch(self.stream()?) }
    }

    fn discard(&self, graph: CudaGraph) -> Result<()> {
        drop(graph);
        Ok(())
    }
}
