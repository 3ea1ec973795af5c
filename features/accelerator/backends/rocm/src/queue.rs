//! A stream of a device: the queue of an AMD GPU.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vm_accel::image::Images;
use vm_accel::{
    Arguments, Artifact, DeviceInfo, Error, Grid, Memory, MemoryInfo, MemoryKind, Queue, QueueOptions,
    Region, Result, deadline,
};

use crate::result::{Device, Event, Function, Graph, Live, Module, OUT_OF_MEMORY, Stream};

/// The number of the next that has kernels loaded.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A loaded kernel.
#[derive(Debug)]
pub struct RocmKernel {
    function: Function,
    /// The number of the queues that share it.
    number: u64,
    artifact: Artifact,
}

/// A point in a stream.
pub struct RocmEvent(Event);

/// An executable graph.
pub struct RocmGraph(Graph);

/// What a queue and the streams that came of it share. It ends with the last of them.
struct Shared {
    /// No other of the process has it.
    number: u64,
    device: Device,
    name: String,
    target: String,
    unified: bool,
    /// Bytes of shared memory of a block, and threads of a wave.
    limits: (u32, u32),
    options: QueueOptions,
    /// What was allocated and not freed, by address.
    live: RefCell<HashMap<u64, Live>>,
    images: RefCell<Images<Module>>,
    /// Set when it is not known that the device has finished: what it may still use is left to the end of the process.
    stuck: Cell<bool>,
}

impl Shared {
    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.name.clone() }
    }

    fn out_of(&self, kind: MemoryKind, bytes: u64) -> Error {
        let (free, total) = self.device.memory().unwrap_or((0, 0));
        Error::OutOfMemory { kind: kind.name(), bytes, free, total }
    }

    /// Keeps what was allocated, for whoever gets it.
    #[allow(unsafe_code)]
    fn keep(&self, live: Live) -> Memory {
        self.live.borrow_mut().insert(live.address, live);
        // SAFETY: the driver keeps the memory until it is freed, which happens once: when it comes back, or when the last queue is
        // dropped. Of registered memory the caller of `register` promises it.
        unsafe { Memory::from_raw(live.kind, live.address, live.host, live.bytes) }
    }

    /// Gives up a kernel that no command uses, and unloads its image with the last of its kernels.
    #[allow(unsafe_code)]
    fn give(&self, artifact: &Artifact) -> Result<()> {
        let module = self.images.borrow_mut().give(artifact);
        // SAFETY: all of its kernels were given up; whoever gives one up promises that no command uses it.
        module.map_or(Ok(()), |module| unsafe { module.unload(self.device) })
    }
}

impl Drop for Shared {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.stuck.get() {
            // Ending these could wait for the device, without a deadline.
            self.images.borrow_mut().drain().for_each(std::mem::forget);
            return;
        }
        for (_, live) in std::mem::take(&mut *self.live.borrow_mut()) {
            // SAFETY: it is no longer among the live; all commands have run, and there will be no more.
            if let Err(error) = unsafe { self.device.free(live) } {
                tracing::debug!(%error, "memory was not freed");
            }
        }
        for module in self.images.borrow_mut().drain() {
            // SAFETY: nobody launches its kernels any more; all commands have run.
            if let Err(error) = unsafe { module.unload(self.device) } {
                tracing::debug!(%error, "a module was not unloaded");
            }
        }
    }
}

/// A stream of an AMD GPU. With the last one of those that came of one another goes all that was allocated and loaded there.
pub struct RocmQueue {
    stream: Stream,
    /// Whether commands are recorded: HIP neither allocates nor waits then.
    capturing: Cell<bool>,
    shared: Rc<Shared>,
}

impl RocmQueue {
    pub(crate) fn open(device: Device, info: &DeviceInfo, options: &QueueOptions) -> Result<Self> {
        let shared = Shared {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            name: info.name.clone(),
            target: info.target.clone(),
            unified: info.unified,
            limits: (info.shared_bytes, info.warp_size),
            options: *options,
            live: RefCell::default(),
            images: RefCell::default(),
            stuck: Cell::new(false),
        };
        Ok(Self { stream: Stream::new(device)?, capturing: Cell::new(false), shared: Rc::new(shared) })
    }

    fn not_capturing(&self, what: &'static str) -> Result<()> {
        if self.capturing.get() { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// Waits for all that was started.
    fn drained(&self) -> Result<()> {
        let event = self.event(false)?;
        self.record(&event)?;
        self.wait(&event, deadline(self.shared.options.timeout))
    }
}

impl Drop for RocmQueue {
    fn drop(&mut self) {
        let ended =
            |result: &Result<()>| matches!(result, Ok(()) | Err(Error::Lost { .. } | Error::Deadline { .. }));
        if self.capturing.get() {
            // Else the wait would be recorded.
            drop(self.end_capture());
        }
        let mut drained = self.drained();
        if !ended(&drained) {
            // What failed for want of memory, say, may work now.
            drained = self.drained();
        }
        let Err(error) = drained else { return };
        tracing::warn!(device = self.shared.name, %error, "the queue ends before its work");
        if !error.is_lost() {
            self.stream.leave();
            self.shared.stuck.set(true);
        }
    }
}

impl Queue for RocmQueue {
    type Kernel = RocmKernel;
    type Event = RocmEvent;
    type Graph = RocmGraph;

    #[allow(unsafe_code)]
    unsafe fn stream(&self) -> Result<Self> {
        let stream = Stream::new(self.shared.device)?;
        Ok(Self { stream, capturing: Cell::new(false), shared: Rc::clone(&self.shared) })
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        let shared = &self.shared;
        self.not_capturing("allocating memory")?;
        match kind {
            MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface => {
                return Err(shared.unsupported(&format!("allocating {} memory", kind.name())));
            }
            MemoryKind::Unified if !shared.unified => {
                return Err(shared.unsupported("unified memory that host and device use at once"));
            }
            // More of it than there is would be moved to and fro while kernels run.
            MemoryKind::Unified if bytes > shared.device.memory()?.0 => {
                return Err(shared.out_of(kind, bytes));
            }
            _ => {}
        }
        match shared.device.allocate(kind, bytes) {
            Ok(live) => Ok(shared.keep(live)),
            Err(Error::Driver { code: OUT_OF_MEMORY, .. }) => Err(shared.out_of(kind, bytes)),
            Err(error) => Err(error),
        }
    }

    #[allow(unsafe_code)]
    fn free(&self, memory: Memory) -> Result<()> {
        let address = memory.address();
        let live = self.shared.live.borrow().get(&address).copied();
        let live = live.ok_or(Error::WrongWorker { what: "buffer" })?;
        self.not_capturing("freeing memory")?;
        // The library would wait too, and without a deadline.
        self.drained()?;
        // SAFETY: it is among the live; whoever gives it back uses it no more, and what used it has run.
        unsafe { self.shared.device.free(live) }?;
        self.shared.live.borrow_mut().remove(&address);
        Ok(())
    }

    fn trim(&self, _keep: u64) -> Result<()> {
        self.not_capturing("a trim")?;
        // What is freed goes back at once.
        self.drained()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let (free, total) = self.shared.device.memory()?;
        let live = self.shared.live.borrow();
        let own = live.values().filter(|live| live.kind == MemoryKind::Device).map(|live| live.bytes);
        Ok(MemoryInfo { free, total, reserved: own.sum() })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        self.not_capturing("registering memory")?;
        // SAFETY: the caller promises that it stays mapped until it is freed or the queue is dropped; both give it back.
        let live = unsafe { self.shared.device.register(host, bytes) }?;
        Ok(self.shared.keep(live))
    }

    #[allow(unsafe_code)]
    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        match target.bytes() {
            0 => Ok(()),
            // SAFETY: the region is of memory that a queue gave out and that comes back to it behind this at the earliest.
            bytes => unsafe { self.stream.fill(target.address(), value, bytes) },
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
            bytes => unsafe { self.stream.copy(target.address(), source.address(), bytes) },
        }
    }

    fn event(&self, timed: bool) -> Result<RocmEvent> {
        Event::new(self.shared.device, timed).map(RocmEvent)
    }

    fn record(&self, event: &RocmEvent) -> Result<()> {
        event.0.record(&self.stream)
    }

    fn wait_event(&self, event: &RocmEvent) -> Result<()> {
        self.not_capturing("a wait for an event")?;
        self.stream.wait(&event.0)
    }

    fn handle(&self) -> Option<u64> {
        Some(self.stream.handle())
    }

    #[allow(unsafe_code)]
    unsafe fn follow(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        let theirs = unsafe { Stream::borrow(self.shared.device, stream) };
        let event = self.event(false)?;
        event.0.record(&theirs)?;
        self.wait_event(&event)
    }

    #[allow(unsafe_code)]
    unsafe fn precede(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        let theirs = unsafe { Stream::borrow(self.shared.device, stream) };
        let event = self.event(false)?;
        self.record(&event)?;
        theirs.wait(&event.0)
    }

    fn done(&self, event: &RocmEvent) -> Result<bool> {
        event.0.done()
    }

    fn elapsed(&self, from: &RocmEvent, to: &RocmEvent) -> Result<Duration> {
        from.0.until(&to.0)
    }

    /// The kernel of an artifact, whose image is loaded for the first of its kernels.
    fn load(&self, artifact: &Artifact) -> Result<RocmKernel> {
        let (shared, device) = (&self.shared, self.shared.device);
        let mut images = shared.images.borrow_mut();
        let module = images.take(artifact, || Module::load(device, artifact, &shared.target))?;
        let function = Function::find(device, module, artifact, shared.limits);
        drop(images);
        match function {
            Ok(function) => Ok(RocmKernel { function, number: shared.number, artifact: artifact.clone() }),
            Err(error) => {
                if let Err(error) = shared.give(artifact) {
                    tracing::debug!(%error, "a module was not unloaded");
                }
                Err(error)
            }
        }
    }

    fn unload(&self, kernel: RocmKernel) -> Result<()> {
        if kernel.number != self.shared.number {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        self.shared.give(&kernel.artifact)
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, kernel: &RocmKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        let RocmKernel { function, number, artifact } = kernel;
        if *number != self.shared.number {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        let (given, wanted) = (arguments.bytes(), artifact.parameter_bytes());
        if given != wanted {
            return Err(Error::Arguments {
                kernel: artifact.entry().to_owned(),
                parameter: "all".into(),
                reason: format!("{given} bytes given, {wanted} wanted"),
            });
        }
        grid.check_compiled(artifact.signature())?;
        // HIP counts threads in 32 bits.
        let threads =
            grid.0.iter().zip(function.block()).map(|(&blocks, size)| u64::from(blocks) * u64::from(size));
        if let Some(threads) = threads.clone().find(|threads| *threads > u64::from(u32::MAX)) {
            let reason = format!("{threads} threads along one dimension, an AMD GPU takes {}", u32::MAX);
            return Err(Error::Grid { kernel: artifact.entry().to_owned(), grid, reason });
        }
        // SAFETY: the kernel is loaded here, where none that is there is unloaded; the caller promises the rest.
        unsafe { self.stream.launch(function, grid, arguments) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.stream.begin_capture()?;
        self.capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<RocmGraph> {
        // A capture that fails has ended, too.
        self.capturing.set(false);
        self.stream.end_capture().map(RocmGraph)
    }

    #[allow(unsafe_code)]
    unsafe fn replay(&self, graph: &RocmGraph) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.stream.replay(&graph.0) }
    }

    fn discard(&self, graph: RocmGraph) -> Result<()> {
        drop(graph);
        Ok(())
    }
}
