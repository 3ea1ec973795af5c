//! The worker's side: what a job is given, and what the thread does between commands.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::brand::Brand;
use super::buffer::{Argument, Buffer, Graph, Kernel, Loaded, View};
use super::{Garbage, Shared};
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::Artifact;
use crate::device::MemoryInfo;
use crate::error::{Error, Result};
use crate::executor::job::Completer;
use crate::executor::{Idle, guarded};
use crate::launch::{Arguments, Grid, Launch, QueueArgument};
use crate::memory::{Memory, MemoryKind, Region};
use crate::pool::Taken;

type QueueOf<A> = <A as Accelerator>::Queue;
type EventOf<A> = <QueueOf<A> as Queue>::Event;

/// Bytes of each of the two pinned buffers that reads and writes go through.
const STAGING_BYTES: u64 = 4 << 20;

/// How long the thread sleeps between looks at work that the device has not finished.
const LOOK: Duration = Duration::from_micros(50);

/// What waits for the device.
enum Pending<A: Accelerator> {
    Fence(EventOf<A>, Completer<()>),
    Garbage(EventOf<A>, Vec<Garbage<A>>),
}

struct Recorded<A: Accelerator, B: Brand> {
    graph: <QueueOf<A> as Queue>::Graph,
    uses: Uses<A, B>,
}

/// What a graph keeps.
struct Uses<A: Accelerator, B: Brand> {
    memory: Vec<u64>,
    kernels: Vec<Arc<Loaded<A, B>>>,
}

struct Staging<A: Accelerator> {
    halves: [(Memory, EventOf<A>); 2],
    next: Cell<usize>,
}

/// What a job on the worker's thread works with. What it starts comes before all that still waits in the queue.
pub struct Session<A: Accelerator, B: Brand> {
    queue: QueueOf<A>,
    shared: Arc<Shared<A, B>>,
    staging: RefCell<Option<std::rc::Rc<Staging<A>>>>,
    pending: RefCell<VecDeque<Pending<A>>>,
    events: RefCell<Vec<EventOf<A>>>,
    graphs: RefCell<HashMap<u64, Recorded<A, B>>>,
    capture: RefCell<Option<Uses<A, B>>>,
    next_graph: Cell<u64>,
    /// The last position at which a command came, and when that was seen.
    last: Cell<(u64, Instant)>,
}

impl<A: Accelerator, B: Brand> Session<A, B> {
    pub(super) fn new(queue: QueueOf<A>, shared: Arc<Shared<A, B>>) -> Self {
        Self {
            queue,
            shared,
            staging: RefCell::new(None),
            pending: RefCell::default(),
            events: RefCell::default(),
            graphs: RefCell::default(),
            capture: RefCell::new(None),
            next_graph: Cell::new(1),
            last: Cell::new((0, Instant::now())),
        }
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::PoolLimit`], [`Error::Capturing`] when the device would have to be asked.
    pub fn allocate(&self, bytes: u64) -> Result<Buffer<A, B>> {
        self.allocate_kind(MemoryKind::Device, bytes)
    }

    /// Allocates memory of a kind.
    ///
    /// # Errors
    /// As [`Session::allocate`]; [`Error::Unsupported`].
    pub fn allocate_kind(&self, kind: MemoryKind, bytes: u64) -> Result<Buffer<A, B>> {
        let position = self.shared.executor.position();
        let (memory, ready) = match self.shared.pool.take(kind, bytes, Some(position))? {
            Taken::Hit(memory, ready) => (memory, ready),
            Taken::Miss(size, evicted) => (self.allocate_missed(kind, size, evicted)?, 0),
        };
        let buffer = Buffer::new(memory, bytes, ready, &self.shared);
        if self.shared.pool.zero() {
            self.fill(&buffer, 0)?;
        }
        Ok(buffer)
    }

    /// Asks the device for what the pool has not got; the pool has counted it.
    pub(super) fn allocate_missed(
        &self,
        kind: MemoryKind,
        size: u64,
        evicted: Vec<Memory>,
    ) -> Result<Memory> {
        let result = self.not_capturing("an allocation").and_then(|()| {
            self.free_all(evicted);
            match self.note(self.queue.allocate(kind, size)) {
                Err(Error::OutOfMemory { .. }) => {
                    // What the pool keeps may be what is missing.
                    self.trim()?;
                    self.note(self.queue.allocate(kind, size))
                }
                other => other,
            }
        });
        if result.is_err() {
            self.shared.pool.missed(size);
        }
        result
    }

    fn free_all(&self, memory: Vec<Memory>) {
        for memory in memory {
            if let Err(error) = self.note(self.queue.free(memory)) {
                tracing::warn!(worker = self.shared.name(), %error, "memory is kept until the worker stops");
            }
        }
    }

    /// Frees one memory, now.
    pub(super) fn free(&self, memory: Memory) -> Result<()> {
        self.not_capturing("a free")?;
        self.note(self.queue.free(memory))
    }

    /// Registers host memory. See [`Worker::register`](crate::Worker::register).
    #[allow(unsafe_code)]
    pub(super) fn register(&self, host: usize, bytes: u64) -> Result<Memory> {
        // SAFETY: the caller of `Worker::register` promised what is asked for here.
        let registered = unsafe { self.queue.register(host as *mut u8, bytes) };
        self.note(registered)
    }

    /// Sets every byte of a view.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`]; the device's.
    pub fn fill<'a>(&self, target: impl Into<View<'a, A, B>>, value: u8) -> Result<()> {
        let target = self.region(target.into())?;
        self.fill_region(target, value)
    }

    pub(super) fn fill_region(&self, target: Region<'_>, value: u8) -> Result<()> {
        self.note(self.queue.fill(target, value))
    }

    /// Copies one view to another of the same length.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::OutOfOrder`]; the device's.
    pub fn copy<'a>(
        &self,
        target: impl Into<View<'a, A, B>>,
        source: impl Into<View<'a, A, B>>,
    ) -> Result<()> {
        let (target, source) = (self.region(target.into())?, self.region(source.into())?);
        self.copy_region(target, source)
    }

    pub(super) fn copy_region(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        self.note(self.queue.copy(target, source))
    }

    /// Copies host bytes into a view of the same length. The bytes are the caller's again when this returns.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::Deadline`], [`Error::Capturing`]; the device's.
    pub fn write<'a>(&self, target: impl Into<View<'a, A, B>>, bytes: &[u8]) -> Result<()> {
        let target = self.region(target.into())?;
        self.write_region(target, bytes)
    }

    pub(super) fn write_region(&self, target: Region<'_>, bytes: &[u8]) -> Result<()> {
        self.not_capturing("a write from the host")?;
        if target.bytes() != bytes.len() as u64 {
            return Err(Error::Lengths {
                source_bytes: bytes.len() as u64,
                destination_bytes: target.bytes(),
            });
        }
        if target.kind().host_visible() {
            self.synchronize(self.patience())?;
            return target.write_host(bytes);
        }
        let staging = self.staging()?;
        for (index, chunk) in bytes.chunks(STAGING_BYTES as usize).enumerate() {
            let (memory, event) = staging.take();
            self.note(self.queue.wait(event, self.patience()))?;
            let half = memory.region().slice(0, chunk.len() as u64)?;
            half.write_host(chunk)?;
            let part = target.slice(index as u64 * STAGING_BYTES, chunk.len() as u64)?;
            self.copy_region(part, half)?;
            self.note(self.queue.record(event))?;
        }
        Ok(())
    }

    /// Copies a view into host bytes of the same length, after the work so far.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::Deadline`], [`Error::Capturing`]; the device's.
    pub fn read<'a>(&self, source: impl Into<View<'a, A, B>>, bytes: &mut [u8]) -> Result<()> {
        let source = self.region(source.into())?;
        self.read_region(source, bytes)
    }

    pub(super) fn read_region(&self, source: Region<'_>, bytes: &mut [u8]) -> Result<()> {
        self.not_capturing("a read by the host")?;
        if source.bytes() != bytes.len() as u64 {
            return Err(Error::Lengths {
                source_bytes: source.bytes(),
                destination_bytes: bytes.len() as u64,
            });
        }
        if source.kind().host_visible() {
            self.synchronize(self.patience())?;
            return source.read_host(bytes);
        }
        // While one half is being read out, the device fills the other.
        let staging = self.staging()?;
        let mut filled: Option<(&Memory, &EventOf<A>, &mut [u8])> = None;
        for (index, chunk) in bytes.chunks_mut(STAGING_BYTES as usize).enumerate() {
            let (memory, event) = staging.take();
            self.note(self.queue.wait(event, self.patience()))?;
            let half = memory.region().slice(0, chunk.len() as u64)?;
            let part = source.slice(index as u64 * STAGING_BYTES, chunk.len() as u64)?;
            self.copy_region(half, part)?;
            self.note(self.queue.record(event))?;
            if let Some(before) = filled.replace((memory, event, chunk)) {
                self.read_out(before)?;
            }
        }
        filled.map_or(Ok(()), |last| self.read_out(last))
    }

    fn read_out(&self, (memory, event, chunk): (&Memory, &EventOf<A>, &mut [u8])) -> Result<()> {
        self.note(self.queue.wait(event, self.patience()))?;
        memory.region().slice(0, chunk.len() as u64)?.read_host(chunk)
    }

    fn staging(&self) -> Result<std::rc::Rc<Staging<A>>> {
        if let Some(staging) = self.staging.borrow().as_ref() {
            return Ok(std::rc::Rc::clone(staging));
        }
        let half = || -> Result<(Memory, EventOf<A>)> {
            let event = self.queue.event(false)?;
            Ok((self.queue.allocate(MemoryKind::Pinned, STAGING_BYTES)?, event))
        };
        let staging = std::rc::Rc::new(Staging {
            halves: [self.note(half())?, self.note(half())?],
            next: Cell::new(0),
        });
        *self.staging.borrow_mut() = Some(std::rc::Rc::clone(&staging));
        Ok(staging)
    }

    /// Loads a kernel.
    ///
    /// # Errors
    /// [`Error::Load`].
    pub fn load(&self, artifact: &Artifact) -> Result<Kernel<A, B>> {
        self.not_capturing("loading a kernel")?;
        let info = self.shared.accelerator.info();
        info.check(artifact.signature())?;
        if artifact.signature().guard.is_some() {
            let what = "kernels with a stop word through a worker".into();
            return Err(Error::Unsupported { what, device: info.name.clone() });
        }
        let kernel = ManuallyDrop::new(self.note(self.queue.load(artifact))?);
        let layout = Arc::clone(artifact.layout());
        Ok(Kernel(Arc::new(Loaded { kernel, layout, shared: Arc::clone(&self.shared) })))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`Error::Grid`], [`Error::Arguments`], [`Error::WrongWorker`], [`Error::OutOfOrder`]; the device's.
    pub fn launch(
        &self,
        kernel: &Kernel<A, B>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'_, A, B>],
    ) -> Result<()> {
        let Launch { grid, limits: _ } = launch.into();
        self.shared.own("kernel", &kernel.0.shared)?;
        grid.check(kernel.entry(), self.shared.accelerator.info())?;
        let packed = Arguments::pack(
            &kernel.0.layout,
            arguments.iter().map(|argument| match argument {
                Argument::View(shaped) => Ok(QueueArgument::View(self.region(shaped.view)?, shaped.extents)),
                Argument::Scalar(scalar) => Ok(QueueArgument::Scalar(*scalar)),
            }),
        )?;
        self.launch_packed(&kernel.0, grid, &packed)
    }

    pub(super) fn launch_packed(
        &self,
        loaded: &Arc<Loaded<A, B>>,
        grid: Grid,
        packed: &Arguments,
    ) -> Result<()> {
        if let Some(uses) = self.capture.borrow_mut().as_mut() {
            uses.kernels.push(Arc::clone(loaded));
        }
        self.note(self.queue.launch(&loaded.kernel, grid, packed))
    }

    /// Records what `f` does to this session into a graph, instead of doing it.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capturing`] inside another capture; the device's.
    pub fn capture(&self, f: impl FnOnce(&Self) -> Result<()>) -> Result<Graph<A, B>> {
        self.not_capturing("another capture")?;
        self.note(self.queue.begin_capture())?;
        *self.capture.borrow_mut() = Some(Uses { memory: Vec::new(), kernels: Vec::new() });
        let done = guarded(|| f(self));
        let uses =
            self.capture.borrow_mut().take().unwrap_or(Uses { memory: Vec::new(), kernels: Vec::new() });
        let graph = match (self.note(self.queue.end_capture()), done) {
            (Ok(graph), Ok(())) => graph,
            (graph, done) => {
                self.unhold(&uses);
                let mut result = done;
                match graph {
                    Ok(graph) => self.log(self.queue.discard(graph)),
                    Err(error) => result = result.and(Err(error)),
                }
                return Err(result.err().unwrap_or(Error::Stopped));
            }
        };
        let id = self.next_graph.replace(self.next_graph.get() + 1);
        self.graphs.borrow_mut().insert(id, Recorded { graph, uses });
        Ok(Graph { id, shared: Arc::clone(&self.shared) })
    }

    /// Runs a graph.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]; the device's.
    pub fn replay(&self, graph: &Graph<A, B>) -> Result<()> {
        self.shared.own("graph", &graph.shared)?;
        self.replay_id(graph.id)
    }

    pub(super) fn replay_id(&self, id: u64) -> Result<()> {
        self.not_capturing("a replay")?;
        let graphs = self.graphs.borrow();
        let recorded = graphs.get(&id).ok_or(Error::WrongWorker { what: "graph" })?;
        self.note(self.queue.replay(&recorded.graph))
    }

    /// Waits for the device to finish all that this worker has started.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Deadline`], [`Error::Capturing`].
    pub fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.not_capturing("a wait")?;
        let event = self.event()?;
        let done =
            self.note(self.queue.record(&event)).and_then(|()| self.note(self.queue.wait(&event, deadline)));
        if done.is_ok() {
            self.events.borrow_mut().push(event);
        }
        done
    }

    /// The device's time for what `f` starts.
    ///
    /// # Errors
    /// What `f` returns; as [`Session::synchronize`].
    pub fn timed(&self, deadline: Instant, f: impl FnOnce(&Self) -> Result<()>) -> Result<Duration> {
        self.not_capturing("a measurement")?;
        let (from, to) = (self.note(self.queue.event(true))?, self.note(self.queue.event(true))?);
        self.note(self.queue.record(&from))?;
        f(self)?;
        self.note(self.queue.record(&to))?;
        self.note(self.queue.wait(&to, deadline))?;
        self.note(self.queue.elapsed(&from, &to))
    }

    /// How full the device's memory is.
    ///
    /// # Errors
    /// The device's.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.note(self.queue.memory())
    }

    /// Gives the pool's free memory back to the device.
    ///
    /// # Errors
    /// The device's; [`Error::Deadline`]; [`Error::Capturing`].
    pub fn trim(&self) -> Result<()> {
        self.synchronize(self.patience())?;
        self.free_all(self.shared.pool.drain(self.shared.executor.position()));
        // The frees are in the stream too: the pool has the memory when they have run.
        self.synchronize(self.patience())?;
        self.note(self.queue.trim(0))
    }

    /// The queue, for what this session has no words for. Commands to it are not checked against captures and buffers
    /// of other workers.
    pub fn queue(&self) -> &QueueOf<A> {
        &self.queue
    }

    /// Lets `completer` be completed when the device has done all so far.
    pub(super) fn fence(&self, completer: Completer<()>) {
        let event = match self.not_capturing("a wait").and_then(|()| self.event()) {
            Ok(event) => event,
            Err(error) => return completer.complete(Err(error)),
        };
        match self.note(self.queue.record(&event)) {
            Ok(()) => self.pending.borrow_mut().push_back(Pending::Fence(event, completer)),
            Err(error) => completer.complete(Err(error)),
        }
    }

    /// What to do while no command is ready: look after what waits for the device, then rest.
    pub(super) fn idle(&self) -> Idle {
        self.collect();
        self.look();
        let (tail, since) = self.last.get();
        let now = Instant::now();
        let position = self.shared.executor.tail();
        if tail != position {
            self.last.set((position, now));
            return Idle::Poll;
        }
        if now - since < self.shared.options.spin {
            return Idle::Poll;
        }
        if self.pending.borrow().is_empty() { Idle::Sleep } else { Idle::Within(LOOK) }
    }

    /// Ends what waits for the device and need not wait any more.
    fn look(&self) {
        loop {
            let mut pending = self.pending.borrow_mut();
            let done = match pending.front() {
                None => return,
                Some(Pending::Fence(event, _) | Pending::Garbage(event, _)) => {
                    self.note(self.queue.done(event))
                }
            };
            if done == Ok(false) {
                return;
            }
            let front = pending.pop_front();
            drop(pending);
            match front {
                None => return,
                Some(Pending::Fence(event, completer)) => {
                    if done.is_ok() {
                        self.events.borrow_mut().push(event);
                    }
                    completer.complete(done.and_then(|_| self.shared.take_deferred()));
                }
                Some(Pending::Garbage(_, garbage)) => {
                    garbage.into_iter().for_each(|garbage| self.remove(garbage))
                }
            }
        }
    }

    /// Takes what callers dropped and no queued command uses any more, and lets it wait for the device.
    fn collect(&self) {
        if self.capture.borrow().is_some() {
            return;
        }
        let garbage = self.shared.take_garbage(self.shared.executor.position());
        if garbage.is_empty() {
            return;
        }
        match self.event().and_then(|event| self.note(self.queue.record(&event)).map(|()| event)) {
            Ok(event) => self.pending.borrow_mut().push_back(Pending::Garbage(event, garbage)),
            // The context is lost, and all this with it.
            Err(_) => garbage.into_iter().for_each(|garbage| self.remove(garbage)),
        }
    }

    fn remove(&self, garbage: Garbage<A>) {
        match garbage {
            Garbage::Kernel(kernel) => self.log(self.queue.unload(kernel)),
            Garbage::Memory(memory) => self.log(self.queue.free(memory)),
            Garbage::Graph(id) => {
                let recorded = self.graphs.borrow_mut().remove(&id);
                if let Some(Recorded { graph, uses }) = recorded {
                    self.log(self.queue.discard(graph));
                    self.unhold(&uses);
                }
            }
        }
    }

    fn unhold(&self, uses: &Uses<A, B>) {
        for &address in &uses.memory {
            self.shared.pool.unhold(address, self.shared.executor.tail());
        }
    }

    /// What the thread does last: waits for the device, and gives everything back.
    pub(super) fn finish(self) -> Result<()> {
        let done = self.synchronize(self.patience());
        if done.is_ok() {
            self.collect();
            let _ = self.synchronize(self.patience());
        }
        self.look();
        self.pending.borrow_mut().clear();
        let graphs = std::mem::take(&mut *self.graphs.borrow_mut());
        for (_, Recorded { graph, uses }) in graphs {
            self.log(self.queue.discard(graph));
            self.unhold(&uses);
        }
        // The queue frees what it allocated when it is dropped; the pool's part need not be freed one by one.
        drop(self.shared.pool.close());
        done.and_then(|()| self.shared.take_deferred())
    }

    fn patience(&self) -> Instant {
        Instant::now() + self.shared.options.queue.patience
    }

    fn event(&self) -> Result<EventOf<A>> {
        let event = self.events.borrow_mut().pop();
        event.map_or_else(|| self.note(self.queue.event(false)), Ok)
    }

    /// A view's region, if the running command may use it.
    fn region(&self, view: View<'_, A, B>) -> Result<Region<'static>> {
        self.shared.own("buffer", view.shared())?;
        if view.ready() > self.shared.executor.position() {
            return Err(Error::OutOfOrder);
        }
        if let Some(uses) = self.capture.borrow_mut().as_mut()
            && !uses.memory.contains(&view.base())
        {
            uses.memory.push(view.base());
            self.shared.pool.hold(view.base());
        }
        Ok(view.region())
    }

    fn not_capturing(&self, what: &'static str) -> Result<()> {
        if self.capture.borrow().is_some() { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// Remembers a lost context.
    fn note<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_lost()
        {
            self.shared.set_lost(error);
        }
        result
    }

    /// Reports the failure of something that nobody waits for.
    fn log(&self, result: Result<()>) {
        if let Err(error) = self.note(result) {
            tracing::warn!(worker = self.shared.name(), %error, "kept until the worker stops");
        }
    }

    /// Keeps a queued command's error for the next wait.
    pub(super) fn defer(&self, result: Result<()>) {
        if let Err(error) = result {
            self.shared.defer(error);
        }
    }
}

impl<A: Accelerator> Staging<A> {
    /// The half that was used longest ago.
    fn take(&self) -> (&Memory, &EventOf<A>) {
        let index = self.next.replace(self.next.get() ^ 1);
        let (memory, event) = &self.halves[index];
        (memory, event)
    }
}
