//! A session: what a worker's jobs are given, or a thread has for itself.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::WorkerOptions;
use super::batch::Batch;
use super::buffer::{Buffer, View};
use super::checked::crossing;
use super::exec::Batches;
use super::graphs::Graphs;
use super::guard::Guards;
use super::stream::Stream;
use super::transfer::Transfers;
use crate::accelerator::{Accelerator, Queue};
use crate::device::MemoryInfo;
use crate::error::{Error, Result};
use crate::memory::{Memory, MemoryKind, Region};
use crate::pool::{PoolStatistics, Taken};
use crate::sys::BorrowedMemory;

pub(super) type QueueOf<A> = <A as Accelerator>::Queue;
pub(super) type EventOf<A> = <QueueOf<A> as Queue>::Event;

/// A stream of an accelerator with memory, kernels and graphs, for the one thread that gives it commands. A worker's jobs get
/// that of its thread: what they start comes before all that still waits in the worker's queue. [`Session::open`] gives a
/// thread its own, without a worker.
pub struct Session<A: Accelerator> {
    /// Before the queue, which frees the memory that the cancel flags lie in.
    pub(super) guards: RefCell<Option<Guards>>,
    pub(super) stream: Stream<A>,
    pub(super) shared: Arc<Shared<A>>,
    pub(super) transfers: Transfers<A>,
    pub(super) graphs: Graphs<A>,
    pub(super) batches: Batches<A>,
    pub(super) next_kernel: Cell<u64>,
    /// The last position at which a command came, and when that was seen.
    pub(super) last: Cell<(u64, Instant)>,
    /// Whether what the device was given last ended while it was polled for.
    pub(super) eager: Cell<bool>,
    /// Whether this thread is told of the end of what it waits for.
    pub(super) notified: Cell<bool>,
    /// When it slept last.
    pub(super) woken: Cell<Instant>,
    /// Its further streams.
    pub(super) sides: RefCell<Vec<Rc<Self>>>,
    /// Whether it has ended, or ends with the one whose stream it is.
    pub(super) ended: Cell<bool>,
}

impl<A: Accelerator> Session<A> {
    pub(super) fn new(queue: QueueOf<A>, shared: Arc<Shared<A>>) -> Self {
        Self {
            guards: RefCell::new(None),
            stream: Stream::new(queue),
            shared,
            transfers: Transfers::default(),
            graphs: Graphs::default(),
            batches: Batches::default(),
            next_kernel: Cell::new(1),
            last: Cell::new((0, Instant::now())),
            eager: Cell::new(true),
            notified: Cell::new(false),
            woken: Cell::new(Instant::now()),
            sides: RefCell::default(),
            ended: Cell::new(false),
        }
    }

    /// Opens a session for the calling thread, without a worker: each command goes to the device from this thread, in the order
    /// of the calls.
    ///
    /// # Errors
    /// As [`Session::over`]; what [`Accelerator::open`] fails with.
    pub fn open(accelerator: Arc<A>, options: WorkerOptions) -> Result<Self> {
        let queue = accelerator.open(&options.queue)?;
        Self::over(accelerator, queue, options)
    }

    /// A session over a queue that was opened by other means: on a stream that somebody else owns, say.
    ///
    /// # Errors
    /// With a checksum [`Error::Load`], and [`Error::Corrupted`] if not even its table arrives.
    pub fn over(accelerator: Arc<A>, queue: QueueOf<A>, options: WorkerOptions) -> Result<Self> {
        let session = Self::new(queue, Arc::new(Shared::new(accelerator, options, false)));
        session.begin_checks()?;
        Ok(session)
    }

    /// The device.
    pub fn accelerator(&self) -> &Arc<A> {
        &self.shared.accelerator
    }

    /// What the pool holds.
    pub fn statistics(&self) -> PoolStatistics {
        self.shared.pool.statistics()
    }

    /// Somebody else's memory, as a buffer. Dropping the buffer frees nothing.
    pub fn borrow(&self, memory: BorrowedMemory) -> Buffer<A> {
        Buffer::borrowed(memory, &self.shared)
    }

    /// Makes somebody else's memory a buffer, as [`Worker::adopt`](crate::Worker::adopt) does.
    pub fn adopt(&self, memory: BorrowedMemory, keeper: impl Any + Send + Sync) -> Buffer<A> {
        Buffer::adopted(memory, Box::new(keeper), &self.shared)
    }

    /// Gives a buffer back, as dropping it does; registered memory is the host's again when this returns.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]. For registered memory also [`Error::InGraph`] while there is a graph that uses it,
    /// [`Error::Capturing`], [`Error::Deadline`] and the device's: it goes back some time after the last such graph is gone,
    /// or with the session.
    pub fn free(&self, buffer: Buffer<A>) -> Result<()> {
        self.shared.own("buffer", &buffer.shared)?;
        if buffer.kind().is_lent() {
            return self.unregister(buffer);
        }
        drop(buffer);
        Ok(())
    }

    /// A batch of launches for [`Session::launch_batch`], without any yet.
    pub fn batch<'a>(&self) -> Batch<'a, A> {
        Batch::new(Arc::clone(&self.shared))
    }

    /// Launches a batch, as [`Worker::launch_batch`](crate::Worker::launch_batch) does.
    ///
    /// # Errors
    /// [`Error::WrongWorker`], [`Error::OutOfOrder`], [`Error::Capturing`]. What else fails the next wait says.
    pub fn launch_batch(&self, batch: Batch<'_, A>) -> Result<()> {
        self.tend();
        self.launch_steps_now(&batch.into_steps(&self.shared)?)
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::PoolLimit`], [`Error::Capturing`] when the device would have to be asked, or the
    /// pool's memory is zeroed.
    pub fn allocate(&self, bytes: u64) -> Result<Buffer<A>> {
        self.allocate_kind(MemoryKind::Device, bytes)
    }

    /// Allocates memory of a kind.
    ///
    /// # Errors
    /// As [`Session::allocate`]; [`Error::Unsupported`].
    pub fn allocate_kind(&self, kind: MemoryKind, bytes: u64) -> Result<Buffer<A>> {
        self.tend();
        if self.shared.pool.zero() {
            self.may_zero()?;
        }
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

    /// Allocates device memory and sets it to zero, before anything that comes later.
    ///
    /// # Errors
    /// As [`Session::allocate`]; in a capture always [`Error::Capturing`].
    pub fn allocate_zeroed(&self, bytes: u64) -> Result<Buffer<A>> {
        self.may_zero()?;
        let buffer = self.allocate(bytes)?;
        if !self.shared.pool.zero() {
            self.fill(&buffer, 0)?;
        }
        Ok(buffer)
    }

    /// That memory would be zeroed now: a fill that is recorded leaves what was there.
    pub(super) fn may_zero(&self) -> Result<()> {
        self.not_capturing("an allocation of zeroed memory")
    }

    /// Asks the device for what the pool has not got; the pool has counted it.
    pub(super) fn allocate_missed(
        &self,
        kind: MemoryKind,
        size: u64,
        evicted: Vec<Memory>,
    ) -> Result<Memory> {
        let allowed = self.not_capturing("an allocation").and_then(|()| self.not_captured("an allocation"));
        let result = allowed.and_then(|()| {
            self.free_all(evicted);
            match self.note(self.queue().allocate(kind, size)) {
                Err(Error::OutOfMemory { .. }) => {
                    // What the pool keeps may be what is missing.
                    self.trim()?;
                    self.note(self.queue().allocate(kind, size))
                }
                other => other,
            }
        });
        if result.is_err() {
            self.shared.pool.missed(size);
        }
        result
    }

    pub(super) fn free_all(&self, memory: Vec<Memory>) {
        for memory in memory {
            if let Err(error) = self.note(self.queue().free(memory)) {
                tracing::warn!(worker = self.shared.name(), %error, "memory is kept until the worker stops");
            }
        }
    }

    /// Gives registered memory back to the host, now. No command behind the one that runs uses it.
    pub(super) fn unregister(&self, buffer: Buffer<A>) -> Result<()> {
        self.not_capturing("a free")?;
        if self.shared.pool.holds(buffer.address()) {
            // Graphs that were dropped before are gone when the device has done what it was given.
            self.collect();
            self.wait(self.timeout())?;
            if self.shared.pool.holds(buffer.address()) {
                return Err(Error::InGraph);
            }
        }
        let memory = buffer.into_memory();
        self.shared.pool.forget(memory.bytes());
        self.note(self.queue().free(memory))
    }

    /// Makes existing host memory a buffer, as [`Worker::register`](crate::Worker::register) does. [`Session::free`] releases it.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; the device's.
    ///
    /// # Safety
    /// The `bytes` bytes at `host` stay mapped, and no Rust reference to them is live, until [`Session::free`] or
    /// [`Session::close`] has returned without an error.
    #[allow(unsafe_code)]
    pub unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Buffer<A>> {
        // SAFETY: as the caller promises.
        let memory = unsafe { self.register_memory(host, bytes) }?;
        self.shared.pool.adopt(memory.bytes());
        Ok(Buffer::new(memory, bytes, 0, &self.shared))
    }

    /// Registers host memory, for a buffer to be.
    ///
    /// # Safety
    /// As [`Session::register`] asks for, or [`Worker::register`](crate::Worker::register).
    #[allow(unsafe_code)]
    pub(super) unsafe fn register_memory(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        // SAFETY: as the caller promises.
        let registered = unsafe { self.queue().register(host, bytes) };
        self.note(registered)
    }

    /// Sets every byte of a view.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`]; the device's.
    pub fn fill<'a>(&self, target: impl Into<View<'a, A>>, value: u8) -> Result<()> {
        let target = self.region(target.into())?;
        self.fill_region(target, value)
    }

    pub(super) fn fill_region(&self, target: Region<'_>, value: u8) -> Result<()> {
        if target.bytes() == 0 { Ok(()) } else { self.note(self.queue().fill(target, value)) }
    }

    /// Copies one view to another of the same length.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::OutOfOrder`]; the device's. With [`WorkerOptions::checksum`](crate::WorkerOptions)
    /// [`Error::Corrupted`], [`Error::Deadline`] and [`Error::Capturing`] for one between host and device, which it waits for.
    pub fn copy<'a>(&self, target: impl Into<View<'a, A>>, source: impl Into<View<'a, A>>) -> Result<()> {
        let (target, source) = (self.region(target.into())?, self.region(source.into())?);
        self.copy_region(target, source)
    }

    pub(super) fn copy_region(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        if target.bytes() == 0 && source.bytes() == 0 {
            return Ok(());
        }
        if let (Some(checker), Some(direction)) = (self.checker(), crossing(target.kind(), source.kind())) {
            return self.copy_checked(&checker, direction, target, source);
        }
        self.note(self.queue().copy(target, source))
    }

    /// The device's time for what `f` starts.
    ///
    /// # Errors
    /// What `f` returns; as [`Session::synchronize`].
    pub fn timed(&self, deadline: Instant, f: impl FnOnce(&Self) -> Result<()>) -> Result<Duration> {
        self.not_capturing("a measurement")?;
        let (from, to) = (self.note(self.queue().event(true))?, self.note(self.queue().event(true))?);
        self.note(self.queue().record(&from))?;
        f(self)?;
        self.note(self.queue().record(&to))?;
        self.note(self.queue().wait(&to, deadline))?;
        self.note(self.queue().elapsed(&from, &to))
    }

    /// How full the device's memory is.
    ///
    /// # Errors
    /// The device's.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.note(self.queue().memory())
    }

    /// Gives the pool's free memory back to the device.
    ///
    /// # Errors
    /// The device's; [`Error::Deadline`]; [`Error::Capturing`].
    pub fn trim(&self) -> Result<()> {
        self.wait(self.timeout())?;
        self.free_all(self.shared.pool.drain(self.shared.executor.position()));
        // The frees are in the stream too: the pool has the memory when they have run.
        self.wait(self.timeout())?;
        self.note(self.queue().trim(0))
    }

    pub(super) fn timeout(&self) -> Instant {
        self.shared.options.queue.deadline()
    }

    /// A view's region, if the running command may use it.
    pub(super) fn region(&self, view: View<'_, A>) -> Result<Region<'static>> {
        self.shared.own("buffer", view.shared())?;
        if view.ready() > self.shared.executor.position() {
            return Err(Error::OutOfOrder);
        }
        if matches!(view.region().kind(), MemoryKind::External | MemoryKind::Surface) {
            // A replay would come when it is graphics' turn.
            self.not_capturing("the use of a resource of graphics")?;
        }
        if let Some(uses) = self.graphs.capture.borrow_mut().as_mut()
            && !uses.memory.contains(&view.base())
        {
            uses.memory.push(view.base());
            self.shared.pool.hold(view.base());
        }
        Ok(view.region())
    }

    pub(super) fn not_capturing(&self, what: &'static str) -> Result<()> {
        if self.graphs.capture.borrow().is_some() { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// That the stream's owner, if it has one, records nothing that would run again without this session.
    pub(super) fn not_captured(&self, what: &'static str) -> Result<()> {
        if self.note(self.queue().is_captured())? { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// Remembers a lost context.
    pub(super) fn note<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_lost()
        {
            self.shared.set_lost(error);
        }
        result
    }

    /// Reports the failure of something that nobody waits for.
    pub(super) fn log(&self, result: Result<()>) {
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
