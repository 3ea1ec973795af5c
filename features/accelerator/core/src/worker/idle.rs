//! What a session does between commands, and last of all: it looks after what waits for the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::DeferredFree;
use super::graphs::Recorded;
use super::session::Session;
use super::stream::Pending;
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::executor::{Idle, guarded};

/// How long a thread sleeps, or goes on, between polls of work that the device has not finished.
pub(super) const POLL: Duration = Duration::from_micros(50);
/// How long it polls such work without a pause: to sleep and wake up takes longer than a short kernel.
pub(super) const EAGER: Duration = Duration::from_micros(200);

impl<A: Accelerator> Session<A> {
    /// What to do while no command is ready: look after what waits for the device, then rest.
    pub(super) fn idle(&self) -> Idle {
        if self.shared.executor.is_idle() {
            self.flush();
        }
        self.collect();
        self.poll_pending();
        if self.shared.has_frees.load(Ordering::Acquire) {
            // What is gone may have kept something else.
            return Idle::Poll;
        }
        let (tail, since) = self.last.get();
        let now = Instant::now();
        let position = self.shared.executor.tail();
        if tail != position {
            self.last.set((position, now));
            return Idle::Poll;
        }
        let busy = self.stream.waits() || self.sides.borrow().iter().any(|side| side.stream.waits());
        if self.notified.get() && !busy {
            // Whoever is told of an end sleeps at once where polling was in vain the last time.
            self.eager.set(now - since < EAGER);
            self.notified.set(false);
        }
        let eager = if busy && self.eager.get() { EAGER } else { Duration::ZERO };
        match now - since < eager.max(self.shared.options.spin) {
            true => Idle::Poll,
            // Of many short ones, each is not worth being woken for.
            false if busy && now - self.woken.replace(now) < POLL => Idle::Within(POLL),
            false if busy && self.is_notified() => Idle::Sleep,
            false if busy => Idle::Within(POLL),
            false => Idle::Sleep,
        }
    }

    /// Whether this thread is unparked when any of what waits for the device has ended next.
    fn is_notified(&self) -> bool {
        let thread = thread::current();
        let told =
            self.stream.notify(&thread) && self.sides.borrow().iter().all(|side| side.stream.notify(&thread));
        self.notified.set(told);
        told
    }

    /// Takes what callers dropped and no queued command uses any more, and lets it wait for the device.
    pub(super) fn collect(&self) {
        if self.graphs.capture.borrow().is_some() || self.stream.queue.is_captured().unwrap_or(true) {
            return;
        }
        let frees = self.shared.take_frees(self.shared.executor.position());
        if frees.is_empty() {
            return;
        }
        match self.event().and_then(|event| self.note(self.queue().record(&event)).map(|()| event)) {
            Ok(event) => self.stream.pending.borrow_mut().push_back(Pending::Free(event, frees)),
            // The context is lost, and all this with it.
            Err(_) => frees.into_iter().for_each(|freed| self.remove(freed)),
        }
    }

    /// Removes what no command uses any more, whether it was given to the queue or is gathered.
    pub(super) fn remove(&self, freed: DeferredFree<A>) {
        match freed {
            DeferredFree::Kernel(number, kernel) => {
                self.forget_execs(number);
                self.log(self.stream.queue.unload(kernel));
            }
            DeferredFree::Memory(memory) => self.log(self.stream.queue.free(memory)),
            DeferredFree::Keeper(keeper) => drop(keeper),
            DeferredFree::Graph(id) => {
                let recorded = self.graphs.recorded.borrow_mut().remove(&id);
                if let Some(Recorded { graph, uses, .. }) = recorded {
                    self.log(self.stream.queue.discard(graph));
                    self.give_up(&uses);
                }
            }
        }
    }

    /// Sees what has ended, and frees what was dropped. A worker's thread does that by itself between commands; in a session of
    /// the caller's own, launches and waits do. A guarded launch whose end is not seen before its time is up counts as
    /// stopped: call this, or anything else, before.
    pub fn poll(&self) {
        if self.stream.queue.is_captured().unwrap_or(true) {
            return;
        }
        self.collect();
        self.poll_pending();
    }

    /// The same, where no thread does it.
    #[inline]
    pub(super) fn tend(&self) {
        let idle =
            || self.stream.pending.borrow().is_empty() && !self.shared.has_frees.load(Ordering::Relaxed);
        if self.shared.threaded || idle() {
            return;
        }
        // To poll may take the driver as long as a launch.
        let (position, polled) = self.last.get();
        let now = Instant::now();
        if now - polled >= POLL {
            self.last.set((position, now));
            self.poll();
        }
    }

    /// Waits for the device, stops guarded kernels that don't end, and releases everything. Dropping a session does the same,
    /// and logs what fails.
    ///
    /// # Errors
    /// The first error of a launch since the last wait; [`Error::Lost`]; [`Error::Deadline`] when the device has not ended its
    /// work in the options' timeout.
    pub fn close(self) -> Result<()> {
        let done = self.finish();
        let taken = if self.shared.threaded { Ok(()) } else { self.shared.take_deferred() };
        drop(self);
        done.and(taken)
    }

    /// Waits for the device, and releases everything but the queue.
    fn finish(&self) -> Result<()> {
        if self.ended.replace(true) {
            return Ok(());
        }
        let mut done = self.wait(self.timeout());
        if matches!(done, Err(Error::Deadline { .. })) {
            let sides = self.sides.borrow().clone();
            let guards = sides.iter().map(|side| &side.guards).chain([&self.guards]);
            let armed: Vec<_> = guards
                .filter_map(|guards| guards.borrow().as_ref().map(|guards| Arc::clone(&guards.armed)))
                .collect();
            if !armed.is_empty() {
                armed.iter().for_each(|armed| armed.stop_all());
                done = self.wait(self.timeout());
            }
        }
        if done.is_ok() {
            self.collect();
            let _ = self.wait(self.timeout());
        }
        self.poll_pending();
        self.shared.executor.close();
        self.shared.end_links();
        if matches!(done, Err(Error::Deadline { .. })) {
            self.leave();
        }
        std::mem::take(&mut *self.sides.borrow_mut()).iter().for_each(|side| side.end_stream());
        self.end_stream();
        // The queue frees what it allocated when it is dropped; the pool's part need not be freed one by one.
        drop(self.shared.pool.close());
        done
    }

    /// Leaves what was dropped, and the device may still use, to the end of the process.
    fn leave(&self) {
        self.shared.stuck.store(true, Ordering::Release);
        std::mem::forget(self.shared.take_frees(u64::MAX));
        let mut pending = self.stream.pending.borrow_mut();
        let (frees, others) =
            pending.drain(..).partition::<VecDeque<_>, _>(|one| matches!(one, Pending::Free(..)));
        *pending = others;
        std::mem::forget(frees);
    }

    /// Releases what is of the stream's own.
    fn end_stream(&self) {
        self.stream.pending.borrow_mut().clear();
        let graphs = std::mem::take(&mut *self.graphs.recorded.borrow_mut());
        for (_, Recorded { graph, uses, .. }) in graphs {
            self.log(self.queue().discard(graph));
            self.unhold(&uses);
        }
        self.end_execs();
        // Before the queue frees the memory that they lie in.
        drop(self.guards.take());
    }
}

impl<A: Accelerator> Drop for Session<A> {
    fn drop(&mut self) {
        if let Err(error) = guarded(|| self.finish()) {
            tracing::warn!(session = self.shared.name(), %error, "the session ends before its work");
        }
    }
}
