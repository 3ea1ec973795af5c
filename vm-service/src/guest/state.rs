//! What a guest's life is, without living it: [`State::step`] takes what happened and answers what is to be done next. No I/O,
//! no clock, no thread: whoever carries the actions out reports what came of them.
//!
//! ```text
//! function: Idle ─Claim▶ Claimed ─Open▶ Open ─Attach▶ Attached ─Stop▶ Stopped ─Detach▶ Detached ─Close▶ Claimed ─Release▶ Idle
//!                                                        └─ failed ▶ Owed ─Stop, Detach once more▶ Detached, or given up
//! slot:     Booting ─────────────────────┬─▶ There ─Ask▶ Asked ─let go, or by surprise▶ Leaving ─Unplug …▶ gone
//!           Coming ─Explain, Insert … Plug ┘     ◀──── kept ┘
//! machine:  Made ─Boot▶ Running ─Ended▶ Halted ─DropMachine▶ Gone
//! ```
//!
//! * The functions of one device of the host share a slot of the guest: they come and go together, named by the first.
//! * The guest boots first, and what it is to start with comes to it while it runs: the machine holds who reaches for one of
//!   them until all are attached. All are claimed before the first is opened. If one of them fails, the guest ends.
//! * What is attached later is explained and claimed before the guest sees that something is in the slot, and opened and attached
//!   while the guest waits for the link, and for what is there to answer. A failure turns that slot back, and nothing else.
//! * The guest is asked to let go of what is to be detached in order. When it does, or when it does not and somebody wants the
//!   device all the same, the slot is unplugged and its functions released while the guest runs. So is what the host wants back,
//!   and at once what is lost.
//! * A stop, the guest's end or a failure at the start turn everything back, from wherever it has come to. A guest that runs is
//!   stopped first; then the machine goes, which holds the devices open; then all devices are stopped, as functions of one
//!   slot may have no reset but a common one; then each is detached, those first that the host wants back, which waits for them.
//! * Devices are closed when all that leave together are detached. One that the host took away is closed at once.
//! * A claim is released when no other slot has a function of it. What can't be detached or released is tried once more when all
//!   else is released; what fails then is reported, and stays in the ledger.
//! * What is detached before it has come turns back, once the step is over that is under way; a claim and attaching end early.
//! * A claim may wait for drivers and for other processes. Other slots leave the guest meanwhile; only other arrivals, and the
//!   cleanup of a guest that has ended, wait for the claim.
//! * A guest that is to be reset is when it runs again, or has ended if it is not to be restarted.
//! * Every request is answered once: when the device is there, or gone, or back where it was.

use std::time::{Duration, Instant};

use vm_passthrough::PciAddress;
use vm_passthrough::guest::PeerReport;
use vm_passthrough::vfio::{Backend, ErrorSeverity, UncorrectableError};

use super::handle::{Answer, AttachRequest, Attached, DetachHow, DetachedHow, Refused, RequestId};
use crate::deadlines::HOST_WAITS;
use crate::vmm::{End, ExitCounts, RunReport};

/// What happened to a guest. Errors are texts: what failed, where, and what to do. A slot is named by its first function.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Somebody wants the guest.
    Start,
    /// Somebody wants it to end.
    Stop,
    /// Somebody wants a device to come to it.
    Attach(RequestId, AttachRequest),
    /// Somebody wants a device of it.
    Detach(RequestId, PciAddress, DetachHow),
    /// Somebody has reset it.
    Reset(RequestId),
    /// Whether the guest can have a device.
    Explained(AttachRequest, Result<(), Refused>),
    /// A device was claimed: by the claim of this function, which may be an earlier one that covers it.
    Claimed(PciAddress, Result<PciAddress, String>),
    /// It was not, as the guest is to end or somebody has it turned back; nothing of it is changed.
    NotClaimed(PciAddress),
    /// It was opened.
    Opened(PciAddress, Result<Backend, String>),
    /// It was attached, and one of those that the guest starts with is in the machine. One that failed to be may be attached in
    /// part.
    Attached(PciAddress, Result<(), String>),
    /// It was not, for the same reasons.
    NotAttached(PciAddress),
    /// The guest sees that something is in a slot of its, which does not answer yet.
    Inserted(PciAddress, Result<(), String>),
    /// A slot was filled: this is where the guest sees it, as far as it has numbered its buses.
    Plugged(PciAddress, Result<Attached, String>),
    /// The guest let go of a slot.
    LetGo(PciAddress),
    /// It did not, and why.
    Kept(PciAddress, String),
    /// A slot was emptied.
    Unplugged(PciAddress),
    /// The guest was booted: its program is loaded, and it starts then.
    Booted(Result<(), String>),
    /// The guest started, then.
    Started(Instant),
    /// The guest was reset, and runs again.
    Restarted,
    /// What it runs in does not answer.
    Unresponsive,
    /// It does again.
    Responsive,
    /// How far its devices reach each other's BARs by DMA has changed.
    Peers(PeerReport),
    /// The guest does not run any more, or did not start.
    Ended(Result<RunReport, String>),
    /// The host takes a device away, and waits for it.
    WantedBack(PciAddress),
    /// A device does not answer any more, and what shows it.
    Lost(PciAddress, String),
    /// A device had an uncorrectable error.
    Erred(PciAddress, UncorrectableError),
    /// The machine holds no device any more.
    MachineDropped,
    /// A device was stopped, and whether the host wants it back.
    Stopped(PciAddress, bool),
    /// A device was detached.
    Detached(PciAddress, Result<Detached, String>),
    /// A device is not open any more.
    Closed(PciAddress),
    /// The claim of a function was released.
    Released(PciAddress, Result<(), String>),
}

/// How a device was detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detached {
    /// It was reset, or its operator accepted that nothing resets it.
    Reset,
    /// The host takes it away, and the Linux kernel does not reset it meanwhile.
    Unreset,
}

/// What is to be done. An event answers each action except where noted. Nothing else is done before that, except that other
/// slots leave the guest while a claim is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// See whether the guest can have this.
    Explain(AttachRequest),
    /// Claim a device, unless an earlier claim covers it.
    Claim(PciAddress),
    /// Open it.
    Open(PciAddress),
    /// Attach it, and put it into the machine if the guest starts with it.
    Attach(PciAddress),
    /// Have the guest see that the device is in a free slot, where it gets ready.
    Insert(PciAddress),
    /// Have the device answer in its slot.
    Plug(PciAddress),
    /// Ask the guest to let go of a slot within this time. Not awaited: it [does](Event::LetGo), or it does [not](Event::Kept).
    Ask(PciAddress, Duration),
    /// Ask the guest no more. Not answered.
    Unask(PciAddress),
    /// Show the guest that a device had an error. Not answered.
    ReportError(PciAddress, ErrorSeverity),
    /// Take the device out of its slot.
    Unplug(PciAddress),
    /// Let the guest run, and report it when it has [started](Event::Started) and when it [ends](Event::Ended).
    Boot,
    /// End the guest; it [ends](Event::Ended) then. Not answered.
    StopGuest,
    /// Drop the machine.
    DropMachine,
    /// Stop a device, of which the guest has nothing more.
    Stop(PciAddress),
    /// Detach a device.
    Detach(PciAddress),
    /// Let go of a device's file.
    Close(PciAddress),
    /// Release the claim of this function.
    Release(PciAddress),
    /// Answer a request. Not answered itself.
    Answer(RequestId, Answer),
}

impl Action {
    /// Whether nothing else is to be done before it is answered.
    pub(super) fn is_awaited(&self) -> bool {
        !matches!(
            self,
            Self::Ask(..) | Self::Unask(_) | Self::ReportError(..) | Self::StopGuest | Self::Answer(..)
        )
    }
}

impl Event {
    /// The action that it answers.
    fn answers(&self) -> Option<Action> {
        match *self {
            Self::Explained(ref request, _) => Some(Action::Explain(request.clone())),
            Self::Claimed(address, _) | Self::NotClaimed(address) => Some(Action::Claim(address)),
            Self::Opened(address, _) => Some(Action::Open(address)),
            Self::Attached(address, _) | Self::NotAttached(address) => Some(Action::Attach(address)),
            Self::Inserted(slot, _) => Some(Action::Insert(slot)),
            Self::Plugged(slot, _) => Some(Action::Plug(slot)),
            Self::Unplugged(slot) => Some(Action::Unplug(slot)),
            Self::Booted(_) => Some(Action::Boot),
            Self::MachineDropped => Some(Action::DropMachine),
            Self::Stopped(address, _) => Some(Action::Stop(address)),
            Self::Detached(address, _) => Some(Action::Detach(address)),
            Self::Closed(address) => Some(Action::Close(address)),
            Self::Released(address, _) => Some(Action::Release(address)),
            Self::Start
            | Self::Stop
            | Self::Attach(..)
            | Self::Detach(..)
            | Self::Reset(_)
            | Self::LetGo(_)
            | Self::Kept(..)
            | Self::Started(_)
            | Self::Restarted
            | Self::Unresponsive
            | Self::Responsive
            | Self::Peers(_)
            | Self::Ended(_)
            | Self::WantedBack(_)
            | Self::Lost(..)
            | Self::Erred(..) => None,
        }
    }

    /// What it says of a device that was lost, or may not work any more.
    pub(crate) fn loss(&self) -> Option<String> {
        match self {
            Self::WantedBack(address) => Some(format!(
                "the host asked for {address} back: it is unplugged, removed or unbound; the guest has {} s to let go of it",
                HOST_WAITS.as_secs()
            )),
            Self::Lost(address, evidence) => Some(format!(
                "{address} was lost while the guest ran: {evidence}; look at its slot or cable, and at dmesg"
            )),
            Self::Erred(address, UncorrectableError { severity: ErrorSeverity::NonFatal, evidence }) => {
                Some(format!(
                    "{address} had an uncorrectable error of PCI Express that is not fatal: {evidence}; the guest runs on and is told, for \
                 its driver to recover"
                ))
            }
            Self::Erred(address, UncorrectableError { severity: ErrorSeverity::Fatal, evidence }) => {
                Some(format!(
                    "{address} had a fatal error of PCI Express: {evidence}; the guest runs on and is told, for its driver to reset the \
                 device; where it does not, `detach` and `attach` do"
                ))
            }
            Self::Detached(address, Ok(Detached::Unreset)) => Some(format!(
                "{address} was given up without a reset, which the Linux kernel refuses while it takes a device away: \
                 what the guest left in it stays there until it loses power, or is reset when a guest gets it again"
            )),
            _ => None,
        }
    }
}

/// Where a function is on its way to the guest and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing of it is touched.
    Idle,
    /// It is claimed.
    Claimed,
    /// It is open.
    Open,
    /// It is attached.
    Attached,
    /// It is stopped.
    Stopped,
    /// Detaching it failed; it is tried once more.
    Owed,
    /// It is open, and detached as far as it can be.
    Detached,
    /// As [`Detached`](Self::Detached), and the host waits for it.
    GivenUp,
}

#[derive(Clone, Debug)]
struct Function {
    address: PciAddress,
    phase: Phase,
    /// The function whose claim covers it.
    claim: Option<PciAddress>,
    /// Whether the host wants it back.
    wanted: bool,
}

/// The way of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Course {
    /// Towards the guest, which starts with it.
    Booting,
    /// Towards the guest, which runs; with the request until it is explained.
    Coming { request: Option<AttachRequest> },
    /// In the guest.
    There,
    /// The guest was asked to let go of it; whether it is taken if the guest does not.
    Asked { then_surprise: bool },
    /// Out of the guest: by being detached so, or for the reason that is the answer to who attaches it.
    Leaving(Result<DetachedHow, Refused>),
}

/// The functions of one device of the host.
#[derive(Clone, Debug)]
struct Slot {
    functions: Vec<Function>,
    course: Course,
    /// Whether the machine has it, or that it comes.
    plugged: bool,
    /// Whether what failed is being tried once more.
    last_try: bool,
    /// What failed then.
    kept: Vec<String>,
    /// Who wants to have it attached, and then those who want it detached.
    requests: Vec<RequestId>,
}

impl Slot {
    fn new(functions: &[PciAddress], course: Course, requests: Vec<RequestId>) -> Self {
        let function = |&address| Function { address, phase: Phase::Idle, claim: None, wanted: false };
        let plugged = course == Course::Booting;
        // Each once, whoever names one twice.
        let first = |(at, address): &(usize, &PciAddress)| !functions[..*at].contains(address);
        let functions =
            functions.iter().enumerate().filter(first).map(|(_, address)| function(address)).collect();
        Self { functions, course, plugged, last_try: false, kept: Vec::new(), requests }
    }

    fn name(&self) -> Option<PciAddress> {
        self.functions.first().map(|function| function.address)
    }

    fn is_leaving(&self) -> bool {
        matches!(self.course, Course::Leaving(_))
    }

    fn has(&self, address: PciAddress) -> bool {
        self.functions.iter().any(|function| function.address == address)
    }

    fn first(&self, phase: Phase) -> Option<PciAddress> {
        self.functions.iter().find(|function| function.phase == phase).map(|function| function.address)
    }
}

#[derive(Clone, Debug)]
struct Claim {
    target: PciAddress,
    /// Whether releasing it failed; it is tried once more.
    failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machine {
    Made,
    Running,
    /// The guest runs, and was asked to end.
    Stopping,
    Halted,
    Gone,
}

/// Where a guest is in its life.
#[derive(Clone, Debug)]
pub(crate) struct State {
    started: bool,
    /// Whether all is to be turned back.
    ending: bool,
    machine: Machine,
    slots: Vec<Slot>,
    claims: Vec<Claim>,
    /// Who wants the guest reset.
    resets: Vec<RequestId>,
    /// The action that was not answered yet, other than a claim.
    pending: Option<Action>,
    /// The function that is being claimed.
    claiming: Option<PciAddress>,
    /// What is to be done beside, and not awaited.
    beside: Vec<Action>,
    /// Whether, of all that is left at the end, what failed is being tried once more.
    last_try: bool,
    report: RunReport,
    /// Why it could not be started or run on.
    failed: Vec<String>,
    /// What became of devices that were lost.
    lost: Vec<String>,
    /// What could not be released.
    kept: Vec<String>,
}

impl State {
    /// A guest whose machine is made, and which is to start with these devices: the functions of each slot.
    pub(crate) fn new(slots: &[Vec<PciAddress>]) -> Self {
        let slot = |functions: &Vec<_>| Slot::new(functions, Course::Booting, Vec::new());
        Self {
            started: false,
            ending: false,
            machine: Machine::Made,
            slots: slots.iter().map(slot).collect(),
            claims: Vec::new(),
            resets: Vec::new(),
            pending: None,
            claiming: None,
            beside: Vec::new(),
            last_try: false,
            report: RunReport { end: End::Stopped, restarts: 0, exits: ExitCounts::default() },
            failed: Vec::new(),
            lost: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Takes what happened, and answers what is to be done. What nobody was asked for changes nothing.
    pub(crate) fn step(mut self, event: &Event) -> (Self, Vec<Action>) {
        match event.answers() {
            None => {}
            Some(Action::Claim(address)) if self.claiming == Some(address) => self.claiming = None,
            Some(answered) if Some(&answered) == self.pending.as_ref() => self.pending = None,
            Some(_) => return (self, Vec::new()),
        }
        self.note(event);
        let action = if self.started && self.pending.is_none() { self.next() } else { None };
        match action {
            Some(Action::Boot) => self.machine = Machine::Running,
            Some(Action::StopGuest) => self.machine = Machine::Stopping,
            Some(Action::Claim(address)) => self.claiming = Some(address),
            _ => {}
        }
        let mut actions = std::mem::take(&mut self.beside);
        actions.extend(action.clone());
        let is_awaited = |action: &Action| action.is_awaited() && !matches!(action, Action::Claim(_));
        self.pending = self.pending.or(action.filter(is_awaited));
        (self, actions)
    }

    /// Whether it is over: nothing of it is left to do.
    pub(crate) fn is_over(&self) -> bool {
        self.machine == Machine::Gone && self.pending.is_none() && self.claiming.is_none()
    }

    /// Whether this failed, and is tried once more.
    pub(crate) fn retries(&self, event: &Event) -> bool {
        match event {
            Event::Detached(address, Err(_)) => {
                self.function(*address, |function| function.phase == Phase::Owed)
            }
            Event::Released(target, Err(_)) => self.claims.iter().any(|claim| claim.target == *target),
            _ => false,
        }
    }

    /// The functions that the guest has, or that are on their way to it or from it, and where each is.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (PciAddress, Phase)> {
        let functions = self.slots.iter().flat_map(|slot| &slot.functions);
        functions.map(|function| (function.address, function.phase))
    }

    /// How the guest ran, if nothing failed: neither the run nor the end, and no device was lost. Otherwise all that failed.
    pub(crate) fn outcome(self) -> Result<RunReport, Vec<String>> {
        let Self { report, mut failed, lost, kept, .. } = self;
        failed.extend(lost);
        if !kept.is_empty() {
            failed.push(format!("not everything could be released: {}", kept.join("; ")));
        }
        if failed.is_empty() { Ok(report) } else { Err(failed) }
    }

    /// Whether the guest ends because something failed.
    pub(crate) fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Start => self.started = true,
            Event::Stop => self.ending = true,
            Event::NotClaimed(address) => self.ending |= !self.is_leaving(*address),
            Event::Attach(id, request) => self.attach(*id, request),
            Event::Detach(id, address, how) => self.detach(*id, *address, *how),
            Event::Reset(id) if self.is_ending() => {
                let why = "the guest is ending; start it again once it has ended";
                self.answer([(*id, Answer::Reset(Err(Refused::Conflict(why.into()))))]);
            }
            Event::Reset(id) => self.resets.push(*id),
            Event::Explained(request, explained) => {
                let slot = request.functions.first().and_then(|&first| self.slot(first));
                match (slot.map(|slot| &mut slot.course), explained) {
                    (Some(Course::Coming { request }), Ok(())) => *request = None,
                    (Some(course @ Course::Coming { .. }), Err(why)) => {
                        *course = Course::Leaving(Err(why.clone()))
                    }
                    _ => {}
                }
            }
            Event::Claimed(address, Ok(target)) => {
                self.change(*address, |function| {
                    (function.phase, function.claim) = (Phase::Claimed, Some(*target));
                });
                if self.claims.iter().all(|claim| claim.target != *target) {
                    self.claims.push(Claim { target: *target, failed: false });
                }
            }
            Event::Opened(address, Ok(_)) => self.set(*address, Phase::Open),
            Event::Attached(address, attached) => {
                // What of it was done is undone as all is.
                self.set(*address, Phase::Attached);
                if let Err(error) = attached {
                    self.fail_of(*address, error);
                }
            }
            Event::NotAttached(address) => {
                self.set(*address, Phase::Attached);
                self.ending |= !self.is_leaving(*address);
            }
            Event::Claimed(address, Err(error))
            | Event::Inserted(address, Err(error))
            | Event::Opened(address, Err(error))
            | Event::Plugged(address, Err(error)) => self.fail_of(*address, error),
            Event::Inserted(address, Ok(())) => {
                if let Some(slot) = self.slot(*address) {
                    slot.plugged = true;
                }
            }
            Event::Plugged(address, Ok(attached)) => {
                let mut answers = Vec::new();
                if let Some(slot) = self.slot(*address) {
                    if let Course::Leaving(Ok(how)) = &mut slot.course {
                        // The guest has seen it.
                        *how = DetachedHow::Surprise;
                    }
                    if !slot.is_leaving() {
                        slot.course = Course::There;
                        answers.extend(
                            slot.requests.drain(..).map(|id| (id, Answer::Attach(Ok(attached.clone())))),
                        );
                    }
                }
                self.answer(answers);
            }
            Event::LetGo(address) => {
                if let Some(slot) = self.slot(*address)
                    && matches!(slot.course, Course::Asked { .. })
                {
                    slot.course = Course::Leaving(Ok(DetachedHow::Orderly));
                }
            }
            Event::Kept(address, why) => self.kept(*address, why),
            Event::Unplugged(address) => {
                if let Some(slot) = self.slot(*address) {
                    slot.plugged = false;
                }
            }
            Event::Booted(Err(error)) => {
                self.machine = Machine::Halted;
                self.fail(error);
            }
            Event::Ended(ran) => {
                if matches!(self.machine, Machine::Running | Machine::Stopping) {
                    (self.machine, self.ending) = (Machine::Halted, true);
                    match ran {
                        Ok(report) => {
                            self.report = report.clone();
                            if report.end == End::Reset {
                                self.reset(Ok(()));
                            }
                        }
                        Err(error) => {
                            self.fail(error);
                            self.reset(Err(Refused::Failed(error.clone())));
                        }
                    }
                }
            }
            Event::WantedBack(address) => {
                self.change(*address, |function| function.wanted = true);
                self.take(*address, Some(HOST_WAITS));
            }
            Event::Lost(address, _) => {
                self.lost.extend(event.loss());
                self.take(*address, None);
            }
            Event::Restarted => self.reset(Ok(())),
            Event::Booted(Ok(()))
            | Event::Started(_)
            | Event::Unresponsive
            | Event::Responsive
            | Event::Peers(_) => {}
            Event::Erred(address, error) => {
                let has_it = |slot: &mut Slot| matches!(slot.course, Course::There | Course::Asked { .. });
                if self.machine == Machine::Running && self.slot(*address).is_some_and(has_it) {
                    self.beside.push(Action::ReportError(*address, error.severity));
                }
            }
            Event::MachineDropped => {
                self.machine = Machine::Gone;
                self.reset(Err(Refused::Conflict("the guest ended before it was reset".into())));
                self.slots.iter_mut().for_each(|slot| slot.plugged = false);
            }
            Event::Stopped(address, wanted) => self.change(*address, |function| {
                function.phase = Phase::Stopped;
                function.wanted |= wanted;
            }),
            Event::Detached(address, Ok(Detached::Reset)) => self.set(*address, Phase::Detached),
            Event::Detached(address, Ok(Detached::Unreset)) => self.set(*address, Phase::GivenUp),
            Event::Detached(address, Err(error)) => {
                let is_it = |function: &Function| function.address == *address;
                let is_last = self.is_last_try_of(is_it);
                self.set(*address, if is_last { Phase::Detached } else { Phase::Owed });
                if is_last {
                    self.keep(is_it, error);
                }
            }
            Event::Closed(address) => self.set(*address, Phase::Claimed),
            Event::Released(target, released) => self.released(*target, released),
        }
    }

    /// Answers who wants the guest reset.
    fn reset(&mut self, reset: Result<(), Refused>) {
        let resets = std::mem::take(&mut self.resets);
        self.answer(resets.into_iter().map(|id| (id, Answer::Reset(reset.clone()))));
    }

    fn attach(&mut self, id: RequestId, request: &AttachRequest) {
        let is_there = |address: &&PciAddress| self.slots.iter().any(|slot| slot.has(**address));
        let refused = if self.is_ending() {
            Refused::Conflict("the guest is ending; attach to it once it was started again".into())
        } else if let Some(address) = request.functions.iter().find(is_there) {
            Refused::Conflict(format!(
                "the guest has {address} already, or it is on its way; see `vm-service guests`"
            ))
        } else if request.functions.is_empty() {
            Refused::NotFound("no function is named that is to be attached".into())
        } else {
            let course = Course::Coming { request: Some(request.clone()) };
            self.slots.push(Slot::new(&request.functions, course, vec![id]));
            return;
        };
        self.answer([(id, Answer::Attach(Err(refused)))]);
    }

    fn detach(&mut self, id: RequestId, address: PciAddress, how: DetachHow) {
        let ending = self.is_ending();
        let (mut asks, mut turned_back) = (None, Vec::new());
        let refused = match self.slot(address) {
            _ if ending => {
                Some(Refused::Conflict(format!("the guest is ending, and {address} is released with it")))
            }
            None => Some(Refused::NotFound(format!("the guest has no {address}; see `vm-service guests`"))),
            Some(slot) => match (&slot.course, how) {
                (Course::There, DetachHow::Orderly { deadline, then_surprise }) => {
                    slot.course = Course::Asked { then_surprise };
                    slot.requests.push(id);
                    asks = slot.name().map(|name| Action::Ask(name, deadline));
                    None
                }
                (Course::There | Course::Asked { .. }, DetachHow::Surprise) => {
                    slot.course = Course::Leaving(Ok(DetachedHow::Surprise));
                    slot.requests.push(id);
                    None
                }
                (Course::Asked { .. }, DetachHow::Orderly { .. }) => Some(Refused::Conflict(format!(
                    "the guest is asked for {address} already; wait, or take it by surprise"
                ))),
                (Course::Coming { .. }, how) => {
                    let how = match how {
                        DetachHow::Orderly { .. } => DetachedHow::Orderly,
                        DetachHow::Surprise => DetachedHow::Surprise,
                    };
                    slot.course = Course::Leaving(Ok(how));
                    turned_back = std::mem::replace(&mut slot.requests, vec![id]);
                    None
                }
                (Course::Booting, _) => Some(Refused::Conflict(format!(
                    "{address} is on its way to the guest, which starts with it; detach it once it is attached, or stop the guest"
                ))),
                (Course::Leaving(_), _) => Some(Refused::Conflict(format!(
                    "{address} is on its way out of the guest; wait until it is back"
                ))),
            },
        };
        self.beside.extend(asks);
        let why = || Refused::Conflict(format!("{address} was detached before it had come to the guest"));
        self.answer(turned_back.into_iter().map(|id| (id, Answer::Attach(Err(why())))));
        self.answer(refused.map(|refused| (id, Answer::Detach(Err(refused)))));
    }

    /// The guest does not let go of a slot.
    fn kept(&mut self, address: PciAddress, why: &str) {
        let Some(slot) = self.slot(address) else { return };
        let Course::Asked { then_surprise } = slot.course else { return };
        if then_surprise {
            slot.course = Course::Leaving(Ok(DetachedHow::Surprise));
            return;
        }
        slot.course = Course::There;
        let refused: Vec<_> = std::mem::take(&mut slot.requests);
        let refuse = |id| (id, Answer::Detach(Err(Refused::Failed(why.to_owned()))));
        self.beside.push(Action::Unask(address));
        self.answer(refused.into_iter().map(refuse));
    }

    /// Takes a slot from the guest, which has this time to let go of it, if any.
    fn take(&mut self, address: PciAddress, deadline: Option<Duration>) {
        let Some(slot) = self.slot(address) else { return };
        match (&slot.course, deadline) {
            (Course::There | Course::Asked { .. }, Some(deadline)) => {
                slot.course = Course::Asked { then_surprise: true };
                let asks = slot.name().map(|name| Action::Ask(name, deadline));
                self.beside.extend(asks.filter(|_| !self.is_ending()));
            }
            (Course::There | Course::Asked { .. }, None) => {
                slot.course = Course::Leaving(Ok(DetachedHow::Surprise));
            }
            (Course::Booting | Course::Coming { .. }, _) => {
                let why =
                    format!("{address} was lost on its way to the guest, or the host asked for it back");
                slot.course = Course::Leaving(Err(Refused::Failed(why)));
            }
            (Course::Leaving(_), _) => {}
        }
    }

    fn released(&mut self, target: PciAddress, released: &Result<(), String>) {
        let has_it = |function: &Function| function.claim == Some(target);
        let is_last = self.is_last_try_of(has_it);
        if let Err(error) = released {
            if !is_last {
                let claim = self.claims.iter_mut().find(|claim| claim.target == target);
                return claim.into_iter().for_each(|claim| claim.failed = true);
            }
            self.keep(has_it, error);
        }
        self.claims.retain(|claim| claim.target != target);
        for function in self.slots.iter_mut().flat_map(|slot| &mut slot.functions) {
            if function.claim == Some(target) {
                (function.phase, function.claim) = (Phase::Idle, None);
            }
        }
    }

    fn next(&mut self) -> Option<Action> {
        if !self.ending { self.forward() } else { self.back() }
    }

    /// Towards a guest that runs, and has its devices.
    fn forward(&mut self) -> Option<Action> {
        if self.machine == Machine::Made {
            return Some(Action::Boot);
        }
        let go = self.give_back();
        if self.claiming.is_some() {
            return go;
        }
        go.or_else(|| self.start_with()).or_else(|| self.slots.iter().find_map(come))
    }

    /// The next step of those that leave a guest that runs. What is over is answered.
    fn give_back(&mut self) -> Option<Action> {
        let claiming = self.claiming;
        // A slot that is being claimed leaves when the claim has ended.
        let leaves = |slot: &Slot| slot.is_leaving() && !claiming.is_some_and(|address| slot.has(address));
        while let Some(at) = self.slots.iter().position(leaves) {
            let name = self.slots[at].name();
            let is_it = |slot: &Slot| slot.name() == name;
            if let Some(action) = self.let_go(is_it, self.slots[at].last_try) {
                return Some(action);
            }
            if !std::mem::replace(&mut self.slots[at].last_try, true) {
                continue;
            }
            let slot = self.slots.remove(at);
            self.finish(slot);
        }
        None
    }

    /// Towards a guest that has what it starts with.
    fn start_with(&mut self) -> Option<Action> {
        let booting = || self.slots.iter().filter(|slot| slot.course == Course::Booting);
        let first = |phase| booting().find_map(|slot| slot.first(phase));
        let next = first(Phase::Idle).map(Action::Claim);
        let next = next.or_else(|| first(Phase::Open).map(Action::Attach));
        let next = next.or_else(|| first(Phase::Claimed).map(Action::Open));
        if next.is_none() {
            let booting = self.slots.iter_mut().filter(|slot| slot.course == Course::Booting);
            booting.for_each(|slot| slot.course = Course::There);
        }
        next
    }

    /// Towards one of which nothing is left.
    fn back(&mut self) -> Option<Action> {
        match self.machine {
            Machine::Running => return Some(Action::StopGuest),
            Machine::Stopping => return None,
            _ if self.claiming.is_some() => return None,
            Machine::Made | Machine::Halted => return Some(Action::DropMachine),
            Machine::Gone => {}
        }
        let action = self.let_go(|_| true, self.last_try);
        if action.is_some() {
            return action;
        }
        if !std::mem::replace(&mut self.last_try, true) {
            return self.back();
        }
        for slot in std::mem::take(&mut self.slots) {
            self.finish(slot);
        }
        None
    }

    /// What is to be done next to have nothing of these slots any more, in this try.
    fn let_go(&self, leaves: impl Fn(&Slot) -> bool, last_try: bool) -> Option<Action> {
        let slots = || self.slots.iter().filter(|slot| leaves(slot));
        if let Some(slot) = slots().find(|slot| slot.plugged) {
            return slot.name().map(Action::Unplug);
        }
        let first = |phase| slots().find_map(|slot| slot.first(phase));
        if let Some(address) = first(if last_try { Phase::Owed } else { Phase::Attached }) {
            return Some(Action::Stop(address));
        }
        if let Some(address) = first(Phase::GivenUp) {
            return Some(Action::Close(address));
        }
        let functions = slots().flat_map(|slot| &slot.functions);
        let stopped: Vec<_> = functions.filter(|function| function.phase == Phase::Stopped).collect();
        if let Some(function) = stopped.iter().rev().find(|function| function.wanted).or(stopped.last()) {
            return Some(Action::Detach(function.address));
        }
        if let Some(address) = first(Phase::Open).or_else(|| first(Phase::Detached)) {
            return Some(Action::Close(address));
        }
        let is_free = |target| {
            let users = self
                .slots
                .iter()
                .flat_map(|slot| slot.functions.iter().map(move |function| (slot, function)));
            let mut users = users.filter(|(_, function)| function.claim == Some(target)).peekable();
            users.peek().is_some()
                && users.all(|(slot, function)| leaves(slot) && function.phase == Phase::Claimed)
        };
        let mut claims = self.claims.iter().filter(|claim| last_try || !claim.failed);
        claims.find(|claim| is_free(claim.target)).map(|claim| Action::Release(claim.target))
    }

    /// Answers who waits for a slot that is gone.
    fn finish(&mut self, slot: Slot) {
        let Slot { course, requests, kept, .. } = slot;
        let failed = (!kept.is_empty())
            .then(|| Refused::Failed(format!("not everything could be released: {}", kept.join("; "))));
        let answers: Vec<_> = match course {
            Course::Leaving(Ok(how)) => {
                let detached = failed.map_or(Ok(how), Err);
                requests.into_iter().map(|id| (id, Answer::Detach(detached.clone()))).collect()
            }
            Course::Leaving(Err(why)) => {
                requests.into_iter().map(|id| (id, Answer::Attach(Err(why.clone())))).collect()
            }
            Course::Booting | Course::Coming { .. } => {
                let ended = || Refused::Conflict("the guest ended before the device had come to it".into());
                requests.into_iter().map(|id| (id, Answer::Attach(Err(ended())))).collect()
            }
            Course::There | Course::Asked { .. } => {
                let ended =
                    || Refused::Conflict("the guest ended, and its devices were released with it".into());
                requests.into_iter().map(|id| (id, Answer::Detach(Err(ended())))).collect()
            }
        };
        self.answer(answers);
    }

    fn answer(&mut self, answers: impl IntoIterator<Item = (RequestId, Answer)>) {
        self.beside.extend(answers.into_iter().map(|(id, answer)| Action::Answer(id, answer)));
    }

    fn is_ending(&self) -> bool {
        self.ending || matches!(self.machine, Machine::Stopping | Machine::Halted | Machine::Gone)
    }

    /// Whether a function is on its way out of the guest.
    fn is_leaving(&self, address: PciAddress) -> bool {
        self.slots.iter().any(|slot| slot.has(address) && slot.is_leaving())
    }

    fn slot(&mut self, address: PciAddress) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.has(address))
    }

    fn function(&self, address: PciAddress, is: impl Fn(&Function) -> bool) -> bool {
        let mut functions = self.slots.iter().flat_map(|slot| &slot.functions);
        functions.any(|function| function.address == address && is(function))
    }

    fn change(&mut self, address: PciAddress, change: impl FnOnce(&mut Function)) {
        let mut functions = self.slots.iter_mut().flat_map(|slot| &mut slot.functions);
        if let Some(function) = functions.find(|function| function.address == address) {
            change(function);
        }
    }

    fn set(&mut self, address: PciAddress, phase: Phase) {
        self.change(address, |function| function.phase = phase);
    }

    /// Whether what fails now of such a function is not tried again.
    fn is_last_try_of(&self, is_of: impl Fn(&Function) -> bool + Copy) -> bool {
        let mut slots = self.slots.iter().filter(|slot| slot.functions.iter().any(is_of));
        self.last_try || slots.any(|slot| slot.is_leaving() && slot.last_try)
    }

    /// Notes what could not be undone of such a function.
    fn keep(&mut self, is_of: impl Fn(&Function) -> bool + Copy, error: &str) {
        self.kept.push(error.to_owned());
        let slots = self.slots.iter_mut().filter(|slot| slot.functions.iter().any(is_of));
        slots.for_each(|slot| slot.kept.push(error.to_owned()));
    }

    /// Notes why the guest can't be started or run on.
    fn fail(&mut self, error: &str) {
        // Of a VMM that has gone that is why it ended, and why its device did not come.
        if !self.failed.iter().any(|failed| failed == error) {
            self.failed.push(error.to_owned());
        }
        self.ending = true;
    }

    /// Notes why a function does not come to the guest.
    fn fail_of(&mut self, address: PciAddress, error: &str) {
        match self.slot(address).map(|slot| &mut slot.course) {
            Some(course @ Course::Coming { .. }) => {
                *course = Course::Leaving(Err(Refused::Failed(error.to_owned())))
            }
            // It is on its way back already.
            Some(Course::Leaving(_)) => {}
            _ => self.fail(error),
        }
    }
}

/// The next step of a slot that comes to a guest that runs.
fn come(slot: &Slot) -> Option<Action> {
    let Course::Coming { request } = &slot.course else { return None };
    if let Some(request) = request {
        return Some(Action::Explain(request.clone()));
    }
    let next = slot.first(Phase::Idle).map(Action::Claim);
    let next = next.or_else(|| slot.name().filter(|_| !slot.plugged).map(Action::Insert));
    let next = next.or_else(|| slot.first(Phase::Claimed).map(Action::Open));
    let next = next.or_else(|| slot.first(Phase::Open).map(Action::Attach));
    next.or_else(|| slot.name().map(Action::Plug))
}

#[cfg(test)]
mod tests;
