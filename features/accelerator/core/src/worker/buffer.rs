//! What callers hold: buffers, views of them, kernels and graphs.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use vm_abi::Element;

use super::{DeferredFree, Keeper, Shared};
use crate::accelerator::Accelerator;
use crate::artifact::Layout;
use crate::error::{Error, Result};
use crate::extents::Extents;
use crate::launch::Scalar;
use crate::memory::{Memory, MemoryKind, Region};
use crate::sys::BorrowedMemory;

/// Memory of one worker or session. Dropping it releases the memory to the pool, which neither waits nor fails; what was
/// borrowed stays with its owner, and the owner of what was adopted is dropped once the commands before have run.
pub struct Buffer<A: Accelerator> {
    memory: ManuallyDrop<Memory>,
    bytes: u64,
    /// The position from which commands may use it.
    ready: u64,
    lender: Lender,
    pub(super) shared: Arc<Shared<A>>,
}

/// Whose a buffer's memory is.
enum Lender {
    Pool,
    /// Somebody's who keeps it for as long as it takes.
    Borrowed,
    /// Somebody's who keeps it until this is dropped.
    Adopted(Keeper),
}

impl<A: Accelerator> Buffer<A> {
    pub(super) fn new(memory: Memory, bytes: u64, ready: u64, shared: &Arc<Shared<A>>) -> Self {
        let shared = Arc::clone(shared);
        Self { memory: ManuallyDrop::new(memory), bytes, ready, lender: Lender::Pool, shared }
    }

    pub(super) fn borrowed(memory: BorrowedMemory, shared: &Arc<Shared<A>>) -> Self {
        let memory = memory.into_memory();
        let bytes = memory.bytes();
        let mut this = Self::new(memory, bytes, 0, shared);
        this.lender = Lender::Borrowed;
        this
    }

    pub(super) fn adopted(memory: BorrowedMemory, keeper: Keeper, shared: &Arc<Shared<A>>) -> Self {
        let mut this = Self::borrowed(memory, shared);
        this.lender = Lender::Adopted(keeper);
        this
    }

    /// The length in bytes, as asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it lies, and who can reach it.
    pub fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }

    /// The device's address, for printing and for interfaces that want a number. It says nothing about how long the
    /// memory is there.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The host's address, where it can reach the memory, for interfaces that want a number: as [`Buffer::address`].
    pub fn host_address(&self) -> Option<u64> {
        Some(self.memory.host_address()).filter(|address| *address != 0)
    }

    /// The part of `bytes` bytes from `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn view(&self, offset: u64, bytes: u64) -> Result<View<'_, A>> {
        let region = View::from(self).region.slice(offset, bytes)?;
        Ok(View { region, element: None, buffer: self })
    }

    /// All of it, as a kernel is to see it: extents in elements, slowest dimension first, one row behind the other.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn shaped(&self, extents: &[u64]) -> Result<Shaped<'_, A>> {
        View::from(self).shaped(extents)
    }

    /// All of it, as a kernel is to see it: extents in elements, and for each dimension but the last the bytes from one
    /// of its elements to the next.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn strided(&self, extents: &[u64], strides: &[u64]) -> Result<Shaped<'_, A>> {
        View::from(self).strided(extents, strides)
    }

    /// Takes the memory out, without releasing it to the pool.
    #[allow(unsafe_code)]
    pub(super) fn into_memory(self) -> Memory {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the memory is taken once.
        let memory = unsafe { ManuallyDrop::take(&mut this.memory) };
        // SAFETY: as above, for the reference count.
        drop(unsafe { std::ptr::read(&this.shared) });
        memory
    }
}

impl<A: Accelerator> Drop for Buffer<A> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the buffer is being dropped, so nobody uses the field again.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        match std::mem::replace(&mut self.lender, Lender::Borrowed) {
            Lender::Pool => self.shared.give(memory),
            Lender::Borrowed => (),
            Lender::Adopted(keeper) => self.shared.discard(DeferredFree::Keeper(keeper)),
        }
    }
}

impl<A: Accelerator> fmt::Debug for Buffer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("kind", &self.kind())
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A part of a [`Buffer`]; a reference to a buffer is a view of all of it.
pub struct View<'a, A: Accelerator> {
    region: Region<'static>,
    /// What its elements are said to be.
    element: Option<Element>,
    buffer: &'a Buffer<A>,
}

impl<A: Accelerator> Clone for View<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Accelerator> Copy for View<'_, A> {}

impl<'a, A: Accelerator> From<&'a Buffer<A>> for View<'a, A> {
    fn from(buffer: &'a Buffer<A>) -> Self {
        let region = buffer.memory.detached();
        // A buffer is never longer than its memory.
        Self { region: region.slice(0, buffer.bytes).unwrap_or(region), element: None, buffer }
    }
}

impl<'a, A: Accelerator> View<'a, A> {
    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    /// The view of such elements: a launch is refused if its parameter's are others. Without this any will do.
    pub fn of(self, element: Element) -> Self {
        Self { element: Some(element), ..self }
    }

    /// The view as a kernel is to see it: extents in elements, slowest dimension first, one row behind the other.
    ///
    /// Whether they fit the kernel and lie in the view is checked when they are given to a launch.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn shaped(self, extents: &[u64]) -> Result<Shaped<'a, A>> {
        Ok(Shaped { view: self, extents: Extents::packed(extents)? })
    }

    /// The view as a kernel is to see it: extents in elements, and for each dimension but the last the bytes from one
    /// of its elements to the next.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn strided(self, extents: &[u64], strides: &[u64]) -> Result<Shaped<'a, A>> {
        Ok(Shaped { view: self, extents: Extents::strided(extents, strides)? })
    }

    /// What its elements are said to be.
    pub(super) fn element(&self) -> Option<Element> {
        self.element
    }

    /// The region, for a command that the caller pushes while it borrows the buffer.
    pub(super) fn region(&self) -> Region<'static> {
        self.region
    }

    pub(super) fn shared(&self) -> &'a Arc<Shared<A>> {
        &self.buffer.shared
    }

    /// The start of the memory that the view lies in.
    pub(super) fn base(&self) -> u64 {
        self.buffer.address()
    }

    /// The position from which commands may use it.
    pub(super) fn ready(&self) -> u64 {
        self.buffer.ready
    }
}

impl<A: Accelerator> fmt::Debug for View<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("region", &self.region).finish_non_exhaustive()
    }
}

/// A [`View`] with extents, for a kernel. A view that was given none is all that its bytes hold: see
/// [`Extents::WHOLE`].
pub struct Shaped<'a, A: Accelerator> {
    pub(super) view: View<'a, A>,
    pub(super) extents: Extents,
}

impl<A: Accelerator> Clone for Shaped<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Accelerator> Copy for Shaped<'_, A> {}

impl<A: Accelerator> fmt::Debug for Shaped<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shaped").field("view", &self.view).field("extents", &self.extents).finish()
    }
}

/// One argument of a launch. [`arguments!`](crate::arguments) makes a list of them.
#[derive(Debug)]
pub enum Argument<'a, A: Accelerator> {
    /// For a parameter that is a view.
    View(Shaped<'a, A>),
    /// For a parameter that is a number.
    Scalar(Scalar),
}

impl<A: Accelerator> Clone for Argument<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Accelerator> Copy for Argument<'_, A> {}

impl<'a, A: Accelerator> From<&'a Buffer<A>> for Argument<'a, A> {
    fn from(buffer: &'a Buffer<A>) -> Self {
        View::from(buffer).into()
    }
}

impl<'a, A: Accelerator> From<View<'a, A>> for Argument<'a, A> {
    fn from(view: View<'a, A>) -> Self {
        Self::View(Shaped { view, extents: Extents::WHOLE })
    }
}

impl<'a, A: Accelerator> From<Shaped<'a, A>> for Argument<'a, A> {
    fn from(view: Shaped<'a, A>) -> Self {
        Self::View(view)
    }
}

impl<A: Accelerator, S: Into<Scalar>> From<S> for Argument<'_, A> {
    fn from(scalar: S) -> Self {
        Self::Scalar(scalar.into())
    }
}

/// The arguments of a launch as an array: buffers, views, views with extents and numbers, in the order of the kernel's
/// parameters.
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// # use vm_accel::{fake::FakeAccelerator, programs::Program, arguments, Error, Worker, WorkerOptions};
/// # fn main() -> Result<(), Error> {
/// # let worker = Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
/// let kernel = worker.load(&FakeAccelerator::artifact(Program::Add))?;
/// let (x, y) = (worker.allocate_zeroed(4096)?, worker.allocate(4096)?);
/// worker.launch(&kernel, 4, &arguments![&x, y.shaped(&[1024])?, 3u32])?;
/// # worker.stop(Duration::from_secs(10))
/// # }
/// ```
#[macro_export]
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { [$($crate::Argument::from($argument)),*] };
}

pub(super) struct Loaded<A: Accelerator> {
    /// No other kernel of the worker has it.
    pub(super) number: u64,
    pub(super) kernel: ManuallyDrop<<A::Queue as crate::Queue>::Kernel>,
    pub(super) layout: Arc<Layout>,
    pub(super) shared: Arc<Shared<A>>,
}

impl<A: Accelerator> Drop for Loaded<A> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the value is being dropped, so nobody uses the field again.
        let kernel = unsafe { ManuallyDrop::take(&mut self.kernel) };
        self.shared.discard(DeferredFree::Kernel(self.number, kernel));
    }
}

/// A kernel that is loaded on one worker. Clones are the same kernel; it is unloaded after the last is dropped and its
/// launches have run.
pub struct Kernel<A: Accelerator>(pub(super) Arc<Loaded<A>>);

impl<A: Accelerator> Kernel<A> {
    /// The entry symbol.
    pub fn entry(&self) -> &str {
        &self.0.layout.signature.entry
    }
}

impl<A: Accelerator> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Accelerator> fmt::Debug for Kernel<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.entry()).finish()
    }
}

/// Commands that were recorded once, to be replayed often. It keeps the kernels and the memory that it uses: a buffer
/// that is dropped goes back when the last graph that uses it is gone, and [`Worker::free`](crate::Worker::free) refuses
/// to release registered memory to the host before.
pub struct Graph<A: Accelerator> {
    pub(super) id: u64,
    pub(super) shared: Arc<Shared<A>>,
}

impl<A: Accelerator> Drop for Graph<A> {
    fn drop(&mut self) {
        self.shared.discard(DeferredFree::Graph(self.id));
    }
}

impl<A: Accelerator> fmt::Debug for Graph<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Graph").field(&self.id).finish()
    }
}

impl<A: Accelerator> Shared<A> {
    /// That a view is of this worker.
    pub(super) fn own<'a>(
        self: &Arc<Self>,
        what: &'static str,
        theirs: &'a Arc<Self>,
    ) -> Result<&'a Arc<Self>> {
        if Arc::ptr_eq(self, theirs) { Ok(theirs) } else { Err(Error::WrongWorker { what }) }
    }
}
