//! The worker's side: what a job is given.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::batch::Steps;
use super::brand::Brand;
use super::buffer::{Buffer, View};
use super::chain::Chains;
use super::checked::{Checker, crossing};
use super::guard::{Guarded, Guards};
use super::idle::Pending;
use super::launch::{Recorded, Uses};
use super::transfer::Staging;
use crate::accelerator::{Accelerator, Queue};
use crate::device::MemoryInfo;
use crate::error::{Error, Result};
use crate::memory::{Memory, MemoryKind, Region};
use crate::pool::Taken;

pub(super) type QueueOf<A> = <A as Accelerator>::Queue;
pub(super) type EventOf<A> = <QueueOf<A> as Queue>::Event;

/// What a job on the worker's thread works with. What it starts comes before all that still waits in the queue.
pub struct Session<A: Accelerator, B: Brand> {
    /// Before the queue, which frees the memory that the stop words lie in.
    pub(super) guards: RefCell<Option<Guards>>,
    /// Commands go by way of [`Session::queue`], which keeps their order.
    pub(super) queue: QueueOf<A>,
    pub(super) shared: Arc<Shared<A, B>>,
    pub(super) staging: RefCell<Option<Rc<Staging<A>>>>,
    pub(super) checker: RefCell<Option<Rc<Checker<A>>>>,
    pub(super) pending: RefCell<VecDeque<Pending<A>>>,
    /// How many of those have ended so far.
    pub(super) ends: Cell<u64>,
    pub(super) events: RefCell<Vec<Rc<EventOf<A>>>>,
    pub(super) graphs: RefCell<HashMap<u64, Recorded<A, B>>>,
    pub(super) capture: RefCell<Option<Uses<A, B>>>,
    pub(super) next_graph: Cell<u64>,
    pub(super) next_kernel: Cell<u64>,
    /// Launches that were not given to the queue yet, because more come.
    pub(super) gathered: RefCell<Steps<A, B>>,
    /// Of batches that came before.
    pub(super) chains: RefCell<Chains<A>>,
    /// Room for those of a batch.
    pub(super) stop_words: RefCell<Vec<Option<Guarded>>>,
    /// The last position at which a command came, and when that was seen.
    pub(super) last: Cell<(u64, Instant)>,
}

impl<A: Accelerator, B: Brand> Session<A, B> {
    pub(super) fn new(queue: QueueOf<A>, shared: Arc<Shared<A, B>>) -> Self {
        Self {
            guards: RefCell::new(None),
            queue,
            shared,
            staging: RefCell::new(None),
            checker: RefCell::new(None),
            pending: RefCell::default(),
            ends: Cell::new(0),
            events: RefCell::default(),
            graphs: RefCell::default(),
            capture: RefCell::new(None),
            next_graph: Cell::new(1),
            next_kernel: Cell::new(1),
            gathered: RefCell::new(Steps::new()),
            chains: RefCell::default(),
            stop_words: RefCell::default(),
            last: Cell::new((0, Instant::now())),
        }
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::PoolLimit`], [`Error::Capturing`] when the device would have to be asked, or the
    /// pool's memory is zeroed.
    pub fn allocate(&self, bytes: u64) -> Result<Buffer<A, B>> {
        self.allocate_kind(MemoryKind::Device, bytes)
    }

    /// Allocates memory of a kind.
    ///
    /// # Errors
    /// As [`Session::allocate`]; [`Error::Unsupported`].
    pub fn allocate_kind(&self, kind: MemoryKind, bytes: u64) -> Result<Buffer<A, B>> {
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
        let result = self.not_capturing("an allocation").and_then(|()| {
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
    pub(super) fn unregister(&self, buffer: Buffer<A, B>) -> Result<()> {
        self.not_capturing("a free")?;
        if self.shared.pool.holds(buffer.address()) {
            // Graphs that were dropped before are gone when the device has done what it was given.
            self.collect();
            self.synchronize(self.timeout())?;
            if self.shared.pool.holds(buffer.address()) {
                return Err(Error::InGraph);
            }
        }
        let memory = buffer.into_memory();
        self.shared.pool.forget(memory.bytes());
        self.note(self.queue().free(memory))
    }

    /// Registers host memory. See [`Worker::register`](crate::Worker::register).
    #[allow(unsafe_code)]
    pub(super) fn register(&self, host: usize, bytes: u64) -> Result<Memory> {
        // SAFETY: the caller of `Worker::register` promised what is asked for here.
        let registered = unsafe { self.queue().register(host as *mut u8, bytes) };
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
        if target.bytes() == 0 { Ok(()) } else { self.note(self.queue().fill(target, value)) }
    }

    /// Copies one view to another of the same length.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::OutOfOrder`]; the device's. With [`WorkerOptions::checksum`](crate::WorkerOptions)
    /// [`Error::Corrupted`], [`Error::Deadline`] and [`Error::Capturing`] for one between host and device, which it waits for.
    pub fn copy<'a>(
        &self,
        target: impl Into<View<'a, A, B>>,
        source: impl Into<View<'a, A, B>>,
    ) -> Result<()> {
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

    /// Waits for the device to finish all that this worker has started.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Deadline`], [`Error::Capturing`].
    pub fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.not_capturing("a wait")?;
        let event = self.event()?;
        let done = self
            .note(self.queue().record(&event))
            .and_then(|()| self.note(self.queue().wait(&event, deadline)));
        if done.is_ok() {
            self.reuse(event);
            self.look();
        }
        done
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
        self.synchronize(self.timeout())?;
        self.free_all(self.shared.pool.drain(self.shared.executor.position()));
        // The frees are in the stream too: the pool has the memory when they have run.
        self.synchronize(self.timeout())?;
        self.note(self.queue().trim(0))
    }

    /// The queue, for what this session has no words for. Commands to it are not checked against captures and buffers
    /// of other workers.
    pub fn queue(&self) -> &QueueOf<A> {
        // It works in order, so what was gathered comes first.
        self.flush();
        &self.queue
    }

    pub(super) fn timeout(&self) -> Instant {
        self.shared.options.queue.deadline()
    }

    pub(super) fn event(&self) -> Result<Rc<EventOf<A>>> {
        let event = self.events.borrow_mut().pop();
        event.map_or_else(|| self.note(self.queue().event(false)).map(Rc::new), Ok)
    }

    /// Keeps an event that is done for the next that wants one, unless a chain has it.
    pub(super) fn reuse(&self, event: Rc<EventOf<A>>) {
        if Rc::strong_count(&event) == 1 {
            self.events.borrow_mut().push(event);
        }
    }

    /// A view's region, if the running command may use it.
    pub(super) fn region(&self, view: View<'_, A, B>) -> Result<Region<'static>> {
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

    pub(super) fn not_capturing(&self, what: &'static str) -> Result<()> {
        if self.capture.borrow().is_some() { Err(Error::Capturing { what }) } else { Ok(()) }
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
