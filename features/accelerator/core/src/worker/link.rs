//! The two timelines by which a worker and graphics take turns: one that graphics signals, one that the worker does.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use super::session::Session;
use super::{DeferredFree, Shared, Worker, current};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::external::{ExternalSemaphore, Semaphore, Timeline};
use crate::memory::Region;

/// How a worker and graphics wait for each other, without the host. Clones are the same link.
///
/// Whatever value [`Mapped::unmap`](super::Mapped::unmap) promised is reached: also when the device is lost, and at the latest
/// when the worker has ended. So nobody who waits for it waits for ever.
pub struct Link<A: Accelerator>(pub(super) Arc<Turns<A>>);

impl<A: Accelerator> Clone for Link<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Accelerator> Link<A> {
    /// The last value that graphics was promised, 0 before the first.
    pub fn promised(&self) -> u64 {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).promised
    }
}

impl<A: Accelerator> fmt::Debug for Link<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("broken", &self.0.broken.get()).finish_non_exhaustive()
    }
}

/// A link, as the worker's commands have it.
pub(super) struct Turns<A: Accelerator> {
    /// What graphics signals and what the worker does, until they are given up: for a mutex the same.
    semaphores: Option<(Arc<Semaphore>, Arc<Semaphore>)>,
    /// The host's side of the second.
    host: Arc<dyn Timeline>,
    state: Mutex<State>,
    /// What a wait or a signal failed with.
    broken: OnceLock<Error>,
    pub(super) shared: Arc<Shared<A>>,
}

#[derive(Default)]
struct State {
    /// The last value that graphics was promised.
    promised: u64,
    /// The position from which commands come behind all that were given.
    ready: u64,
    /// The worker signals nothing any more.
    ended: bool,
}

impl<A: Accelerator> Turns<A> {
    /// Waits for other threads, but not on the worker's own: they may be waiting for it.
    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        if !current::is(self.shared.id) {
            return Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner));
        }
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(state)) => Ok(state.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::OutOfOrder),
        }
    }

    fn check(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Remembers that a turn was lost.
    fn broke(&self, result: Result<()>) -> Result<()> {
        result.inspect_err(|error| drop(self.broken.set(error.clone())))
    }

    /// Queues a command behind those of this link.
    fn push(
        &self,
        state: &mut State,
        command: impl FnOnce(&Session<A>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let executor = &self.shared.executor;
        let command = move |session: &Session<A>| session.defer(command(session));
        let position = if current::is(self.shared.id) {
            // This thread would wait for itself to make room.
            executor.push(command).map_err(|_| Error::QueueFull { capacity: executor.capacity() })?
        } else {
            executor.push_by(command, self.shared.options.queue.deadline())?
        };
        state.ready = position + 1;
        Ok(())
    }

    /// Whether the calling thread is the worker's, in a job with none of this link's commands behind it.
    fn is_inline(&self, state: &State) -> bool {
        current::is(self.shared.id) && state.ready <= self.shared.executor.position()
    }

    /// Lets what follows begin when graphics has signalled `value`, with what it wrote in `memory`.
    pub(super) fn wait(self: &Arc<Self>, value: u64, memory: Vec<Region<'static>>) -> Result<()> {
        self.check()?;
        self.shared.alive()?;
        let mut state = self.lock()?;
        if state.ended {
            return Err(Error::Stopped);
        }
        let this = Arc::clone(self);
        let command = move |session: &Session<A>| this.broke(this.start_wait(session, value, &memory));
        if self.is_inline(&state) {
            return current::with(&self.shared, command).unwrap_or(Err(Error::Stopped));
        }
        if current::is(self.shared.id) {
            return Err(Error::OutOfOrder);
        }
        self.push(&mut state, command)
    }

    fn start_wait(&self, session: &Session<A>, value: u64, memory: &[Region<'_>]) -> Result<()> {
        session.not_capturing("a wait for graphics")?;
        let Some((theirs, _)) = &self.semaphores else { return Err(Error::Stopped) };
        session.note(session.queue().wait_semaphore(theirs, value))?;
        memory.iter().try_for_each(|one| session.note(session.queue().acquire(*one)))
    }

    /// Promises graphics a value that is reached behind what was given so far, with what was written in `memory`.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`], with nothing promised. After others the value is signalled by the host, now or at the worker's end.
    pub(super) fn signal(self: &Arc<Self>, memory: Vec<Region<'static>>) -> Result<u64> {
        let mut state = self.lock()?;
        state.promised += 1;
        let value = state.promised;
        if state.ended || self.shared.alive().is_err() {
            return self.host.signal(value).map(|()| value);
        }
        let this = Arc::clone(self);
        let command = move |session: &Session<A>| this.broke(this.start_signal(session, value, &memory));
        let given = match self.is_inline(&state) {
            true => current::with(&self.shared, command).unwrap_or(Err(Error::Stopped)),
            false => self.push(&mut state, command),
        };
        self.broke(given).map(|()| value)
    }

    fn start_signal(&self, session: &Session<A>, value: u64, memory: &[Region<'_>]) -> Result<()> {
        let Some((_, ours)) = &self.semaphores else { return Err(Error::Stopped) };
        let signalled = session
            .not_capturing("a signal to graphics")
            .and_then(|()| memory.iter().try_for_each(|one| session.note(session.queue().release(*one))))
            .and_then(|()| session.note(session.queue().signal_semaphore(ours, value)));
        if signalled.is_err()
            && let Err(error) = self.host.signal(value)
        {
            tracing::warn!(worker = self.shared.name(), %error, value, "graphics is not told");
        }
        signalled
    }

    /// Keeps what was promised, once the worker gives its queue nothing any more.
    pub(super) fn end(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended = true;
        if state.promised > 0
            && let Err(error) = self.host.signal(state.promised)
        {
            tracing::warn!(worker = self.shared.name(), %error, "graphics is not told of the worker's end");
        }
    }
}

impl<A: Accelerator> Drop for Turns<A> {
    fn drop(&mut self) {
        self.shared.keep(self.semaphores.take());
    }
}

impl<A: Accelerator> Worker<A> {
    /// Takes the two timelines of a link: `graphics` is signalled by graphics alone, `worker` by this worker alone.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device can't wait for them; [`Error::Deadline`], [`Error::Stopped`], [`Error::Lost`]; the
    /// device's.
    pub fn link(&self, graphics: ExternalSemaphore, worker: ExternalSemaphore) -> Result<Link<A>> {
        self.link_by(worker, Some(graphics))
    }

    /// Takes a mutex that graphics releases with one key and this worker with another: [`Registered::map`](super::Registered::map)
    /// acquires it with the key that it is given, and [`Registered::ready`](super::Registered::ready) is that with which it is released.
    ///
    /// # Errors
    /// As [`Worker::link`].
    pub fn link_mutex(&self, mutex: ExternalSemaphore) -> Result<Link<A>> {
        self.link_by(mutex, None)
    }

    fn link_by(&self, worker: ExternalSemaphore, graphics: Option<ExternalSemaphore>) -> Result<Link<A>> {
        let shared = &self.0.shared;
        let host = Arc::clone(&worker.host);
        let semaphores = self.submit_and_wait(self.0.deadline(), move |session| {
            session.not_capturing("an import")?;
            let import = |semaphore| session.note(session.queue().import_semaphore(semaphore)).map(Arc::new);
            let theirs = graphics.map(import).transpose()?;
            let ours = import(worker)?;
            Ok((theirs.unwrap_or_else(|| Arc::clone(&ours)), ours))
        })?;
        let turns = Arc::new(Turns {
            semaphores: Some(semaphores),
            host,
            state: Mutex::default(),
            broken: OnceLock::new(),
            shared: Arc::clone(shared),
        });
        let mut links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&turns));
        drop(links);
        if shared.ended() {
            turns.end();
        }
        Ok(Link(turns))
    }
}

impl<A: Accelerator> Shared<A> {
    /// Keeps what graphics was promised.
    pub(super) fn end_links(&self) {
        let links = std::mem::take(&mut *self.links.lock().unwrap_or_else(PoisonError::into_inner));
        links.iter().filter_map(std::sync::Weak::upgrade).for_each(|turns| turns.end());
    }

    /// Drops something once the commands so far have run.
    pub(super) fn keep(&self, kept: impl Send + Sync + 'static) {
        match self.ended() {
            true => drop(kept),
            false => self.discard(DeferredFree::Keeper(Box::new(kept))),
        }
    }
}
