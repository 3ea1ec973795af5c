//! What others ask of a guest that runs, and what they are answered.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use std::{fmt, io};

use thiserror::Error;
use vm_passthrough::PciAddress;
use vm_passthrough::manager::{MadeClaim, ManagerError};
use vm_passthrough::readiness::{BlockerCode, Readiness};
use vm_passthrough::vfio::Backend;

use super::arrivals::Arrivals;
use super::state::Event;
use super::watch;
use crate::text::describe;
use crate::vmm::Stop;

/// A device to attach to a guest that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AttachRequest {
    /// The functions of one device of the host: the guest sees those that are named here, as one device.
    pub(crate) functions: Vec<PciAddress>,
    /// Whether functions of other slots in their IOMMU group are claimed too.
    pub(crate) with_group: bool,
    /// Blockers that the operator accepts.
    pub(crate) accept: Vec<BlockerCode>,
    /// How to open it; `None` for as the guest's others are, or the best that there is.
    pub(crate) backend: Option<Backend>,
}

/// A device was attached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attached {
    /// Where the guest sees its first function; `None` while it has not numbered its buses.
    pub(crate) guest: Option<PciAddress>,
    /// Functions of its slot that stay with the host, each with its driver.
    pub(crate) left: Vec<(PciAddress, Option<String>)>,
}

/// How to detach a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetachHow {
    /// The guest is asked to let go of it.
    Orderly {
        /// How long the guest has for that. Linux gives its own users 5 s to change their minds.
        deadline: Duration,
        /// Whether it is taken by surprise when the guest does not let go.
        then_surprise: bool,
    },
    /// As if it were pulled.
    Surprise,
}

/// How a device was detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetachedHow {
    /// The guest let go of it before.
    Orderly,
    /// The guest had not let go of it.
    Surprise,
}

/// Why something was not done, which has changed nothing that was not undone: what, where, and what to do.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum Refused {
    /// What it is about is not there.
    #[error("{0}")]
    NotFound(String),
    /// It can't be done in the state that the guest, or the device, is in.
    #[error("{0}")]
    Conflict(String),
    /// Functions that are not ready for the guest, and why the guest has no room for the device, if that is so too.
    #[error("{}{}", describe::blocked(.0), .1.iter().map(|reason| format!("\n{reason}")).collect::<String>())]
    Blocked(Vec<Readiness>, Option<String>),
    /// A step failed.
    #[error("{0}")]
    Failed(String),
}

/// Names a request to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestId(pub(super) u64);

/// What a request is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// One to attach.
    Attach(Result<Attached, Refused>),
    /// One to detach.
    Detach(Result<DetachedHow, Refused>),
    /// One to reset it.
    Reset(Result<(), Refused>),
}

/// What is asked of a guest, from before its machine is made.
pub(crate) struct Inbox {
    pub(super) messages: (Sender<Message>, Receiver<Message>),
    /// Resets the guest when it is written to.
    pub(super) reset: Arc<OwnedFd>,
    pub(super) stop: Stop,
    /// What is on its way to it.
    pub(super) arrivals: Arrivals,
}

impl Inbox {
    /// That of a guest which `stop` ends whenever it is requested.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(crate) fn new(stop: &Stop) -> io::Result<Self> {
        let (reset, arrivals) = (Arc::new(watch::event()?), Arrivals::default());
        Ok(Self { messages: channel(), reset, stop: stop.clone(), arrivals })
    }

    /// What asks of the guest, from any thread, from now on.
    pub(crate) fn handle(&self) -> Handle {
        let (messages, arrivals) = (self.messages.0.clone(), self.arrivals.clone());
        Handle { messages, reset: self.reset.clone(), stop: self.stop.clone(), arrivals }
    }
}

/// Asks of a guest, from any thread.
#[derive(Clone)]
pub(crate) struct Handle {
    messages: Sender<Message>,
    reset: Arc<OwnedFd>,
    stop: Stop,
    arrivals: Arrivals,
}

impl Handle {
    /// Attaches a device to the guest while it runs. `answer` is called once, soon or when that is done, by another thread,
    /// which it must not hold up.
    pub(crate) fn attach(
        &self,
        request: AttachRequest,
        answer: impl FnOnce(Result<Attached, Refused>) + Send + 'static,
    ) {
        self.send(Message::Attach(request, Waiting(Some(Waiter::Attach(Box::new(answer))))));
    }

    /// Detaches the device that a function belongs to, with all of its functions, while the guest runs. One that is on its way to the
    /// guest is turned back: a claim, or the mapping of RAM for its DMA, that is under way ends at its next step. `answer` is called as
    /// for [`attach`](Self::attach).
    pub(crate) fn detach(
        &self,
        address: PciAddress,
        how: DetachHow,
        answer: impl FnOnce(Result<DetachedHow, Refused>) + Send + 'static,
    ) {
        self.send(Message::Detach(address, how, Waiting(Some(Waiter::Detach(Box::new(answer))))));
        // That is read before what comes of the step that this ends.
        self.arrivals.turn_back(address);
    }

    /// Resets the guest, as if its button were pressed. `answer` is called as for [`attach`](Self::attach): when it has restarted in
    /// place, or has ended if it is not to be restarted.
    pub(crate) fn reset(&self, answer: impl FnOnce(Result<(), Refused>) + Send + 'static) {
        self.send(Message::Reset(Waiting(Some(Waiter::Reset(Box::new(answer))))));
        // That it has restarted comes behind the message.
        watch::wake(&self.reset);
    }

    /// Whether the guest was asked to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.requested()
    }

    /// Ends the guest; everything is released then.
    pub(crate) fn stop(&self) {
        self.stop.request();
    }

    fn send(&self, message: Message) {
        // What is not heard any more is answered as it is dropped.
        let _ = self.messages.send(message);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("stop", &self.stop).finish_non_exhaustive()
    }
}

/// What an instance hears from other threads.
#[derive(Debug)]
pub(super) enum Message {
    /// Something happened.
    Event(Event),
    Attach(AttachRequest, Waiting),
    Detach(PciAddress, DetachHow, Waiting),
    Reset(Waiting),
    /// The result of a claim, and how long it took.
    Claimed(PciAddress, Result<MadeClaim, ManagerError>, Duration),
}

impl From<Event> for Message {
    fn from(event: Event) -> Self {
        Self::Event(event)
    }
}

/// Who waits for an answer. One that is dropped without any hears that the guest has ended.
pub(super) struct Waiting(Option<Waiter>);

enum Waiter {
    Attach(Box<dyn FnOnce(Result<Attached, Refused>) + Send>),
    Detach(Box<dyn FnOnce(Result<DetachedHow, Refused>) + Send>),
    Reset(Box<dyn FnOnce(Result<(), Refused>) + Send>),
}

impl Waiting {
    fn answer(mut self, answer: Answer) {
        match (self.0.take(), answer) {
            (Some(Waiter::Attach(tell)), Answer::Attach(attached)) => tell(attached),
            (Some(Waiter::Detach(tell)), Answer::Detach(detached)) => tell(detached),
            (Some(Waiter::Reset(tell)), Answer::Reset(reset)) => tell(reset),
            (waiter, _) => self.0 = waiter,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let ended = || Refused::Conflict("the guest has ended, and its devices were released with it".into());
        match self.0.take() {
            Some(Waiter::Attach(tell)) => tell(Err(ended())),
            Some(Waiter::Detach(tell)) => tell(Err(ended())),
            Some(Waiter::Reset(tell)) => tell(Err(ended())),
            None => {}
        }
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waiting")
    }
}

/// The requests that were not answered yet.
#[derive(Debug, Default)]
pub(super) struct Requests {
    waiting: BTreeMap<RequestId, Waiting>,
    next: u64,
}

impl Requests {
    /// Takes a message as what happens.
    pub(super) fn take(&mut self, message: Message) -> Event {
        let id = RequestId(self.next);
        self.next += 1;
        let (event, waiting) = match message {
            Message::Event(event) => return event,
            // Dropping the claim releases it.
            Message::Claimed(address, ..) => return Event::NotClaimed(address),
            Message::Attach(request, waiting) => (Event::Attach(id, request), waiting),
            Message::Detach(address, how, waiting) => (Event::Detach(id, address, how), waiting),
            Message::Reset(waiting) => (Event::Reset(id), waiting),
        };
        self.waiting.insert(id, waiting);
        event
    }

    /// Answers a request.
    pub(super) fn answer(&mut self, id: RequestId, answer: Answer) {
        if let Some(waiting) = self.waiting.remove(&id) {
            waiting.answer(answer);
        }
    }
}
