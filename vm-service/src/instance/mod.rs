//! A guest from its start until all is given back: boot, claim, open, attach, end, detach, release.
//!
//! What is done when is decided by [`state`], which does nothing itself. An [`Instance`] does what that says, one action after
//! the other, and reports what came of each; whoever runs it hears of all as [`Progress`]. Instances share nothing: a process
//! may have several, each run by a thread of its own, and any thread ends one through its [`Stop`].

mod devices;
pub(crate) mod state;
mod watch;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) use devices::{DeviceOptions, Devices};
use state::{Action, Event, State};

use crate::config::GuestConfig;
use crate::vmm::{Machine, MachineError, MachineOptions, RunReport, Stop};

/// What happened to an instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress<'a> {
    /// What.
    pub(crate) event: &'a Event,
    /// How long the action took that it answers.
    pub(crate) took: Duration,
    /// Whether what failed is tried once more.
    pub(crate) is_retried: bool,
}

/// A guest, and what it needs to live.
pub(crate) struct Instance {
    stop: Stop,
    /// `None` while the guest runs, and once it is dropped.
    machine: Option<Machine>,
    /// The thread in which the guest runs.
    running: Option<JoinHandle<Machine>>,
    /// `None` for a guest without any.
    devices: Option<Devices>,
    events: (Sender<Event>, Receiver<Event>),
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
        let (stop, machine) = (stop.clone(), Some(machine));
        Ok(Self { stop, machine, running: None, devices, events: channel() })
    }

    /// Runs the guest, from its start until all is given back, and tells `observe` how it goes.
    ///
    /// # Errors
    /// All that failed.
    pub(crate) fn run(mut self, mut observe: impl FnMut(Progress<'_>)) -> Result<RunReport, Vec<String>> {
        let mut state = State::new(&self.devices.as_ref().map(Devices::addresses).unwrap_or_default());
        let mut answers = VecDeque::from([(Event::Start, Duration::ZERO)]);
        let mut stop_told = false;
        while !state.is_over() {
            let (event, took) = self.next(&mut answers, &mut stop_told);
            let (after, actions) = state.step(&event);
            let is_retried = after.retries(&event);
            state = after;
            observe(Progress { event: &event, took, is_retried });
            for action in actions {
                let begun = Instant::now();
                let answer = self.perform(action);
                answers.extend(answer.map(|answer| (answer, begun.elapsed())));
            }
        }
        state.outcome()
    }

    /// What happens next. What comes from other threads comes first: it was before the answer that waits.
    fn next(&self, answers: &mut VecDeque<(Event, Duration)>, stop_told: &mut bool) -> (Event, Duration) {
        let (_, events) = &self.events;
        if let Ok(event) = events.try_recv() {
            return (event, Duration::ZERO);
        }
        if self.stop.requested() && !std::mem::replace(stop_told, true) {
            return (Event::Stop, Duration::ZERO);
        }
        // Without an answer only what the guest does is waited for. This has a sender too, so there is always one.
        answers.pop_front().unwrap_or_else(|| (events.recv().unwrap_or(Event::Stop), Duration::ZERO))
    }

    /// Does what is to be done, and answers what came of it.
    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Boot => return Some(Event::Booted(self.boot())),
            Action::StopGuest => {
                self.stop.request();
                return None;
            }
            Action::DropMachine => {
                drop(self.running.take().map(JoinHandle::join));
                drop(self.machine.take());
                if let Some(devices) = &mut self.devices {
                    devices.leave();
                }
                return Some(Event::MachineDropped);
            }
            _ => {}
        }
        self.devices.as_mut()?.perform(action)
    }

    /// Has the guest run in a thread of its own, with its devices watched as they come.
    ///
    /// # Errors
    /// When this process has no threads or descriptors left.
    fn boot(&mut self) -> Result<(), String> {
        let (events, _) = &self.events;
        if let Some(devices) = &mut self.devices {
            devices.watch(events.clone())?;
        }
        let (events, stop) = (events.clone(), self.stop.clone());
        let mut machine = self.machine.take().ok_or_else(|| MachineError::Unusable.to_string())?;
        let run = move || {
            // The instance waits for both.
            let on_start = || drop(events.send(Event::Started(Instant::now())));
            let ran = catch_unwind(AssertUnwindSafe(|| machine.run_and_tell(&stop, on_start)));
            let ran = ran.unwrap_or(Err(MachineError::Panicked { what: "guest's" }));
            let _ = events.send(Event::Ended(ran.map_err(|error| error.to_string())));
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
