//! A guest from its start until all is given back: boot, claim, open, attach, end, detach, release; and what is attached and
//! detached meanwhile.
//!
//! What is done when is decided by [`state`], which does nothing itself. An [`Instance`] does what that says, one action after
//! the other, and reports what came of each; whoever runs it hears of all as [`Progress`]. Instances share nothing: a process
//! may have several, each run by a thread of its own, and any thread asks one through its [`Handle`] or ends it through its
//! [`Stop`].

mod devices;
pub(crate) mod handle;
mod keeper;
pub(crate) mod state;
mod watch;

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use vm_passthrough::PciAddress;

pub(crate) use devices::{DeviceOptions, Devices};
pub(crate) use handle::Handle;
use handle::{Message, Refused, Requests};
use state::{Action, Event, State};

use crate::config::GuestConfig;
use crate::vmm::{GuestAnswer, Machine, MachineError, MachineHandle, MachineOptions, RunReport, Stop};

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
    /// `None` while the guest runs, and once it is dropped.
    machine: Option<Machine>,
    handle: MachineHandle,
    /// The thread in which the guest runs.
    running: Option<JoinHandle<Machine>>,
    /// `None` for a guest that gets none.
    devices: Option<Devices>,
    messages: (Sender<Message>, Receiver<Message>),
    requests: Requests,
    /// Until when the guest has time to let go of a slot.
    deadlines: BTreeMap<PciAddress, Instant>,
}

impl Instance {
    /// Makes a guest's machine; no device is touched yet. `stop` ends the guest whenever it is requested.
    ///
    /// # Errors
    /// When the machine can't be made.
    pub(crate) fn new(
        config: &GuestConfig,
        options: MachineOptions,
        mut devices: Option<Devices>,
        stop: &Stop,
    ) -> Result<Self, MachineError> {
        let machine = Machine::new(config, MachineOptions { stop: Some(stop.clone()), ..options })?;
        devices.as_mut().map_or(Ok(()), |devices| devices.announce(&machine, stop))?;
        Ok(Self {
            stop: stop.clone(),
            handle: machine.handle(),
            machine: Some(machine),
            running: None,
            devices,
            messages: channel(),
            requests: Requests::default(),
            deadlines: BTreeMap::new(),
        })
    }

    /// What asks of the guest, from any thread, from now on.
    pub(crate) fn handle(&self) -> Handle {
        Handle::new(self.messages.0.clone(), self.handle.clone(), self.stop.clone())
    }

    /// Runs the guest, from its start until all is given back, and tells `observe` how it goes.
    ///
    /// # Errors
    /// All that failed.
    pub(crate) fn run(mut self, mut observe: impl FnMut(Progress<'_>)) -> Result<RunReport, Vec<String>> {
        let mut state = State::new(&self.devices.as_ref().map(Devices::slots).unwrap_or_default());
        let mut answers = VecDeque::from([(Event::Start, Duration::ZERO)]);
        let mut stop_told = false;
        while !state.is_over() {
            let (event, took) = self.next(&mut answers, &mut stop_told);
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
        if let Ok(message) = self.messages.1.try_recv() {
            return (self.requests.take(message), none);
        }
        if self.stop.requested() && !std::mem::replace(stop_told, true) {
            return (Event::Stop, none);
        }
        if let Some(answer) = answers.pop_front() {
            return answer;
        }
        // Only what the guest does and others ask is waited for. This has a sender too, so there is always one.
        let next =
            self.deadlines.iter().min_by_key(|(_, until)| **until).map(|(&slot, &until)| (slot, until));
        let message = match next {
            Some((_, until)) => self.messages.1.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => self.messages.1.recv().map_err(RecvTimeoutError::from),
        };
        match (message, next) {
            (Ok(message), _) => (self.requests.take(message), none),
            (Err(RecvTimeoutError::Timeout), Some((slot, _))) => {
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

    /// Does what is to be done, and answers what came of it.
    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Boot => return Some(Event::Booted(self.boot())),
            Action::StopGuest => self.stop.request(),
            Action::DropMachine => {
                drop(self.running.take().map(JoinHandle::join));
                drop(self.machine.take());
                if let Some(devices) = &mut self.devices {
                    devices.leave();
                }
                return Some(Event::MachineDropped);
            }
            Action::Answer(id, answer) => self.requests.answer(id, answer),
            Action::Ask(slot, deadline) => return self.ask(slot, deadline),
            Action::Unask(slot) => {
                self.deadlines.remove(&slot);
                self.handle.unask(slot);
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
        let messages = self.messages.0.clone();
        let answer = move |answer| {
            let event = match answer {
                GuestAnswer::LetGo => Event::LetGo(slot),
                GuestAnswer::Kept => Event::Kept(
                    slot,
                    format!(
                        "the guest was about to let go of {slot}, and has kept it; see its console, or take it by surprise"
                    ),
                ),
                GuestAnswer::Deaf => Event::Kept(
                    slot,
                    format!(
                        "the guest can't be asked for {slot}, as nothing in it drives its slots (a Linux kernel does with \
                         CONFIG_HOTPLUG_PCI_PCIE, once it has started); take it by surprise"
                    ),
                ),
            };
            // It fails only when nobody is left to do something about it.
            let _ = messages.send(event.into());
        };
        self.handle.ask(slot, answer).err().map(|error| Event::Kept(slot, error.to_string()))
    }

    /// Has the guest run in a thread of its own, with its devices watched as they come.
    ///
    /// # Errors
    /// When this process has no threads or descriptors left.
    fn boot(&mut self) -> Result<(), String> {
        let (messages, _) = &self.messages;
        if let Some(devices) = &mut self.devices {
            devices.watch(messages.clone())?;
        }
        let (messages, stop) = (messages.clone(), self.stop.clone());
        let mut machine = self.machine.take().ok_or_else(|| MachineError::Unusable.to_string())?;
        let run = move || {
            // The instance waits for both.
            let on_start = |restarts| {
                let event = if restarts == 0 { Event::Started(Instant::now()) } else { Event::Restarted };
                drop(messages.send(event.into()));
            };
            let ran = catch_unwind(AssertUnwindSafe(|| machine.run_and_tell(&stop, on_start)));
            let ran = ran.unwrap_or(Err(MachineError::Panicked { what: "guest's" }));
            let _ = messages.send(Event::Ended(ran.map_err(|error| error.to_string())).into());
            machine
        };
        let thread = Builder::new().name("guest".into()).spawn(run);
        let no_thread = |source| MachineError::Thread { what: "guest's", source }.to_string();
        self.running = Some(thread.map_err(no_thread)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
