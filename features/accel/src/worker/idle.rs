//! What the worker's thread does between commands, and last of all: it looks after what waits for the device.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Garbage;
use super::brand::Brand;
use super::guard::Guarded;
use super::launch::Recorded;
use super::session::{EventOf, QueueOf, Session};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::executor::Idle;
use crate::executor::job::Completer;

/// How long the thread sleeps between looks at work that the device has not finished.
pub(super) const LOOK: Duration = Duration::from_micros(50);
/// How long it looks at such work without a pause: to sleep and wake up takes longer than a short kernel.
pub(super) const EAGER: Duration = Duration::from_micros(200);

/// What waits for the device.
pub(super) enum Pending<A: Accelerator> {
    Fence(Rc<EventOf<A>>, Completer<()>),
    Garbage(Rc<EventOf<A>>, Vec<Garbage<A>>),
    Launch(Rc<EventOf<A>>, Over, Option<Completer<()>>),
    /// A graph that is to be dropped, and then the events in it.
    Chain(Rc<EventOf<A>>, <QueueOf<A> as Queue>::Graph, Vec<Rc<EventOf<A>>>),
}

impl<A: Accelerator> Pending<A> {
    fn event(&self) -> &EventOf<A> {
        match self {
            Self::Fence(event, _)
            | Self::Garbage(event, _)
            | Self::Launch(event, ..)
            | Self::Chain(event, ..) => event,
        }
    }
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
        match self.note(self.queue().record(&event)) {
            Ok(()) => self.pending.borrow_mut().push_back(Pending::Fence(event, completer)),
            Err(error) => completer.complete(Err(error)),
        }
    }

    /// Lets what is over be seen when the device has done all so far, and `completer` be completed.
    pub(super) fn pend(
        &self,
        event: Rc<EventOf<A>>,
        over: Over,
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        if let Err(error) = self.note(self.queue().record(&event)) {
            self.forget(&over);
            return Err(error);
        }
        self.pending.borrow_mut().push_back(Pending::Launch(event, over, completer.take()));
        Ok(())
    }

    /// What to do while no command is ready: look after what waits for the device, then rest.
    pub(super) fn idle(&self) -> Idle {
        if self.shared.executor.is_idle() {
            self.flush();
        }
        self.collect();
        self.look();
        if self.shared.littered.load(Ordering::Acquire) {
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
        let busy = !self.pending.borrow().is_empty();
        let eager = self.shared.options.spin.max(if busy { EAGER } else { Duration::ZERO });
        match now - since < eager {
            true => Idle::Poll,
            false if busy => Idle::Within(LOOK),
            false => Idle::Sleep,
        }
    }

    /// Ends what waits for the device and need not wait any more.
    pub(super) fn look(&self) {
        loop {
            let (count, done) = self.ended();
            if count == 0 {
                return;
            }
            // What hears of an end may look too.
            let until = self.ends.get() + count as u64;
            while self.ends.get() < until {
                let Some(first) = self.pending.borrow_mut().pop_front() else { return };
                self.ends.set(self.ends.get() + 1);
                self.end(first, &done);
            }
        }
    }

    /// How many of those that wait have ended for sure, the oldest first, and how.
    ///
    /// To ask for an event may take the driver as long as a launch. The device works in order, so the youngest that is
    /// done tells of all before it.
    fn ended(&self) -> (usize, Result<()>) {
        let pending = self.pending.borrow();
        let done = |index: usize| pending.get(index).map(|one| self.note(self.queue.done(one.event())));
        let mut count = 0;
        let mut next = pending.len();
        loop {
            match done(next.wrapping_sub(1)) {
                Some(Ok(true)) if next == pending.len() => return (next, Ok(())),
                Some(Ok(true)) => count = next,
                Some(Err(error)) if count == 0 => return (next, Err(error)),
                Some(Err(_)) => return (count, Ok(())),
                // The youngest is not done; then the first is asked, the second, the fourth.
                Some(Ok(false)) if next == pending.len() && next > 1 => {
                    next = 1;
                    continue;
                }
                Some(Ok(false)) | None => return (count, Ok(())),
            }
            next = (2 * next).min(pending.len() - 1);
            if next <= count {
                return (count, Ok(()));
            }
        }
    }

    fn end(&self, one: Pending<A>, done: &Result<()>) {
        match one {
            Pending::Fence(event, completer) => {
                if done.is_ok() {
                    self.reuse(event);
                }
                completer.complete(done.clone().and_then(|()| self.shared.take_deferred()));
            }
            Pending::Launch(event, over, completer) => {
                let result = done.clone().and(self.over(&over, done.is_ok()));
                if done.is_ok() {
                    self.reuse(event);
                }
                self.defer(result.clone());
                if let Some(completer) = completer {
                    completer.complete(result);
                }
            }
            Pending::Garbage(event, garbage) => {
                if done.is_ok() {
                    self.reuse(event);
                }
                garbage.into_iter().for_each(|garbage| self.remove(garbage));
            }
            Pending::Chain(event, graph, events) => {
                if done.is_ok() {
                    self.reuse(event);
                }
                self.log(self.queue.discard(graph));
                drop(events);
            }
        }
    }

    /// Takes what callers dropped and no queued command uses any more, and lets it wait for the device.
    pub(super) fn collect(&self) {
        if self.capture.borrow().is_some() {
            return;
        }
        let garbage = self.shared.take_garbage(self.shared.executor.position());
        if garbage.is_empty() {
            return;
        }
        match self.event().and_then(|event| self.note(self.queue().record(&event)).map(|()| event)) {
            Ok(event) => self.pending.borrow_mut().push_back(Pending::Garbage(event, garbage)),
            // The context is lost, and all this with it.
            Err(_) => garbage.into_iter().for_each(|garbage| self.remove(garbage)),
        }
    }

    /// Removes what no command uses any more, whether it was given to the queue or is gathered.
    fn remove(&self, garbage: Garbage<A>) {
        match garbage {
            Garbage::Kernel(number, kernel) => {
                self.forget_chains(number);
                self.log(self.queue.unload(kernel));
            }
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
        let mut done = self.synchronize(self.timeout());
        if matches!(done, Err(Error::Deadline { .. })) {
            let armed = self.guards.borrow().as_ref().map(|guards| Arc::clone(&guards.armed));
            if let Some(armed) = armed {
                armed.stop_all();
                done = self.synchronize(self.timeout());
            }
        }
        if done.is_ok() {
            self.collect();
            let _ = self.synchronize(self.timeout());
        }
        self.look();
        self.pending.borrow_mut().clear();
        let graphs = std::mem::take(&mut *self.graphs.borrow_mut());
        for (_, Recorded { graph, uses, .. }) in graphs {
            self.log(self.queue().discard(graph));
            self.unhold(&uses);
        }
        self.end_chains();
        // Before the queue frees the memory that they lie in.
        drop(self.guards.take());
        // The queue frees what it allocated when it is dropped; the pool's part need not be freed one by one.
        drop(self.shared.pool.close());
        done
    }
}
