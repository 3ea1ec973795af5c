//! The GPU worker: one thread that owns one queue.

mod batch;
mod buffer;
mod checked;
mod current;
mod end;
mod exec;
mod give;
mod graphs;
mod guard;
mod guarded;
mod hash;
mod idle;
mod launch;
mod link;
mod raw;
mod resource;
mod session;
mod stream;
mod streams;
mod transfer;
mod typed;
mod watch;

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytemuck::Pod;

pub use batch::Batch;
pub use buffer::{Argument, Buffer, Graph, Kernel, Shaped, View};
pub use link::Link;
pub use resource::{Mapped, Refused as RefusedResource, Registered, Shareable};
pub use session::Session;
pub use streams::{Event, Scope, ScopedStream};
pub use typed::{ElementType, TypedBuffer};

use end::{End, Ending};

use crate::accelerator::{Accelerator, Queue};
use crate::checksum::{Checksum, ChecksumStatistics, Counters};
use crate::device::{MemoryInfo, QueueOptions, deadline};
use crate::error::{Error, Result};
use crate::executor::job::{Cell, Completer, Job};
use crate::executor::{Executor, Refused, guarded};
use crate::launch::Limits;
use crate::memory::{Memory, MemoryKind};
use crate::pool::{Pool, PoolOptions, PoolStatistics, Taken};
use crate::sys::BorrowedMemory;

/// How a worker is started, or a session opened, for which `capacity` and `spin` mean nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerOptions {
    /// The thread's name; the first 15 bytes show in `ps -L`.
    pub name: String,
    /// How many commands may wait.
    pub capacity: usize,
    /// How long the thread polls for new commands before it sleeps. Waking it costs the caller some microseconds.
    pub spin: Duration,
    /// How the queue is opened. Its timeout is also how long callers wait for room in the queue.
    pub queue: QueueOptions,
    /// How the pool gives memory.
    pub pool: PoolOptions,
    /// What guarded launches may take that are given no limits of their own.
    pub limits: Limits,
    /// How copies between the host and the device are checked; `None` if they are not.
    pub checksum: Option<Checksum>,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            name: "gpu-worker".into(),
            capacity: 512,
            spin: Duration::from_micros(20),
            queue: QueueOptions::default(),
            pool: PoolOptions::default(),
            limits: Limits::default(),
            checksum: None,
        }
    }
}

/// What callers dropped, for the worker to remove.
enum DeferredFree<A: Accelerator> {
    /// With its number.
    Kernel(u64, <A::Queue as Queue>::Kernel),
    Memory(Memory),
    Graph(u64),
    Keeper(Keeper),
}

/// What keeps memory that was adopted, until it is dropped.
type Keeper = Box<dyn Any + Send + Sync>;

/// What the worker's thread and all that belongs to it share.
struct Shared<A: Accelerator> {
    id: u64,
    accelerator: Arc<A>,
    executor: Executor<Session<A>>,
    pool: Pool,
    options: WorkerOptions,
    lost: OnceLock<Error>,
    deferred: Mutex<Option<Error>>,
    checks: Counters,
    /// Whether a worker's thread gives the queue its commands, and not the caller's.
    threaded: bool,
    /// With the position that the running command must have reached.
    frees: Mutex<Vec<(u64, DeferredFree<A>)>>,
    has_frees: AtomicBool,
    /// Set when it is not known that the device has finished: what it may still use is left to the end of the process.
    stuck: AtomicBool,
    /// Where graphics takes turns with this.
    links: Mutex<Vec<Weak<link::Turns<A>>>>,
    held: Mutex<resource::Held>,
    /// Set when the queue is gone, and the device uses nothing any more.
    ended: AtomicBool,
}

impl<A: Accelerator> Shared<A> {
    fn new(accelerator: Arc<A>, options: WorkerOptions, threaded: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            accelerator,
            executor: Executor::new(if threaded { options.capacity } else { 1 }),
            pool: Pool::new(options.pool),
            lost: OnceLock::new(),
            deferred: Mutex::new(None),
            checks: Counters::default(),
            threaded,
            frees: Mutex::new(Vec::new()),
            has_frees: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            links: Mutex::default(),
            held: Mutex::default(),
            ended: AtomicBool::new(false),
            options,
        }
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn name(&self) -> &str {
        &self.options.name
    }

    /// Whether the queue is gone, and the device uses nothing any more.
    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn alive(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn set_lost(&self, error: &Error) {
        if self.lost.set(error.clone()).is_ok() {
            tracing::error!(worker = self.name(), %error, "the context is lost");
        }
    }

    fn defer(&self, error: Error) {
        tracing::warn!(worker = self.name(), %error, "a queued command failed");
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn take_deferred(&self) -> Result<()> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn give(&self, memory: Memory) {
        if let Some(memory) = self.pool.give(memory, self.executor.tail()) {
            self.discard(DeferredFree::Memory(memory));
        }
    }

    fn discard(&self, freed: DeferredFree<A>) {
        if self.stuck.load(Ordering::Acquire) {
            return std::mem::forget(freed);
        }
        let position = self.executor.tail();
        self.frees.lock().unwrap_or_else(PoisonError::into_inner).push((position, freed));
        self.has_frees.store(true, Ordering::Release);
        if self.threaded && !current::is(self.id) {
            // The worker may sleep; a full queue means that it does not.
            let _ = self.executor.push(|_| ());
        }
    }

    fn take_frees(&self, position: u64) -> Vec<DeferredFree<A>> {
        if !self.has_frees.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        let mut frees = self.frees.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = frees.extract_if(.., |(ready, _)| *ready <= position).map(|(_, freed)| freed).collect();
        if !frees.is_empty() {
            self.has_frees.store(true, Ordering::Release);
        }
        taken
    }
}

/// One thread that owns one queue of an accelerator. Clones are the same worker.
///
/// Jobs and commands run one after another in the order in which they were given, whichever thread gave them. On the
/// worker's own thread, in a job, they run at once, inline.
///
/// [`Worker::launch`], [`Worker::copy`] and [`Worker::fill`] return as soon as the command is queued; what is wrong
/// with their arguments they say at once, what fails later the next [`Worker::synchronize`] or [`Worker::fence`] says.
///
/// When the last clone is dropped, the worker ends by itself once all commands have run; [`Worker::stop`] also waits.
pub struct Worker<A: Accelerator>(Arc<Owner<A>>);

struct Owner<A: Accelerator> {
    shared: Arc<Shared<A>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    end: Arc<End>,
}

impl<A: Accelerator> Drop for Owner<A> {
    fn drop(&mut self) {
        self.shared.executor.close();
    }
}

impl<A: Accelerator> Clone for Worker<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Accelerator> fmt::Debug for Worker<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("name", &self.0.shared.options.name)
            .field("device", &self.0.shared.accelerator.info().name)
            .field("pool", &self.statistics())
            .field("lost", &self.0.shared.lost.get())
            .finish_non_exhaustive()
    }
}

impl<A: Accelerator> Worker<A> {
    /// Starts a worker on a device.
    ///
    /// # Errors
    /// What [`Accelerator::open`] fails with; [`Error::Deadline`] when it takes longer than the
    /// options' timeout; with a checksum [`Error::Load`], and [`Error::Corrupted`] if not even its table arrives.
    pub fn start(accelerator: Arc<A>, options: WorkerOptions) -> Result<Self> {
        let shared = Arc::new(Shared::new(accelerator, options, true));
        let started = Arc::new(Cell::new());
        let end = Arc::new(End::default());
        let (opened, finished) = (Completer(Arc::clone(&started)), Ending(Arc::clone(&end)));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(shared.name().to_owned())
            .spawn(move || serve(theirs, opened, finished))
            .map_err(|error| Error::Host {
                what: "starting the worker's thread",
                cause: error.to_string(),
            })?;
        let owner = Owner { shared, thread: Mutex::new(Some(thread)), end };
        let deadline = owner.deadline();
        started
            .wait(Some(deadline))
            .unwrap_or_else(|| Err(Error::Deadline { what: "the opening of the device".into() }))?;
        Ok(Self(Arc::new(owner)))
    }

    /// The device.
    pub fn accelerator(&self) -> &Arc<A> {
        &self.0.shared.accelerator
    }

    /// How it was started.
    pub fn options(&self) -> &WorkerOptions {
        &self.0.shared.options
    }

    /// Runs `f` on the worker's thread; the result is a future.
    ///
    /// On the worker's own thread it runs at once.
    ///
    /// # Errors
    /// [`Error::QueueFull`] at once when there is no room, [`Error::Stopped`], [`Error::Lost`]. The future also ends
    /// with what `f` returns, [`Error::Panicked`] or [`Error::Cancelled`].
    pub fn submit<F, R>(&self, f: F) -> Result<Job<R>>
    where
        F: FnOnce(&Session<A>) -> Result<R> + Send + 'static,
        R: Send + 'static,
    {
        let shared = &self.0.shared;
        shared.alive()?;
        let mut f = Some(f);
        let inline = current::with(shared, |session| {
            let cell = Arc::new(Cell::new());
            if let Some(f) = f.take()
                && cell.start()
            {
                cell.complete(guarded(|| f(session)));
            }
            Job(cell)
        });
        match (inline, f) {
            (Some(job), _) => Ok(job),
            (None, Some(f)) => shared.executor.submit(f),
            (None, None) => Err(Error::Stopped),
        }
    }

    /// Runs `f` on the worker's thread and waits for its result. `f` may borrow from the caller: this returns when `f`
    /// has ended, or has been taken back because it had not started by `deadline`.
    ///
    /// On the worker's own thread it runs at once.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Deadline`], [`Error::QueueFull`], [`Error::Stopped`], [`Error::Panicked`],
    /// [`Error::Lost`].
    pub fn submit_and_wait<'a, F, R>(&self, deadline: Instant, f: F) -> Result<R>
    where
        F: FnOnce(&Session<A>) -> Result<R> + Send + 'a,
        R: Send + 'a,
    {
        let shared = &self.0.shared;
        shared.alive()?;
        if current::is(shared.id) {
            let inline = current::with(shared, |session| guarded(|| f(session)));
            return inline.unwrap_or(Err(Error::Stopped));
        }
        shared.executor.submit_and_wait(deadline, f)
    }

    /// Allocates device memory: from what was freed, or else from the device.
    ///
    /// The content is zero if the pool's options say so, else whatever was there.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::PoolLimit`], [`Error::Stopped`], [`Error::Lost`].
    pub fn allocate(&self, bytes: u64) -> Result<Buffer<A>> {
        self.allocate_kind(MemoryKind::Device, bytes)
    }

    /// Allocates device memory and sets it to zero, before anything that comes later.
    ///
    /// # Errors
    /// As [`Worker::allocate`]; in a capture always [`Error::Capturing`].
    pub fn allocate_zeroed(&self, bytes: u64) -> Result<Buffer<A>> {
        current::with(&self.0.shared, Session::may_zero).unwrap_or(Ok(()))?;
        let buffer = self.allocate(bytes)?;
        if !self.0.shared.pool.zero() {
            self.fill(&buffer, 0)?;
        }
        Ok(buffer)
    }

    /// Allocates memory of a kind.
    ///
    /// # Errors
    /// As [`Worker::allocate`]; [`Error::Unsupported`].
    pub fn allocate_kind(&self, kind: MemoryKind, bytes: u64) -> Result<Buffer<A>> {
        let shared = &self.0.shared;
        shared.alive()?;
        if let Some(buffer) = current::with(shared, |session| session.allocate_kind(kind, bytes)) {
            return buffer;
        }
        let buffer = match shared.pool.take(kind, bytes, None)? {
            Taken::Hit(memory, ready) => Buffer::new(memory, bytes, ready, shared),
            Taken::Miss(size, evicted) => {
                let mut asked = false;
                let memory = shared.executor.submit_and_wait(self.0.deadline(), |session| {
                    asked = true;
                    session.allocate_missed(kind, size, evicted)
                });
                if !asked {
                    shared.pool.missed(size);
                }
                Buffer::new(memory?, bytes, 0, shared)
            }
        };
        if shared.pool.zero() {
            self.fill(&buffer, 0)?;
        }
        Ok(buffer)
    }

    /// Makes existing host memory a buffer of kind [`MemoryKind::Registered`], which the device reads and writes in
    /// place. [`Worker::free`] releases it and says when that is done.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; the device's.
    ///
    /// # Safety
    /// The `bytes` bytes at `host` stay mapped, and no Rust reference to them is live, until [`Worker::free`] or
    /// [`Worker::stop`] has returned without an error.
    #[allow(unsafe_code)]
    pub unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Buffer<A>> {
        let host = host as usize;
        let memory = self.submit_and_wait(self.0.deadline(), |session| {
            // SAFETY: as the caller promises.
            unsafe { session.register_memory(host as *mut u8, bytes) }
        })?;
        self.0.shared.pool.adopt(memory.bytes());
        Ok(Buffer::new(memory, bytes, 0, &self.0.shared))
    }

    /// Makes somebody else's memory a buffer. `keeper` keeps it there, and is dropped once the buffer was and the commands
    /// before that have run: on the worker's thread, which must not be kept waiting, or on any when the worker has ended.
    pub fn adopt(&self, memory: BorrowedMemory, keeper: impl Any + Send + Sync) -> Buffer<A> {
        Buffer::adopted(memory, Box::new(keeper), &self.0.shared)
    }

    /// Gives a buffer back, as dropping it does; for registered memory it also waits until the host has it back.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]. For registered memory also [`Error::InGraph`] while there is a graph that uses it, which
    /// may be replayed; on the worker's own thread [`Error::OutOfOrder`] if commands are queued behind the job;
    /// [`Error::Capturing`], [`Error::Deadline`], [`Error::Stopped`] and the device's. The buffer is then dropped: the
    /// memory goes back some time after the last graph that uses it is gone, and [`Worker::stop`] says for sure.
    pub fn free(&self, buffer: Buffer<A>) -> Result<()> {
        let shared = &self.0.shared;
        shared.own("buffer", &buffer.shared)?;
        if buffer.kind().is_lent() {
            // A job comes before what others queued while it ran, and the buffer may have been theirs.
            if current::is(shared.id) && !shared.executor.runs_the_last() {
                return Err(Error::OutOfOrder);
            }
            return self.submit_and_wait(self.0.deadline(), move |session| session.unregister(buffer));
        }
        drop(buffer);
        Ok(())
    }

    /// Sets every byte of a view.
    ///
    /// # Errors
    /// [`Error::WrongWorker`], [`Error::QueueFull`], [`Error::Stopped`], [`Error::Lost`].
    pub fn fill<'a>(&self, target: impl Into<View<'a, A>>, value: u8) -> Result<()> {
        let (shared, target) = (&self.0.shared, target.into());
        shared.own("buffer", target.shared())?;
        if let Some(done) = current::with(shared, |session| session.fill(target, value)) {
            return done;
        }
        let target = target.region();
        self.command(move |session| session.fill_region(target, value))
    }

    /// Copies one view to another of the same length.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::WrongWorker`], [`Error::QueueFull`], [`Error::Stopped`], [`Error::Lost`]. With
    /// [`WorkerOptions::checksum`] the next wait also says [`Error::Corrupted`].
    pub fn copy<'a>(&self, target: impl Into<View<'a, A>>, source: impl Into<View<'a, A>>) -> Result<()> {
        let (shared, target, source) = (&self.0.shared, target.into(), source.into());
        shared.own("buffer", target.shared())?;
        shared.own("buffer", source.shared())?;
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        if let Some(done) = current::with(shared, |session| session.copy(target, source)) {
            return done;
        }
        let (target, source) = (target.region(), source.region());
        self.command(move |session| session.copy_region(target, source))
    }

    /// Copies host values into a view of the same length.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::WrongWorker`], [`Error::Deadline`], [`Error::Stopped`]; [`Error::Corrupted`] with
    /// [`WorkerOptions::checksum`]; the device's.
    pub fn write<'a, T: Pod>(&self, target: impl Into<View<'a, A>>, values: &[T]) -> Result<()> {
        let target = target.into();
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.submit_and_wait(self.0.deadline(), |session| session.write(target, bytes))
    }

    /// Copies a view into host values of the same length, after the work so far.
    ///
    /// # Errors
    /// As [`Worker::write`], and what an earlier queued command failed with.
    pub fn read<'a, T: Pod>(&self, source: impl Into<View<'a, A>>, values: &mut [T]) -> Result<()> {
        let source = source.into();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        self.submit_and_wait(self.0.deadline(), |session| session.read(source, bytes))?;
        self.0.shared.take_deferred()
    }

    /// A future that ends when the device has done all that was given so far.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::Stopped`], [`Error::Lost`]; the future ends with the first error of a queued
    /// command since the last wait.
    pub fn fence(&self) -> Result<Job<()>> {
        let cell = Arc::new(Cell::new());
        // From here on there is nothing to cancel.
        cell.start();
        let completer = Completer(Arc::clone(&cell));
        let shared = &self.0.shared;
        shared.alive()?;
        if current::is(shared.id) {
            current::with(shared, |session| session.fence(completer));
        } else {
            shared.executor.push_by(move |session| session.fence(completer), self.0.deadline())?;
        }
        Ok(Job(cell))
    }

    /// Waits until the device has done all that was given so far.
    ///
    /// # Errors
    /// The first error of a queued command since the last wait; [`Error::Deadline`], [`Error::Stopped`],
    /// [`Error::Lost`].
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let deadline = deadline(timeout);
        if let Some(done) = current::with(&self.0.shared, |session| session.synchronize(deadline)) {
            return done.and_then(|()| self.0.shared.take_deferred());
        }
        self.fence()?.wait(deadline)
    }

    /// How full the device's memory is.
    ///
    /// # Errors
    /// [`Error::Stopped`]; the device's.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.submit_and_wait(self.0.deadline(), Session::memory)
    }

    /// Waits for the device, then releases the pool's free memory to it.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Stopped`]; the device's.
    pub fn trim(&self) -> Result<()> {
        self.submit_and_wait(self.0.deadline(), Session::trim)
    }

    /// What the pool holds.
    pub fn statistics(&self) -> PoolStatistics {
        self.0.shared.pool.statistics()
    }

    /// What the checks of copies came to so far, with [`WorkerOptions::checksum`].
    pub fn checksum_statistics(&self) -> ChecksumStatistics {
        self.0.shared.checks.statistics()
    }

    /// Takes no more commands, lets those already given run, and waits for the thread to end. Who calls it again, or at
    /// the same time on another clone, waits for the same end.
    ///
    /// # Errors
    /// The first error of a queued command since the last wait; [`Error::Lost`]; [`Error::Deadline`] when the thread
    /// has not ended in time: then it ends by itself later; or when the device has not ended its work in the options'
    /// timeout, which every later call says too. On the worker's own thread, which can't wait for itself, always
    /// [`Error::Deadline`].
    pub fn stop(&self, timeout: Duration) -> Result<()> {
        self.0.shared.executor.close();
        let late = Error::Deadline { what: format!("the end of the worker {}", self.0.shared.name()) };
        if current::is(self.0.shared.id) {
            return Err(late);
        }
        let ended = self.0.end.wait(deadline(timeout)).ok_or(late)?;
        // There is nothing behind what was waited for that could block.
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        thread.map_or(Ok(()), JoinHandle::join).map_err(Error::from_panic)?;
        ended.and_then(|()| self.0.shared.take_deferred())
    }

    /// Queues a command that nobody waits for.
    fn command(&self, command: impl FnOnce(&Session<A>) -> Result<()> + Send + 'static) -> Result<()> {
        let shared = &self.0.shared;
        shared.alive()?;
        match shared.executor.push(move |session| session.defer(command(session))) {
            Ok(_) => Ok(()),
            Err((_, Refused::Closed)) => Err(Error::Stopped),
            Err((command, Refused::Full)) => shared.executor.push_by(command, self.0.deadline()).map(drop),
        }
    }
}

impl<A: Accelerator> Owner<A> {
    fn deadline(&self) -> Instant {
        self.shared.options.queue.deadline()
    }
}

/// The worker's thread.
fn serve<A: Accelerator>(shared: Arc<Shared<A>>, opened: Completer<()>, finished: Ending) {
    let queue = match guarded(|| shared.accelerator.open(&shared.options.queue)) {
        Ok(queue) => queue,
        Err(error) => {
            shared.executor.close();
            return opened.complete(Err(error));
        }
    };
    let session = Session::new(queue, Arc::clone(&shared));
    if let Err(error) = guarded(|| session.begin_checks()) {
        shared.executor.close();
        return opened.complete(Err(error));
    }
    opened.complete(Ok(()));
    current::enter(shared.id, &session, || {
        // A job's panic is caught where the job runs; this one is an accelerator's, in a command that nobody waits for.
        while let Err(error) = guarded(|| {
            shared.executor.run(&session, || session.idle());
            Ok(())
        }) {
            shared.defer(error);
        }
    });
    let ended = guarded(|| session.close());
    if !shared.stuck.load(Ordering::Acquire) {
        // A link that was made meanwhile sees this, or is seen.
        shared.ended.store(true, Ordering::Release);
        // A lost device left there what waited for it.
        let _ = guarded(|| {
            shared.take_frees(u64::MAX).clear();
            Ok(())
        });
    }
    shared.end_links();
    drop(shared);
    finished.complete(ended);
}
