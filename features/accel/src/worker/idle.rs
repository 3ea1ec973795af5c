//! What the worker's thread does between commands, and last of all: it looks after what waits for the device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Garbage;
use super::brand::Brand;
use super::guard::Guarded;
use super::launch::Recorded;
use super::session::{EventOf, Session};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::executor::Idle;
use crate::executor::job::Completer;

/// How long the thread sleeps between looks at work that the device has not finished.
const LOOK: Duration = Duration::from_micros(50);

/// What waits for the device.
pub(super) enum Pending<A: Accelerator> {
    Fence(EventOf<A>, Completer<()>),
    Garbage(EventOf<A>, Vec<Garbage<A>>),
    Launch(EventOf<A>, Over, Option<Completer<()>>),
}

/// What has ended when a launch has.
pub(super) enum Over {
    /// Nothing but the launch.
    Nothing,
    /// A guarded launch, which has a stop word.
    Launch(Guarded),
    /// A replay of the guarded graph with this number.
    Replay(u64),
}

impl<A: Accelerator, B: Brand> Session<A, B> {
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

    /// Lets what is over be seen when the device has done all so far, and `completer` be completed.
    pub(super) fn pend(
        &self,
        event: EventOf<A>,
        over: Over,
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        if let Err(error) = self.note(self.queue.record(&event)) {
            self.forget(&over);
            return Err(error);
        }
        self.pending.borrow_mut().push_back(Pending::Launch(event, over, completer.take()));
        Ok(())
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
    pub(super) fn look(&self) {
        loop {
            let mut pending = self.pending.borrow_mut();
            let done = match pending.front() {
                None => return,
                Some(Pending::Fence(event, _) | Pending::Garbage(event, _) | Pending::Launch(event, ..)) => {
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
                Some(Pending::Launch(event, over, completer)) => {
                    let result = done.clone().and(self.over(&over, done.is_ok()));
                    if done.is_ok() {
                        self.events.borrow_mut().push(event);
                    }
                    self.defer(result.clone());
                    if let Some(completer) = completer {
                        completer.complete(result);
                    }
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
                if let Some(Recorded { graph, uses, .. }) = recorded {
                    self.log(self.queue.discard(graph));
                    self.give_up(&uses);
                }
            }
        }
    }

    /// What the thread does last: waits for the device, and gives everything back.
    pub(super) fn finish(self) -> Result<()> {
        let mut done = self.synchronize(self.patience());
        if matches!(done, Err(Error::Deadline { .. })) {
            let armed = self.guards.borrow().as_ref().map(|guards| Arc::clone(&guards.armed));
            if let Some(armed) = armed {
                armed.stop_all();
                done = self.synchronize(self.patience());
            }
        }
        if done.is_ok() {
            self.collect();
            let _ = self.synchronize(self.patience());
        }
        self.look();
        self.pending.borrow_mut().clear();
        let graphs = std::mem::take(&mut *self.graphs.borrow_mut());
        for (_, Recorded { graph, uses, .. }) in graphs {
            self.log(self.queue.discard(graph));
            self.unhold(&uses);
        }
        // Before the queue frees the memory that they lie in.
        drop(self.guards.take());
        // The queue frees what it allocated when it is dropped; the pool's part need not be freed one by one.
        drop(self.shared.pool.close());
        done.and_then(|()| self.shared.take_deferred())
    }
}
