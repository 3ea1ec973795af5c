//! A context, one stream and one pool: the queue of a CUDA device.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use vm_accel::{
    Arguments, Artifact, Error, Grid, Memory, MemoryInfo, MemoryKind, Queue, QueueOptions, Region, Result,
};

use crate::result::{Context, Device, Event, Graph, Module, OUT_OF_MEMORY, Pool, Stream};
use crate::sys::{Driver, Status};

/// What the queue must know of its device.
#[derive(Clone, Debug)]
pub(crate) struct Traits {
    pub(crate) name: String,
    pub(crate) unified: bool,
    pub(crate) host_registration: bool,
    pub(crate) shared_bytes: u32,
}

/// A loaded kernel.
#[derive(Debug)]
pub struct CudaKernel {
    module: Module,
    entry: String,
    parameter_bytes: u32,
}

/// A point in a stream.
pub struct CudaEvent(Event);

/// An executable graph.
pub struct CudaGraph(Graph);

/// The queue of a CUDA device. Its objects are dropped in the order of its fields.
pub struct CudaQueue {
    driver: &'static Driver,
    traits: Traits,
    patience: Duration,
    /// What was allocated and not freed: address to kind and host address.
    live: RefCell<HashMap<u64, (MemoryKind, u64)>>,
    modules: RefCell<HashSet<usize>>,
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
        let context = Rc::new(Context::retain(driver, device)?);
        let stream = Stream::new(&context)?;
        let pool = Pool::new(&context, device, options.keep_bytes)?;
        Ok(Self {
            driver,
            traits,
            patience: options.patience,
            live: RefCell::default(),
            modules: RefCell::default(),
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
        self.stream.as_ref().ok_or(Error::Stopped)
    }

    fn pool(&self) -> Result<&Pool> {
        self.pool.as_ref().ok_or(Error::Stopped)
    }

    fn context(&self) -> Result<&Rc<Context>> {
        self.context.as_ref().ok_or(Error::Stopped)
    }

    fn out_of(&self, kind: MemoryKind, bytes: u64, call: &'static str, status: Status) -> Error {
        if status != OUT_OF_MEMORY {
            return self.driver.error(call, status);
        }
        let (free, total) = self.driver.memory().unwrap_or((0, 0));
        Error::OutOfMemory { kind: kind.name(), bytes, free, total }
    }

    /// Waits for all that was started.
    fn drained(&self) -> Result<()> {
        let event = self.event(false)?;
        self.record(&event)?;
        self.wait(&event, Instant::now() + self.patience)
    }

    fn release(&self, address: u64, kind: MemoryKind, host: u64) -> Result<()> {
        match kind {
            MemoryKind::Device => self.driver.free_async(address, self.stream()?),
            MemoryKind::Pinned => self.driver.free_pinned(host),
            MemoryKind::Unified => self.driver.free_unified(address),
            MemoryKind::Registered => self.driver.unregister(host),
        }
    }
}

impl Drop for CudaQueue {
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
        for (address, (kind, host)) in std::mem::take(&mut *self.live.borrow_mut()) {
            if let Err(error) = self.release(address, kind, host) {
                tracing::debug!(%error, "memory was not freed");
            }
        }
        for id in std::mem::take(&mut *self.modules.borrow_mut()) {
            if let Err(error) = Module::unload(self.driver, id) {
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
                let address = self
                    .driver
                    .allocate_unified(bytes)
                    .map_err(|status| self.out_of(kind, bytes, "cuMemAllocManaged", status))?;
                (address, address)
            }
            MemoryKind::Registered => return Err(self.unsupported("allocating registered memory")),
        };
        self.live.borrow_mut().insert(address, (kind, host));
        // SAFETY: the driver keeps the memory until it is freed, which happens once: here when it comes back, or when
        // the queue is dropped.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn free(&self, memory: Memory) -> Result<()> {
        let (address, kind, host) = (memory.address(), memory.kind(), memory.host_address());
        if !self.live.borrow().contains_key(&address) {
            return Err(Error::WrongWorker { what: "buffer" });
        }
        if kind != MemoryKind::Device {
            self.drained()?;
        }
        self.release(address, kind, host)?;
        self.live.borrow_mut().remove(&address);
        Ok(())
    }

    fn trim(&self, keep: u64) -> Result<()> {
        self.pool()?.trim(keep)
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let (free, total) = self.driver.memory()?;
        Ok(MemoryInfo { free, total, reserved: self.pool()?.reserved()? })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        if !self.traits.host_registration {
            return Err(self.unsupported("registering host memory"));
        }
        // SAFETY: the caller promises that it stays mapped until it is freed or the queue is dropped; both unregister.
        let address = unsafe { self.driver.register(host, bytes) }?;
        self.live.borrow_mut().insert(address, (MemoryKind::Registered, host as u64));
        // SAFETY: as above.
        Ok(unsafe { Memory::from_raw(MemoryKind::Registered, address, host as u64, bytes) })
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        self.stream()?.fill(target.address(), value, target.bytes())
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        self.stream()?.copy(target.address(), source.address(), source.bytes())
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

    fn wait_for(&self, event: &CudaEvent) -> Result<()> {
        self.stream()?.wait_for(&event.0)
    }

    fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        let module = Module::load(self.driver, artifact, self.traits.shared_bytes)?;
        self.modules.borrow_mut().insert(module.id());
        let (entry, parameter_bytes) = (artifact.entry().to_owned(), artifact.parameter_bytes());
        Ok(CudaKernel { module, entry, parameter_bytes })
    }

    fn unload(&self, kernel: CudaKernel) -> Result<()> {
        if !self.modules.borrow_mut().remove(&kernel.module.id()) {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        Module::unload(self.driver, kernel.module.id())
    }

    fn launch(&self, kernel: &CudaKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        if arguments.bytes() != kernel.parameter_bytes {
            return Err(Error::Arguments {
                kernel: kernel.entry.clone(),
                parameter: "all".into(),
                reason: format!("{} bytes given, {} wanted", arguments.bytes(), kernel.parameter_bytes),
            });
        }
        self.stream()?.launch(&kernel.module, grid, arguments)
    }

    fn begin_capture(&self) -> Result<()> {
        self.stream()?.begin_capture()
    }

    fn end_capture(&self) -> Result<CudaGraph> {
        self.stream()?.end_capture().map(CudaGraph)
    }

    fn replay(&self, graph: &CudaGraph) -> Result<()> {
        graph.0.launch(self.stream()?)
    }

    fn discard(&self, graph: CudaGraph) -> Result<()> {
        drop(graph);
        Ok(())
    }
}
