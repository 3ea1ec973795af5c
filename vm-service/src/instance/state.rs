//! What a guest's life is, without living it: [`State::step`] takes what happened and answers what is to be done next. No I/O,
//! no clock, no thread: whoever carries the actions out reports what came of them.
//!
//! ```text
//! device:   Idle ─Claim▶ Claimed ─Open▶ Open ─Attach▶ Attached ─Detach▶ Detached ─Close▶ Claimed ─Release▶ Idle
//!                                                        └─ failed ▶ Owed ─Detach once more▶ Detached, or given up
//! machine:  Made ─Boot▶ Running ─Ended▶ Halted ─DropMachine▶ Gone
//! ```
//!
//! * The guest boots first, and its devices come to it while it runs: the machine holds who reaches for one of them until all
//!   are attached. All are claimed before the first is opened.
//! * A failure, a stop or the guest's end turns everything back, from wherever it has come to. A guest that runs is stopped
//!   first; then the machine goes, which holds the devices open; then all devices are stopped, as functions of one slot may
//!   have no reset but a common one; then each is detached, those first that the host wants back, which waits for them.
//! * Devices are closed when all are detached. One that the host took away is closed at once.
//! * A claim is released when none of its functions is open. What can't be detached or released is tried once more when all
//!   else is released; what fails then is reported, and stays in the ledger.

use std::time::Instant;

use vm_passthrough::PciAddress;
use vm_passthrough::vfio::Backend;

use crate::vmm::{End, ExitCounts, RunReport};

/// What happened to a guest. Errors are texts: what failed, where, and what to do.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Somebody wants the guest.
    Start,
    /// Somebody wants it to end.
    Stop,
    /// A device was claimed: by the claim of this function, which may be an earlier one that covers it.
    Claimed(PciAddress, Result<PciAddress, String>),
    /// It was not, as the guest is to end; nothing of it is changed.
    NotClaimed(PciAddress),
    /// It was opened.
    Opened(PciAddress, Result<Backend, String>),
    /// It was attached, and is in the machine. One that failed to be may be attached in part.
    Attached(PciAddress, Result<(), String>),
    /// The guest was booted: its program is loaded, and it starts then.
    Booted(Result<(), String>),
    /// The guest started, then.
    Started(Instant),
    /// The guest does not run any more, or did not start.
    Ended(Result<RunReport, String>),
    /// The host takes a device away, and waits for it.
    WantedBack(PciAddress),
    /// A device does not answer any more, and what shows it.
    Lost(PciAddress, String),
    /// The machine holds no device any more.
    MachineDropped,
    /// The devices were stopped. The host wants these of them back.
    DevicesStopped(Vec<PciAddress>),
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

/// What is to be done. Each but the one that says otherwise is answered by an event, and nothing else is to be done meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Claim a device, unless an earlier claim covers it.
    Claim(PciAddress),
    /// Open it.
    Open(PciAddress),
    /// Attach it, and put it into the machine.
    Attach(PciAddress),
    /// Let the guest run, and report it when it has [started](Event::Started) and when it [ends](Event::Ended).
    Boot,
    /// End the guest; it [ends](Event::Ended) then.
    StopGuest,
    /// Drop the machine.
    DropMachine,
    /// Stop all devices that are open.
    StopDevices,
    /// Detach a device.
    Detach(PciAddress),
    /// Let go of a device's file.
    Close(PciAddress),
    /// Release the claim of this function.
    Release(PciAddress),
}

impl Event {
    /// The action that it answers.
    fn answers(&self) -> Option<Action> {
        match *self {
            Self::Claimed(address, _) | Self::NotClaimed(address) => Some(Action::Claim(address)),
            Self::Opened(address, _) => Some(Action::Open(address)),
            Self::Attached(address, _) => Some(Action::Attach(address)),
            Self::Booted(_) => Some(Action::Boot),
            Self::MachineDropped => Some(Action::DropMachine),
            Self::DevicesStopped(_) => Some(Action::StopDevices),
            Self::Detached(address, _) => Some(Action::Detach(address)),
            Self::Closed(address) => Some(Action::Close(address)),
            Self::Released(address, _) => Some(Action::Release(address)),
            Self::Start
            | Self::Stop
            | Self::Started(_)
            | Self::Ended(_)
            | Self::WantedBack(_)
            | Self::Lost(..) => None,
        }
    }

    /// What it says of a device that was lost.
    pub(crate) fn loss(&self) -> Option<String> {
        match self {
            Self::WantedBack(address) => Some(format!(
                "the host asked for {address} back: it is unplugged, removed or unbound; the guest was stopped"
            )),
            Self::Lost(address, evidence) => Some(format!(
                "{address} was lost while the guest ran: {evidence}; look at its slot or cable, and at dmesg"
            )),
            Self::Detached(address, Ok(Detached::Unreset)) => Some(format!(
                "{address} was given up without a reset, which the Linux kernel refuses while it takes a device away: \
                 what the guest left in it stays there until it loses power, or is reset when a guest gets it again"
            )),
            _ => None,
        }
    }
}

/// Where a device is on its way to the guest and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Claimed,
    Open,
    Attached,
    /// Detaching it failed; it is tried once more.
    Owed,
    /// It is open, and detached as far as it can be.
    Detached,
    /// As [`Detached`](Self::Detached), and the host waits for it.
    GivenUp,
}

#[derive(Clone, Debug)]
struct Device {
    address: PciAddress,
    phase: Phase,
    /// The function whose claim covers it.
    claim: Option<PciAddress>,
    /// Whether the host wants it back.
    wanted: bool,
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
    devices: Vec<Device>,
    claims: Vec<Claim>,
    /// The action that was not answered yet.
    pending: Option<Action>,
    /// Whether what failed is being tried once more.
    last_try: bool,
    /// Whether the devices were stopped since this try began.
    devices_stopped: bool,
    report: RunReport,
    /// Why it could not be started or run on.
    failed: Vec<String>,
    /// What became of devices that were lost.
    lost: Vec<String>,
    /// What could not be given back.
    kept: Vec<String>,
}

impl State {
    /// A guest whose machine is made, and which is to get these devices.
    pub(crate) fn new(devices: &[PciAddress]) -> Self {
        let device = |&address| Device { address, phase: Phase::Idle, claim: None, wanted: false };
        Self {
            started: false,
            ending: false,
            machine: Machine::Made,
            devices: devices.iter().map(device).collect(),
            claims: Vec::new(),
            pending: None,
            last_try: false,
            devices_stopped: false,
            report: RunReport { end: End::Stopped, restarts: 0, exits: ExitCounts::default() },
            failed: Vec::new(),
            lost: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Takes what happened, and answers what is to be done. What nobody was asked for changes nothing.
    pub(crate) fn step(mut self, event: &Event) -> (Self, Vec<Action>) {
        let answered = event.answers();
        if answered.is_some() && answered != self.pending {
            return (self, Vec::new());
        }
        self.pending = self.pending.filter(|_| answered.is_none());
        self.note(event);
        let action = if self.started && self.pending.is_none() { self.next() } else { None };
        match action {
            Some(Action::Boot) => self.machine = Machine::Running,
            Some(Action::StopGuest) => self.machine = Machine::Stopping,
            _ => {}
        }
        self.pending = self.pending.or(action.filter(|action| *action != Action::StopGuest));
        (self, action.into_iter().collect())
    }

    /// Whether it is over: nothing of it is left to do.
    pub(crate) fn is_over(&self) -> bool {
        self.machine == Machine::Gone && self.pending.is_none()
    }

    /// Whether this failed, and is tried once more.
    pub(crate) fn retries(&self, event: &Event) -> bool {
        let failed = matches!(event, Event::Detached(_, Err(_)) | Event::Released(_, Err(_)));
        failed && !self.last_try
    }

    /// How the guest ran, if nothing failed: neither the run nor the end, and no device was lost. Otherwise all that failed.
    pub(crate) fn outcome(self) -> Result<RunReport, Vec<String>> {
        let Self { report, mut failed, lost, kept, .. } = self;
        failed.extend(lost);
        if !kept.is_empty() {
            failed.push(format!("not everything could be given back: {}", kept.join("; ")));
        }
        if failed.is_empty() { Ok(report) } else { Err(failed) }
    }

    fn note(&mut self, event: &Event) {
        if let Some(loss) = event.loss() {
            self.lost.push(loss);
        }
        match event {
            Event::Start => self.started = true,
            Event::Stop | Event::NotClaimed(_) => self.ending = true,
            Event::Claimed(address, Ok(target)) => {
                if let Some(device) = self.device(*address) {
                    (device.phase, device.claim) = (Phase::Claimed, Some(*target));
                }
                if self.claims.iter().all(|claim| claim.target != *target) {
                    self.claims.push(Claim { target: *target, failed: false });
                }
            }
            Event::Opened(address, Ok(_)) => self.set(*address, Phase::Open),
            Event::Attached(address, attached) => {
                // What of it was done is undone as all is.
                self.set(*address, Phase::Attached);
                if let Err(error) = attached {
                    self.fail(error);
                }
            }
            Event::Claimed(_, Err(error)) | Event::Opened(_, Err(error)) => self.fail(error),
            Event::Booted(Err(error)) => {
                self.machine = Machine::Halted;
                self.fail(error);
            }
            Event::Ended(ran) => {
                if matches!(self.machine, Machine::Running | Machine::Stopping) {
                    (self.machine, self.ending) = (Machine::Halted, true);
                    match ran {
                        Ok(report) => self.report = report.clone(),
                        Err(error) => self.fail(error),
                    }
                }
            }
            Event::WantedBack(address) => {
                self.ending = true;
                self.want([*address]);
            }
            Event::Booted(Ok(())) | Event::Started(_) | Event::Lost(..) => {}
            Event::MachineDropped => self.machine = Machine::Gone,
            Event::DevicesStopped(wanted) => {
                self.devices_stopped = true;
                self.want(wanted.iter().copied());
            }
            Event::Detached(address, Ok(Detached::Reset)) => self.set(*address, Phase::Detached),
            Event::Detached(address, Ok(Detached::Unreset)) => self.set(*address, Phase::GivenUp),
            Event::Detached(address, Err(error)) => {
                self.set(*address, if self.last_try { Phase::Detached } else { Phase::Owed });
                self.keep(error);
            }
            Event::Closed(address) => self.set(*address, Phase::Claimed),
            Event::Released(target, released) => {
                match self.claims.iter_mut().find(|claim| claim.target == *target) {
                    Some(claim) if released.is_err() && !self.last_try => claim.failed = true,
                    _ => self.claims.retain(|claim| claim.target != *target),
                }
                if let Err(error) = released {
                    self.keep(error);
                }
            }
        }
    }

    fn next(&mut self) -> Option<Action> {
        if !self.ending { self.forward() } else { self.back() }
    }

    /// Towards a guest that runs, and has its devices.
    fn forward(&self) -> Option<Action> {
        if self.machine == Machine::Made {
            return Some(Action::Boot);
        }
        let first = |phase| self.devices.iter().find(|device| device.phase == phase);
        let next = first(Phase::Idle).map(|device| Action::Claim(device.address));
        let next = next.or_else(|| first(Phase::Open).map(|device| Action::Attach(device.address)));
        next.or_else(|| first(Phase::Claimed).map(|device| Action::Open(device.address)))
    }

    /// Towards one of which nothing is left.
    fn back(&mut self) -> Option<Action> {
        match self.machine {
            Machine::Running => return Some(Action::StopGuest),
            Machine::Stopping => return None,
            Machine::Made | Machine::Halted => return Some(Action::DropMachine),
            Machine::Gone => {}
        }
        let action = self.let_go();
        if action.is_some() || self.last_try {
            return action;
        }
        (self.last_try, self.devices_stopped) = (true, false);
        self.let_go()
    }

    /// What is to be done next to have no device any more, in this try.
    fn let_go(&self) -> Option<Action> {
        let attached = if self.last_try { Phase::Owed } else { Phase::Attached };
        let mut left = self.devices.iter().rev().filter(|device| device.phase == attached);
        if !self.devices_stopped && left.clone().next().is_some() {
            return Some(Action::StopDevices);
        }
        let first = |phase| self.devices.iter().find(|device| device.phase == phase);
        if let Some(device) = first(Phase::GivenUp) {
            return Some(Action::Close(device.address));
        }
        if let Some(device) = left.clone().find(|device| device.wanted).or_else(|| left.next()) {
            return Some(Action::Detach(device.address));
        }
        if let Some(device) = first(Phase::Open).or_else(|| first(Phase::Detached)) {
            return Some(Action::Close(device.address));
        }
        let is_open = |target| {
            let mut devices = self.devices.iter().filter(|device| device.claim == Some(target));
            devices.any(|device| device.phase != Phase::Claimed)
        };
        let mut claims = self.claims.iter().filter(|claim| self.last_try || !claim.failed);
        claims.find(|claim| !is_open(claim.target)).map(|claim| Action::Release(claim.target))
    }

    fn device(&mut self, address: PciAddress) -> Option<&mut Device> {
        self.devices.iter_mut().find(|device| device.address == address)
    }

    fn set(&mut self, address: PciAddress, phase: Phase) {
        if let Some(device) = self.device(address) {
            device.phase = phase;
        }
    }

    fn want(&mut self, addresses: impl IntoIterator<Item = PciAddress>) {
        for address in addresses {
            if let Some(device) = self.device(address) {
                device.wanted = true;
            }
        }
    }

    /// Notes why the guest can't be started or run on.
    fn fail(&mut self, error: &str) {
        self.failed.push(error.to_owned());
        self.ending = true;
    }

    /// Notes what could not be given back, once it is not tried again.
    fn keep(&mut self, error: &str) {
        if self.last_try {
            self.kept.push(error.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
