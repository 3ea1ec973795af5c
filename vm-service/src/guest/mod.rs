//! A guest from its start until all is released: boot, claim, open, attach, end, detach, release; and what is attached and
//! detached meanwhile.
//!
//! What is done when is decided by [`state`], which does nothing itself. An [`Instance`] does what that says, one action after
//! the other except for claims, which a separate thread makes, and reports what came of each; whoever runs it hears of all as [`Progress`]. Instances share nothing: a process
//! may have several, each run by a thread of its own, and any thread asks one through its [`Handle`] or ends it through its
//! [`Stop`].

mod arrivals;
pub mod console;
pub mod control;
mod devices;
pub(crate) mod handle;
mod keeper;
mod process;
mod rom;
pub(crate) mod state;
mod vmm;
mod watch;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use vm_passthrough::PciAddress;

pub(crate) use devices::{DeviceOptions, Devices};
pub(crate) use handle::{Handle, Inbox};
use handle::{Message, Refused, Requests};
use process::{Vmm, late};
pub(crate) use process::{VmmError, VmmOptions};
pub(crate) use rom::RomFile;
use state::{Action, Event, State};
pub(crate) use vmm::main as vmm_main;
use wire::{Make, Order};

use crate::config::GuestConfig;
use crate::os::sandbox::Confinement;
use crate::vmm::{MachineOptions, RunReport, Stop};

/// The longest that a guest may have to let go of a device.
const MAX_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// What happened to an instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress<'a> {
    /// What.
    pub(crate) event: &'a Event,
    /// How long the action took that it answers.
    pub(crate) took: Duration,
    /// Whether what failed is tried once more.
    pub(crate) is_retried: bool,
    /// How far the guest has come with that.
    pub(crate) state: &'a State,
}

/// A guest, and what it needs to live.
pub(crate) struct Instance {
    stop: Stop,
    /// `None` for a guest that gets none. They go before the VMM does.
    devices: Option<Devices>,
    vmm: Arc<Vmm>,
    messages: (Sender<Message>, Receiver<Message>),
    requests: Requests,
    /// Until when the guest has time to let go of a slot.
    deadlines: BTreeMap<PciAddress, Instant>,
    /// Until when the VMM has time to end the guest.
    stopped: Option<Instant>,
    /// Until when it has time to reset the guest.
    reset: Option<Instant>,
}

/// What comes to its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Stopped,
    Reset,
    Slot(PciAddress),
}

impl Instance {
    /// Makes a guest's machine, in a process of its own; no device is touched yet.
    ///
    /// # Errors
    /// When the machine can't be made.
    pub(crate) fn new(
        config: &GuestConfig,
        options: MachineOptions,
        vmm: VmmOptions,
        mut devices: Option<Devices>,
        inbox: Inbox,
    ) -> Result<Self, VmmError> {
        let Inbox { messages, reset, stop, arrivals } = inbox;
        let expected = devices.as_mut().map(|devices| devices.announce(&stop, arrivals)).unwrap_or_default();
        let (config, kvm, on_reboot) = (config.clone(), options.kvm.clone(), options.on_reboot);
        let make = Make { config, kvm, on_reboot, numa: options.numa.clone(), expected };
        let vmm = Arc::new(Vmm::start(vmm, make, options, &stop, reset.as_fd(), messages.0.clone())?);
        if let Some(devices) = &mut devices {
            devices.enter(vmm.clone());
        }
        Ok(Self {
            stop,
            devices,
            vmm,
            messages,
            requests: Requests::default(),
            deadlines: BTreeMap::new(),
            stopped: None,
            reset: None,
        })
    }

    /// How far the process is confined that the guest runs in.
    pub(crate) fn confinement(&self) -> &Confinement {
        self.vmm.confinement()
    }

    /// Runs the guest, from its start until all is released, and tells `observe` how it goes.
    ///
    /// # Errors
    /// All that failed.
    pub(crate) fn run(mut self, mut observe: impl FnMut(Progress<'_>)) -> Result<RunReport, Vec<String>> {
        let mut state = State::new(&self.devices.as_ref().map(Devices::slots).unwrap_or_default());
        let mut answers = VecDeque::from([(Event::Start, Duration::ZERO)]);
        let mut stop_told = false;
        while !state.is_over() {
            let (event, took) = self.next(&mut answers, &mut stop_told);
            match event {
                Event::Reset(_) => {
                    self.reset.get_or_insert(Instant::now() + self.vmm.options().order);
                }
                Event::Restarted | Event::Ended(_) => self.reset = None,
                _ => {}
            }
            let (after, actions) = state.step(&event);
            let is_retried = after.retries(&event);
            state = after;
            observe(Progress { event: &event, took, is_retried, state: &state });
            for action in actions {
                let begun = Instant::now();
                let answer = self.perform(action);
                answers.extend(answer.map(|answer| (answer, begun.elapsed())));
            }
        }
        state.outcome()
    }

    /// What happens next. What comes from other threads comes first: it was before the answer that waits.
    fn next(&mut self, answers: &mut VecDeque<(Event, Duration)>, stop_told: &mut bool) -> (Event, Duration) {
        let none = Duration::ZERO;
        // An earlier claim that covers the function must not be released before this is noted.
        if matches!(answers.front(), Some((Event::Claimed(..), _)))
            && let Some(answer) = answers.pop_front()
        {
            return answer;
        }
        while let Ok(message) = self.messages.1.try_recv() {
            if !matches!(message, Message::Event(Event::Stop)) {
                return self.hear(message);
            }
        }
        if self.stop.requested() && !std::mem::replace(stop_told, true) {
            return (Event::Stop, none);
        }
        if let Some(answer) = answers.pop_front() {
            return answer;
        }
        // Only what the guest does and others ask is waited for. This has a sender too, so there is always one.
        let asked = self.deadlines.iter().map(|(&slot, &until)| (until, Due::Slot(slot)));
        let stopped = self.stopped.map(|until| (until, Due::Stopped));
        let next = asked.chain(stopped).chain(self.reset.map(|until| (until, Due::Reset))).min();
        let message = match next {
            Some((until, _)) => self.messages.1.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => self.messages.1.recv().map_err(RecvTimeoutError::from),
        };
        match (message, next) {
            // It only wakes.
            (Ok(Message::Event(Event::Stop)), _) => self.next(answers, stop_told),
            (Ok(message), _) => self.hear(message),
            (Err(RecvTimeoutError::Timeout), Some((_, due @ (Due::Stopped | Due::Reset)))) => {
                let VmmOptions { order, stop, .. } = *self.vmm.options();
                let (what, time) =
                    if due == Due::Reset { ("reset the guest", order) } else { ("end the guest", stop) };
                // That the guest has ended then is heard as always.
                self.vmm.end_for(late(&what, time));
                (self.stopped, self.reset) = (None, None);
                self.next(answers, stop_told)
            }
            (Err(RecvTimeoutError::Timeout), Some((_, Due::Slot(slot)))) => {
                self.deadlines.remove(&slot);
                let why = format!(
                    "the guest did not let go of {slot} in time, and has it still: see its console, wait longer, or take it by \
                     surprise"
                );
                (Event::Kept(slot, why), none)
            }
            (Err(_), _) => (Event::Stop, none),
        }
    }

    /// Returns the event of a message from another thread, and how long its action took.
    fn hear(&mut self, message: Message) -> (Event, Duration) {
        match (message, &mut self.devices) {
            (Message::Claimed(address, made, took), Some(devices)) => (devices.claimed(address, made), took),
            (message, _) => (self.requests.take(message), Duration::ZERO),
        }
    }

    /// Does what is to be done, and answers what came of it.
    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Boot => return Some(Event::Booted(self.boot())),
            Action::StopGuest => {
                self.stop.request();
                self.stopped = Some(Instant::now() + self.vmm.options().stop);
            }
            Action::DropMachine => {
                self.stopped = None;
                if let Err(error) = self.vmm.order(&Order::DropMachine, &[]) {
                    tracing::debug!("{error}; its machine went with it");
                }
                if let Some(devices) = &mut self.devices {
                    devices.leave();
                }
                return Some(Event::MachineDropped);
            }
            Action::Answer(id, answer) => self.requests.answer(id, answer),
            Action::Ask(slot, deadline) => return self.ask(slot, deadline),
            Action::Unask(slot) => {
                self.deadlines.remove(&slot);
                // One that has gone asks nobody.
                let _ = self.vmm.order(&Order::Unask(slot), &[]);
            }
            Action::ReportError(address, severity) => {
                if let Err(error) = self.vmm.order(&Order::ReportError(address, severity), &[]) {
                    tracing::warn!("the guest is not told of the error of {address}: {error}");
                }
            }
            Action::Explain(request) if self.devices.is_none() => {
                let why = "the guest was started where no PCI bus is, and gets no devices; see that sysfs is mounted in /sys";
                return Some(Event::Explained(request, Err(Refused::Conflict(why.into()))));
            }
            action => {
                if let Action::Unplug(slot) = action {
                    self.deadlines.remove(&slot);
                }
                return self.devices.as_mut()?.perform(action);
            }
        }
        None
    }

    /// Asks the guest to let go of a slot; answers when it can't be asked.
    fn ask(&mut self, slot: PciAddress, deadline: Duration) -> Option<Event> {
        let until = Instant::now() + deadline.min(MAX_DEADLINE);
        let asked = self.deadlines.entry(slot).or_insert(until);
        *asked = until.min(*asked);
        self.vmm.order(&Order::Ask(slot), &[]).err().map(|error| Event::Kept(slot, error))
    }

    /// Has the guest run, with its devices watched as they come.
    ///
    /// # Errors
    /// When this process, or the VMM, has no threads or descriptors left.
    fn boot(&mut self) -> Result<(), String> {
        if let Some(devices) = &mut self.devices {
            devices.watch(self.messages.0.clone())?;
        }
        self.vmm.boot()
    }
}

#[cfg(test)]
mod tests;
