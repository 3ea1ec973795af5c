//! A session's stream: the queue, and what waits for the device to come so far.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::thread::Thread;
use std::time::Instant;

use super::DeferredFree;
use super::guard::Guarded;
use super::session::{EventOf, QueueOf, Session};
use crate::accelerator::{Accelerator, Queue};
use crate::error::Result;
use crate::executor::job::Completer;

/// A queue, and what waits for it.
pub(super) struct Stream<A: Accelerator> {
    /// Commands go by way of [`Session::queue`], which keeps their order.
    pub(super) queue: QueueOf<A>,
    pub(super) pending: RefCell<VecDeque<Pending<A>>>,
    /// How many of those have ended so far.
    ends: Cell<u64>,
    /// That are in no use.
    events: RefCell<Vec<Rc<EventOf<A>>>>,
}

impl<A: Accelerator> Stream<A> {
    pub(super) fn new(queue: QueueOf<A>) -> Self {
        Self { queue, pending: RefCell::default(), ends: Cell::new(0), events: RefCell::default() }
    }

    /// Whether anything waits for the device.
    pub(super) fn waits(&self) -> bool {
        !self.pending.borrow().is_empty()
    }

    /// Whether the thread is unparked when the first of what waits has ended; nothing may wait.
    pub(super) fn notify(&self, thread: &Thread) -> bool {
        let pending = self.pending.borrow();
        // What fails here fails when it is asked for.
        pending.front().is_none_or(|first| self.queue.notify(first.event(), thread).unwrap_or(false))
    }
}

/// What waits for the device.
pub(super) enum Pending<A: Accelerator> {
    Fence(Rc<EventOf<A>>, Completer<()>),
    Free(Rc<EventOf<A>>, Vec<DeferredFree<A>>),
    Launch(Rc<EventOf<A>>, Over, Option<Completer<()>>),
    /// A graph that is to be dropped, and then the events in it.
    GraphExec(Rc<EventOf<A>>, <QueueOf<A> as Queue>::Graph, Vec<Rc<EventOf<A>>>),
}

impl<A: Accelerator> Pending<A> {
    fn event(&self) -> &EventOf<A> {
        match self {
            Self::Fence(event, _)
            | Self::Free(event, _)
            | Self::Launch(event, ..)
            | Self::GraphExec(event, ..) => event,
        }
    }
}

/// What has ended when a launch has.
pub(super) enum Over {
    /// Nothing but the launch.
    Nothing,
    /// A guarded launch, which has a cancel flag.
    Launch(Guarded),
    /// A replay of the guarded graph with this number.
    Replay(u64),
}

impl<A: Accelerator> Session<A> {
    /// The queue, for what this session has no words for. Commands to it are not checked against captures and buffers
    /// of other workers.
    pub fn queue(&self) -> &QueueOf<A> {
        // It works in order, so what was gathered comes first.
        self.flush();
        &self.stream.queue
    }

    pub(super) fn event(&self) -> Result<Rc<EventOf<A>>> {
        let event = self.stream.events.borrow_mut().pop();
        event.map_or_else(|| self.note(self.queue().event(false)).map(Rc::new), Ok)
    }

    /// Keeps an event that is done for the next that wants one, unless a graph exec has it.
    pub(super) fn reuse(&self, event: Rc<EventOf<A>>) {
        if Rc::strong_count(&event) == 1 {
            self.stream.events.borrow_mut().push(event);
        }
    }

    /// Waits for the device to finish all that was started.
    ///
    /// # Errors
    /// For a session of the caller's own, the first error of a launch since the last wait;
    /// [`Error::Lost`](crate::Error::Lost), [`Error::Deadline`](crate::Error::Deadline),
    /// [`Error::Capturing`](crate::Error::Capturing).
    pub fn synchronize(&self, deadline: Instant) -> Result<()> {
        let done = self.wait(deadline);
        // A worker's next wait says it.
        if self.shared.threaded { done } else { done.and_then(|()| self.shared.take_deferred()) }
    }

    pub(super) fn wait(&self, deadline: Instant) -> Result<()> {
        self.not_capturing("a wait")?;
        let event = self.event()?;
        let done = self
            .note(self.queue().record(&event))
            .and_then(|()| self.note(self.queue().wait(&event, deadline)));
        if done.is_ok() {
            self.reuse(event);
            self.poll_pending();
        }
        done
    }

    /// Lets `completer` be completed when the device has done all so far.
    pub(super) fn fence(&self, completer: Completer<()>) {
        let event = match self.not_capturing("a wait").and_then(|()| self.event()) {
            Ok(event) => event,
            Err(error) => return completer.complete(Err(error)),
        };
        match self.note(self.queue().record(&event)) {
            Ok(()) => self.stream.pending.borrow_mut().push_back(Pending::Fence(event, completer)),
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
        self.stream.pending.borrow_mut().push_back(Pending::Launch(event, over, completer.take()));
        Ok(())
    }

    /// Ends what waits for the device and need not wait any more.
    pub(super) fn poll_pending(&self) {
        let sides = self.sides.borrow().len();
        for index in 0..sides {
            let side = self.sides.borrow().get(index).cloned();
            side.inspect(|side| side.poll_pending());
        }
        loop {
            let (count, done) = self.ended();
            if count == 0 {
                return;
            }
            // What hears of an end may poll too.
            let until = self.stream.ends.get() + count as u64;
            while self.stream.ends.get() < until {
                let Some(first) = self.stream.pending.borrow_mut().pop_front() else { return };
                self.stream.ends.set(self.stream.ends.get() + 1);
                self.end(first, &done);
            }
        }
    }

    /// How many of those that wait have ended for sure, the oldest first, and how.
    ///
    /// To ask for an event may take the driver as long as a launch. The device works in order, so the youngest that is
    /// done tells of all before it.
    fn ended(&self) -> (usize, Result<()>) {
        let pending = self.stream.pending.borrow();
        let done =
            |index: usize| pending.get(index).map(|one| self.note(self.stream.queue.done(one.event())));
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
                let result = done.clone().and(self.came_to(&over, done.is_ok()));
                if done.is_ok() {
                    self.reuse(event);
                }
                self.defer(result.clone());
                if let Some(completer) = completer {
                    completer.complete(result);
                }
            }
            Pending::Free(event, frees) => {
                self.defer(done.clone());
                if done.is_ok() {
                    self.reuse(event);
                }
                frees.into_iter().for_each(|freed| self.remove(freed));
            }
            Pending::GraphExec(event, graph, events) => {
                self.defer(done.clone());
                if done.is_ok() {
                    self.reuse(event);
                }
                self.log(self.stream.queue.discard(graph));
                drop(events);
            }
        }
    }
}
