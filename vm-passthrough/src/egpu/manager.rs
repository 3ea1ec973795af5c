//! Takes an eGPU through its life.

use super::{Action, Egpu, EgpuError, Enclosure, Event, Limits, State};

/// A step of an eGPU's life, for who watches it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Change {
    /// Where it was.
    pub from: State,
    /// Where it is.
    pub to: State,
    /// What has happened.
    pub event: Event,
    /// Why, where something failed.
    pub error: Option<String>,
}

/// Takes one eGPU through its life: asks the state machine what is to be done, does it, and tells it the outcome.
///
/// Each call ends with a state that waits for nothing: actions have deadlines, and the machine goes through a bounded number
/// of them.
#[derive(Debug)]
pub struct Manager<E> {
    enclosure: E,
    egpu: Egpu,
    limits: Limits,
    failure: Option<String>,
}

impl<E: Enclosure> Manager<E> {
    /// Of an eGPU of which nothing is known yet. It changes nothing.
    pub fn new(enclosure: E, limits: Limits) -> Self {
        Self { enclosure, egpu: Egpu::default(), limits, failure: None }
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.egpu.state
    }

    /// Why the last action that failed did so.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// What it acts on.
    pub fn enclosure(&mut self) -> &mut E {
        &mut self.enclosure
    }

    /// Takes an event, and does all that follows from it. `told` hears of each change.
    pub fn take(&mut self, event: Event, told: &mut dyn FnMut(&Change)) {
        let (mut event, mut error) = (event, None);
        loop {
            let before = self.egpu.state;
            let (next, action) = self.egpu.step(event, &self.limits);
            self.egpu = next;
            if next.state != before {
                told(&Change { from: before, to: next.state, event, error: error.take() });
            }
            let Some(action) = action else { return };
            event = match self.enclosure.act(action) {
                Ok(()) => Event::Done(action),
                Err(failed) => {
                    let is_unfit = matches!(failed, EgpuError::AnotherGpu { .. } | EgpuError::Refused(_));
                    let failed = failed.to_string();
                    self.failure = Some(failed.clone());
                    error = Some(failed);
                    if is_unfit { Event::Unfit } else { Event::Failed(action) }
                }
            };
            if action == Action::Settle {
                return;
            }
        }
    }

    /// Looks at what there is, and does all that follows from it: to be called in turn, as often as a heartbeat is wanted.
    ///
    /// # Errors
    /// When it can't be looked at; what is known of it stays as it was.
    pub fn poll(&mut self, told: &mut dyn FnMut(&Change)) -> Result<(), EgpuError> {
        let seen = self.enclosure.observe()?;
        if seen.route.is_none() {
            self.take(Event::Gone, told);
            return Ok(());
        }
        self.take(Event::Found { authorised: seen.authorised }, told);
        if !self.egpu.state.is_watched() {
            return Ok(());
        }
        if seen.functions.is_empty() {
            self.take(Event::Lost, told);
            return Ok(());
        }
        self.take(if seen.users.is_empty() { Event::Idle } else { Event::Used }, told);
        let beat = match self.enclosure.heartbeat() {
            Ok(()) => Event::Answered,
            Err(error) => {
                self.failure = Some(error.to_string());
                Event::Missed
            }
        };
        self.take(beat, told);
        if let Some(celsius) = self.enclosure.temperature() {
            self.take(Event::Temperature(celsius), told);
        }
        Ok(())
    }
}
