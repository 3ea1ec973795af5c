//! Several streams of a session, and events between them, between sessions and between workers.
//!
//! A further stream is a session of its own inside of the one that opened it, over another queue of the same context. It shares
//! buffers and kernels with it, and has guards of its own, as those end in the order of their stream.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use super::Worker;
use super::buffer::{Argument, Kernel, View};
use super::session::{EventOf, Session};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::executor::guarded;
use crate::launch::Launch;

/// A point in a stream, for others to wait for. Clones are the same point.
pub struct Event<A: Accelerator>(Arc<EventOf<A>>);

impl<A: Accelerator> Clone for Event<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Accelerator> fmt::Debug for Event<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").finish_non_exhaustive()
    }
}

/// Where further streams are opened: see [`Session::scope`].
pub struct Scope<'scope, 'env: 'scope, A: Accelerator> {
    session: &'env Session<A>,
    opened: RefCell<Vec<Rc<Session<A>>>>,
    scope: PhantomData<&'scope mut &'scope ()>,
}

/// A further stream of a session. What it uses lives longer than its scope.
pub struct ScopedStream<'scope, A: Accelerator> {
    side: Rc<Session<A>>,
    scope: PhantomData<&'scope mut &'scope ()>,
}

impl<A: Accelerator> Session<A> {
    /// Runs `f`, which may open further streams. They begin behind what the session was given before, and what it is given
    /// after `f` begins behind them; nobody waits for the device. As with [`std::thread::scope`], they can use only what is
    /// there longer than the scope.
    ///
    /// Streams that write what others use without an event between leave there any mix of what was written.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use vm_accel::{arguments, fake::FakeAccelerator, programs::Program, Error, Session, WorkerOptions};
    /// # fn main() -> Result<(), Error> {
    /// # let session = Session::<_>::open(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
    /// let kernel = session.load(&FakeAccelerator::artifact(Program::Bump))?;
    /// let (x, y) = (session.allocate_zeroed(4096)?, session.allocate_zeroed(4096)?);
    /// session.scope(|scope| {
    ///     let (left, right) = (scope.stream()?, scope.stream()?);
    ///     left.launch(&kernel, 4, &arguments![&x, 1u32])?;
    ///     right.launch(&kernel, 4, &arguments![&y, 2u32])?;
    ///     right.wait(&left.record()?)?;
    ///     right.launch(&kernel, 4, &arguments![&x, 3u32])
    /// })?;
    /// let mut sums = [0u32; 1024];
    /// session.read(&x, &mut sums)?;
    /// assert_eq!(sums, [4; 1024]);
    /// # drop((x, y, kernel));
    /// # session.close()
    /// # }
    /// ```
    ///
    /// A buffer of the scope's own is gone before its streams have come to an end:
    ///
    /// ```compile_fail,E0597
    /// # use std::sync::Arc;
    /// # use vm_accel::{fake::FakeAccelerator, Error, Session, WorkerOptions};
    /// # fn main() -> Result<(), Error> {
    /// # let session = Session::<_>::open(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
    /// session.scope(|scope| {
    ///     let x = session.allocate(4096)?;
    ///     scope.stream()?.fill(&x, 0)
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capturing`]; the device's. [`Error::Lost`] when a stream can neither be waited for by the
    /// session nor by this thread.
    pub fn scope<'env, R>(
        &'env self,
        f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env, A>) -> Result<R>,
    ) -> Result<R> {
        self.not_capturing("further streams")?;
        self.not_captured("further streams")?;
        let scope = Scope { session: self, opened: RefCell::default(), scope: PhantomData };
        let done = guarded(|| f(&scope));
        let joined = scope.opened.take().iter().try_for_each(|side| self.join(side));
        joined.and(done)
    }

    /// A further stream that no scope has.
    fn side(&self) -> Result<Rc<Self>> {
        if let Some(side) = self.sides.borrow().iter().find(|side| Rc::strong_count(side) == 1) {
            return Ok(Rc::clone(side));
        }
        let side = Rc::new(Self::new(self.open_stream()?, Arc::clone(&self.shared)));
        // It ends with this one.
        side.ended.set(true);
        self.sides.borrow_mut().push(Rc::clone(&side));
        Ok(side)
    }

    /// Lets what follows come behind all of a further stream.
    fn join(&self, side: &Self) -> Result<()> {
        let joined = side.record().and_then(|event| self.wait_event(&event));
        let Err(error) = joined else { return Ok(()) };
        if side.wait(self.timeout()).is_ok() {
            return Ok(());
        }
        let cause = format!("a stream can't be waited for: {error}");
        self.note(Err(Error::Lost { cause }))
    }

    /// An event behind all that was started.
    ///
    /// # Errors
    /// [`Error::Capturing`]; the device's.
    pub fn record(&self) -> Result<Event<A>> {
        self.not_capturing("an event")?;
        let event = self.note(self.queue().event(false))?;
        self.note(self.queue().record(&event))?;
        Ok(Event(Arc::new(event)))
    }

    /// Lets what follows begin when an event has been reached: of any stream, session or worker, on whichever device. This thread
    /// does not wait. The time of a guarded launch runs while it waits.
    ///
    /// # Errors
    /// [`Error::Capturing`]; the device's.
    pub fn wait_event(&self, event: &Event<A>) -> Result<()> {
        self.not_capturing("a wait for an event")?;
        self.note(self.queue().wait_event(&event.0))
    }
}

impl<'scope, A: Accelerator> Scope<'scope, '_, A> {
    /// Opens a stream.
    ///
    /// # Errors
    /// [`Error::Capturing`]; the device's.
    pub fn stream(&'scope self) -> Result<ScopedStream<'scope, A>> {
        let begin = self.session.record()?;
        let side = self.session.side()?;
        self.opened.borrow_mut().push(Rc::clone(&side));
        side.wait_event(&begin)?;
        Ok(ScopedStream { side, scope: PhantomData })
    }
}

impl<'scope, A: Accelerator> ScopedStream<'scope, A> {
    /// Launches a kernel, as [`Session::launch`] does.
    ///
    /// # Errors
    /// As [`Session::launch`].
    pub fn launch(
        &self,
        kernel: &'scope Kernel<A>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'scope, A>],
    ) -> Result<()> {
        self.side.launch(kernel, launch, arguments)
    }

    /// Sets every byte of a view.
    ///
    /// # Errors
    /// As [`Session::fill`].
    pub fn fill(&self, target: impl Into<View<'scope, A>>, value: u8) -> Result<()> {
        self.side.fill(target, value)
    }

    /// Copies one view to another of the same length.
    ///
    /// # Errors
    /// As [`Session::copy`].
    pub fn copy(&self, target: impl Into<View<'scope, A>>, source: impl Into<View<'scope, A>>) -> Result<()> {
        let (target, source) = (self.side.region(target.into())?, self.side.region(source.into())?);
        self.side.copy_region(target, source)
    }

    /// An event behind all that this stream was given.
    ///
    /// # Errors
    /// The device's.
    pub fn record(&self) -> Result<Event<A>> {
        self.side.record()
    }

    /// Lets what this stream is given next begin when an event has been reached.
    ///
    /// # Errors
    /// The device's.
    pub fn wait(&self, event: &Event<A>) -> Result<()> {
        self.side.wait_event(event)
    }
}

impl<A: Accelerator> fmt::Debug for ScopedStream<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopedStream").finish_non_exhaustive()
    }
}

impl<A: Accelerator> Worker<A> {
    /// An event behind all that was given so far, for other workers and sessions to wait for. This waits until the worker's
    /// thread has come so far, but not for the device.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Stopped`], [`Error::Lost`]; the device's.
    pub fn record(&self) -> Result<Event<A>> {
        self.submit_and_wait(self.0.deadline(), Session::record)
    }

    /// Lets what follows begin when an event has been reached, of any worker or session, on whichever device. The time of a
    /// guarded launch runs while it waits.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::Stopped`], [`Error::Lost`].
    pub fn wait_event(&self, event: &Event<A>) -> Result<()> {
        if let Some(done) = super::current::with(&self.0.shared, |session| session.wait_event(event)) {
            return done;
        }
        let event = event.clone();
        self.command(move |session| session.wait_event(&event))
    }
}
