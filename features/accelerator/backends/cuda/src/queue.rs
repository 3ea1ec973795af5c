//! A stream of a context: the queue of a CUDA device.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::sys::BorrowedResource;
use vm_accel::{
    Arguments, Artifact, DriverResource, Error, ExternalMemory, ExternalSemaphore, GraphNode, Grid, Memory,
    MemoryInfo, MemoryKind, Pixels, Queue, Region, Result, Semaphore, deadline,
};

use crate::context::{Live, Shared};
use crate::result::{
    Event, Function, Graph, GraphicsResource, ImportedMemory, ImportedSemaphore, MappedResource, Stream,
    Surface,
};
use crate::sys::{BorrowedStream, CUstream};

/// A loaded kernel.
#[derive(Debug)]
pub struct CudaKernel {
    pub(crate) function: Function,
    /// The number of the context that it is loaded in, which unloads it when it ends.
    pub(crate) context: u64,
    pub(crate) artifact: Artifact,
}

impl CudaKernel {
    /// That it is of the context with this number, and arguments may be the kernel's.
    pub(crate) fn check(&self, context: u64, arguments: &Arguments) -> Result<()> {
        if self.context != context {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        let wanted = self.artifact.parameter_bytes();
        if arguments.bytes() != wanted {
            return Err(Error::Arguments {
                kernel: self.artifact.entry().to_owned(),
                parameter: "all".into(),
                reason: format!("{} bytes given, {wanted} wanted", arguments.bytes()),
            });
        }
        Ok(())
    }
}

/// A point in a stream.
pub struct CudaEvent(Event);

/// An executable graph.
pub struct CudaGraph(Graph);

/// A stream of a CUDA device. With the last one of a context goes all that was allocated and loaded there.
pub struct CudaQueue {
    stream: Stream,
    shared: Rc<Shared>,
}

impl CudaQueue {
    pub(crate) fn new(shared: Shared, stream: impl FnOnce(&Shared) -> Result<Stream>) -> Result<Self> {
        Ok(Self { stream: stream(&shared)?, shared: Rc::new(shared) })
    }

    /// What was imported in this context.
    fn semaphore<'a>(&self, semaphore: &'a Semaphore) -> Result<&'a ImportedSemaphore> {
        let imported = semaphore.imported::<ImportedSemaphore>()?;
        imported.check(&self.shared.context).map(|()| imported)
    }

    /// Keeps what is another API's until its memory is freed.
    #[allow(unsafe_code)]
    fn keep(&self, address: u64, bytes: u64, import: impl Any) -> Memory {
        let (kind, host) = (MemoryKind::External, 0);
        self.shared.live.borrow_mut().insert(address, Live { kind, host, bytes });
        self.shared.imports.borrow_mut().insert(address, Box::new(import));
        // SAFETY: it is mapped until it is freed or the queue is dropped, and the driver keeps what it imported.
        unsafe { Memory::from_raw(kind, address, host, bytes) }
    }

    #[allow(unsafe_code)]
    fn keep_levels(&self, levels: Vec<Surface>) -> Vec<Memory> {
        let mut surfaces = self.shared.surfaces.borrow_mut();
        let memory = levels.into_iter().map(|surface| {
            let handle = surface.handle();
            surfaces.insert(handle, surface);
            // SAFETY: it has no bytes, and kernels take its handle until it is freed or the queue is dropped.
            unsafe { Memory::from_raw(MemoryKind::Surface, handle, 0, 0) }
        });
        memory.collect()
    }

    /// Waits for all that was started.
    fn drained(&self) -> Result<()> {
        let event = self.event(false)?;
        self.record(&event)?;
        self.wait(&event, deadline(self.shared.options.timeout))
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        let drained = self.drained();
        if let Err(error) = &drained {
            tracing::warn!(device = self.shared.traits.name, %error, "the queue ends before its work");
        }
        if matches!(drained, Err(Error::Deadline { .. })) {
            self.stream.leave();
            self.shared.stuck.set(true);
        }
        if Rc::strong_count(&self.shared) == 1 && !self.shared.stuck.get() {
            self.shared.end(&self.stream);
        }
    }
}

impl Queue for CudaQueue {
    type Kernel = CudaKernel;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    #[allow(unsafe_code)]
    unsafe fn stream(&self) -> Result<Self> {
        Ok(Self { stream: Stream::new(&self.shared.context)?, shared: Rc::clone(&self.shared) })
    }

    fn is_captured(&self) -> Result<bool> {
        self.stream.is_captured_by_its_owner()
    }

    #[allow(unsafe_code)]
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        let _entered = self.shared.enter()?;
        let (address, host) = match kind {
            MemoryKind::Device => {
                let address = self.shared.pool()?.allocate(bytes, &self.stream);
                (
                    address.map_err(|status| {
                        self.shared.out_of(kind, bytes, "cuMemAllocFromPoolAsync", status)
                    })?,
                    0,
                )
            }
            MemoryKind::Pinned => {
                let (host, address) = self
                    .shared
                    .driver
                    .allocate_pinned(bytes)
                    .map_err(|status| self.shared.out_of(kind, bytes, "cuMemHostAlloc", status))?;
                (address, host)
            }
            MemoryKind::Unified => {
                if !self.shared.traits.unified {
                    return Err(self.shared.unsupported("unified memory that host and device use at once"));
                }
                let address = self.shared.allocate_unified(bytes)?;
                (address, address)
            }
            MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface => {
                return Err(self.shared.unsupported(&format!("allocating {} memory", kind.name())));
            }
        };
        self.shared.live.borrow_mut().insert(address, Live { kind, host, bytes });
        // SAFETY: the driver keeps the memory until it is freed, which happens once: here when it comes back, or when
        // the queue is dropped.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn allocate_polled(&self, bytes: u64) -> Result<Memory> {
        // In pinned memory each poll of a warp goes to the host, one after another: a microsecond each on an H200. Of
        // unified memory that is mostly read the device has a copy, until somebody writes.
        if self.shared.traits.unified {
            match self.allocate(MemoryKind::Unified, bytes) {
                Ok(memory) => {
                    if let Err(error) =
                        self.shared.driver.mostly_read(memory.address(), bytes, self.shared.device)
                    {
                        tracing::debug!(%error, "polls of cancel flags go to the host");
                    }
                    return Ok(memory);
                }
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => tracing::debug!(%error, "polls of cancel flags go to the host"),
            }
        }
        self.allocate(MemoryKind::Pinned, bytes)
    }

    #[allow(unsafe_code)]
    fn free(&self, memory: Memory) -> Result<()> {
        let address = memory.address();
        if memory.kind() == MemoryKind::Surface {
            if !self.shared.surfaces.borrow().contains_key(&address) {
                return Err(Error::WrongWorker { what: "surface" });
            }
            self.drained()?;
            drop(self.shared.surfaces.borrow_mut().remove(&address));
            return Ok(());
        }
        let live =
            self.shared.live.borrow().get(&address).copied().ok_or(Error::WrongWorker { what: "buffer" })?;
        if live.kind != MemoryKind::Device {
            self.drained()?;
        }
        // SAFETY: whoever gives the memory back uses it no more, and what he had done by this queue comes before or has ended.
        unsafe { self.shared.release(address, live, &self.stream) }?;
        self.shared.live.borrow_mut().remove(&address);
        Ok(())
    }

    fn trim(&self, keep: u64) -> Result<()> {
        // Freed memory that the host has not seen come free stays with the pool. Polling an event does not count.
        self.drained()?;
        self.stream.synchronize()?;
        self.shared.pool()?.trim(keep)
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let _entered = self.shared.enter()?;
        let (free, total) = self.shared.driver.memory()?;
        Ok(MemoryInfo { free, total, reserved: self.shared.reserved()? })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        if !self.shared.traits.host_registration {
            return Err(self.shared.unsupported("registering host memory"));
        }
        let _entered = self.shared.enter()?;
        // SAFETY: the caller promises that it stays mapped until it is freed or the queue is dropped; both unregister.
        let address = unsafe { self.shared.driver.register(host, bytes) }?;
        let (kind, host) = (MemoryKind::Registered, host as u64);
        self.shared.live.borrow_mut().insert(address, Live { kind, host, bytes });
        // SAFETY: as above.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        let bytes = memory.bytes;
        let imported = ImportedMemory::new(&self.shared.context, memory, &self.shared.traits.name)?;
        Ok(self.keep(imported.address(), bytes, imported))
    }

    fn import_image(&self, memory: ExternalMemory, pixels: &Pixels) -> Result<Vec<Memory>> {
        let levels = Surface::of_image(&self.shared.context, memory, pixels, &self.shared.traits.name)?;
        Ok(self.keep_levels(levels))
    }

    fn register_resource(
        &self,
        resource: BorrowedResource,
        pixels: Option<&Pixels>,
    ) -> Result<DriverResource> {
        let registered = GraphicsResource::new(&self.shared.context, resource, pixels.copied())?;
        Ok(DriverResource::new(Arc::new(registered)))
    }

    fn map_resource(&self, resource: &DriverResource) -> Result<Vec<Memory>> {
        let (resource, context) = (resource.imported::<Arc<GraphicsResource>>()?, &self.shared.context);
        resource.check(context)?;
        let mapped = MappedResource::new(resource, &self.stream)?;
        if let Some(pixels) = resource.pixels() {
            return Ok(self.keep_levels(Surface::of_resource(context, mapped, pixels)?));
        }
        let (address, bytes) = mapped.buffer()?;
        Ok(vec![self.keep(address, bytes, mapped)])
    }

    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        let ExternalSemaphore { fd, kind, .. } = semaphore;
        let fd = fd.ok_or_else(|| self.shared.unsupported("semaphores without a descriptor"))?;
        let (context, timeout) = (&self.shared.context, self.shared.options.timeout);
        ImportedSemaphore::new(context, fd, kind, timeout).map(Semaphore::new)
    }

    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.semaphore(semaphore)?.wait(&self.stream, value)
    }

    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.semaphore(semaphore)?.signal(&self.stream, value)
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

    fn event(&self, timed: bool) -> Result<CudaEvent> {
        Event::new(&self.shared.context, timed).map(CudaEvent)
    }

    fn record(&self, event: &CudaEvent) -> Result<()> {
        event.0.record(&self.stream)
    }

    fn wait_event(&self, event: &CudaEvent) -> Result<()> {
        self.stream.wait(&event.0)
    }

    fn handle(&self) -> Option<u64> {
        Some(self.stream.handle() as u64)
    }

    #[allow(unsafe_code)]
    unsafe fn follow(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        let theirs =
            Stream::borrow(&self.shared.context, &unsafe { BorrowedStream::new(stream as CUstream) });
        let event = self.event(false)?;
        event.0.record(&theirs)?;
        self.wait_event(&event)
    }

    #[allow(unsafe_code)]
    unsafe fn precede(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        let theirs =
            Stream::borrow(&self.shared.context, &unsafe { BorrowedStream::new(stream as CUstream) });
        let event = self.event(false)?;
        self.record(&event)?;
        theirs.wait(&event.0)
    }

    fn done(&self, event: &CudaEvent) -> Result<bool> {
        event.0.done()
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<Duration> {
        from.0.until(&to.0)
    }

    fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        self.shared.load(artifact)
    }

    fn unload(&self, kernel: CudaKernel) -> Result<()> {
        if kernel.context != self.shared.number {
            return Err(Error::WrongWorker { what: "kernel" });
        }
        let _entered = self.shared.enter()?;
        self.shared.give(&kernel.artifact)
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, kernel: &CudaKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        grid.check_compiled(kernel.artifact.signature())?;
        let whole = self.shared.with_maps(kernel, arguments)?;
        let arguments = whole.as_ref().unwrap_or(arguments);
        // SAFETY: the kernel is of this context, which unloads none that is there; the caller promises the rest.
        unsafe { self.stream.launch(&kernel.function, grid, arguments) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.stream.begin_capture()
    }

    fn end_capture(&self) -> Result<CudaGraph> {
        self.stream.end_capture().map(CudaGraph)
    }

    #[allow(unsafe_code)]
    fn graph_exec(&self, nodes: &[GraphNode<'_, Self>]) -> Result<CudaGraph> {
        nodes.iter().try_for_each(|node| node.grid.check_compiled(node.kernel.artifact.signature()))?;
        let whole = nodes.iter().map(|node| self.shared.with_maps(node.kernel, &node.arguments));
        let whole = whole.collect::<Result<Vec<_>>>()?;
        let launches = nodes.iter().zip(&whole).map(|(node, whole)| {
            let arguments = whole.as_ref().unwrap_or(&node.arguments);
            (&node.kernel.function, node.grid, arguments, node.then.map(|event| &event.0))
        });
        // SAFETY: the kernels are of this context, which unloads none that is there.
        unsafe { Graph::of_launches(&self.shared.context, launches) }.map(CudaGraph)
    }

    #[allow(unsafe_code)]
    fn update(
        &self,
        graph: &CudaGraph,
        place: usize,
        kernel: &CudaKernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        grid.check_compiled(kernel.artifact.signature())?;
        let whole = self.shared.with_maps(kernel, arguments)?;
        let arguments = whole.as_ref().unwrap_or(arguments);
        let _entered = self.shared.enter()?;
        // SAFETY: the kernel is of this context, which unloads none that is there.
        unsafe { graph.0.update(place, &kernel.function, grid, arguments) }
    }

    #[allow(unsafe_code)]
    unsafe fn replay(&self, graph: &CudaGraph) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { graph.0.launch(&self.stream) }
    }

    fn discard(&self, graph: CudaGraph) -> Result<()> {
        drop(graph);
        Ok(())
    }
}
