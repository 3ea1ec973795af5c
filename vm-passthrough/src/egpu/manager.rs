//! Takes an eGPU through its life.

use super::{Action, Dropped, Egpu, EgpuError, Enclosure, Event, Limits, Rung, State};

/// A step of an eGPU's life, for whoever watches it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Change {
    /// Its state before.
    pub from: State,
    /// Its state from then on.
    pub to: State,
    /// What has happened.
    pub event: Event,
    /// Why, where something failed; or what was ended, where users lost it.
    pub error: Option<String>,
}

/// Takes one eGPU through its life: asks the state machine what is to be done, does it, and hands it the outcome.
///
/// Each call ends with a state that waits for nothing: actions have deadlines, and the machine goes through a bounded number
/// of them.
#[derive(Debug)]
pub struct Manager<E> {
    enclosure: E,
    egpu: Egpu,
    limits: Limits,
    /// The number that it has from being plugged in until it is pulled.
    instance: Option<u64>,
    failure: Option<String>,
    leftover: Option<String>,
}

impl<E: Enclosure> Manager<E> {
    /// A manager of an eGPU that was not looked at yet. It changes nothing.
    pub fn new(enclosure: E, limits: Limits) -> Self {
        Self { enclosure, egpu: Egpu::default(), limits, instance: None, failure: None, leftover: None }
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.egpu.state
    }

    /// Why the last action that failed did so.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Why what is noted of one that is not connected any more could not be undone; each look at it tries again.
    pub fn leftover(&self) -> Option<&str> {
        self.leftover.as_deref()
    }

    /// Tries again to undo what is noted of one that is not connected any more, and answers whether nothing is left.
    pub fn settled(&mut self) -> bool {
        if self.leftover.is_some() {
            self.settle();
        }
        self.leftover.is_none()
    }

    /// What it acts on.
    pub fn enclosure(&mut self) -> &mut E {
        &mut self.enclosure
    }

    /// Takes an event, and does all that follows from it. `told` is called with each change.
    pub fn take(&mut self, event: Event, told: &mut dyn FnMut(&Change)) {
        let why = match event {
            Event::Adopted { sound: false } => self.enclosure.unsound(),
            _ => None,
        };
        self.take_because(event, why, told);
    }

    /// As [`take`](Self::take), with the reason of the event.
    fn take_because(&mut self, event: Event, why: Option<String>, told: &mut dyn FnMut(&Change)) {
        if why.is_some() {
            self.failure.clone_from(&why);
        }
        let (mut event, mut error) = (event, why);
        loop {
            let before = self.egpu.state;
            let (next, action) = self.egpu.step(event, &self.limits);
            self.egpu = next;
            if !matches!(next.state, State::Absent | State::Disconnected) {
                // It is undone when that ends.
                self.leftover = None;
            }
            if next.state != before {
                let remedy = match next.state {
                    State::Failed(fault) => fault.remedy().map(str::to_owned),
                    _ => None,
                };
                let parts: Vec<String> = error.take().into_iter().chain(remedy).collect();
                let error = Some(parts.join("; ")).filter(|_| !parts.is_empty());
                told(&Change { from: before, to: next.state, event, error });
            }
            let Some(action) = action else { return };
            if action == Action::Settle {
                return self.settle();
            }
            if matches!(action, Action::Authorise | Action::Reset(Rung::Reconnect)) {
                // Whichever is there has the tunnel then, also one that was plugged in meanwhile.
                self.instance = None;
            }
            event = match self.enclosure.act(action) {
                Ok(()) => {
                    error = self.enclosure.ended();
                    Event::Done(action)
                }
                Err(failed) => {
                    let event = match failed {
                        EgpuError::AnotherGpu { .. } | EgpuError::Refused(_) => Event::Unfit,
                        EgpuError::Used { .. } => Event::Busy(action),
                        _ => Event::Failed(action),
                    };
                    let failed = failed.to_string();
                    self.failure = Some(failed.clone());
                    let ended = self.enclosure.ended().map(|ended| format!("{ended}; "));
                    error = Some(ended.unwrap_or_default() + &failed);
                    event
                }
            };
        }
    }

    /// Returns why it is stopped at this temperature.
    fn too_hot(&self, celsius: i32) -> String {
        let sensor =
            self.enclosure.sensor().map(|sensor| format!(" (read from {sensor})")).unwrap_or_default();
        let degrees = |celsius: i32| f64::from(celsius) / 1000.0;
        format!(
            "it is at {:.0} °C{sensor}, and the limit is {:.0} °C (`--hottest`): its users are ended and its tunnel is taken down",
            degrees(celsius),
            degrees(self.limits.hottest)
        )
    }

    fn settle(&mut self) {
        self.leftover = self.enclosure.act(Action::Settle).err().map(|error| error.to_string());
        if self.leftover.is_some() {
            self.failure.clone_from(&self.leftover);
        }
    }

    /// Looks at what there is, and does all that follows from it: to be called in turn, as often as a heartbeat is wanted.
    ///
    /// # Errors
    /// When it can't be looked at. What is known of it stays as it was, as long as it answers heartbeats.
    pub fn poll(&mut self, told: &mut dyn FnMut(&Change)) -> Result<(), EgpuError> {
        self.settled();
        let seen = match self.enclosure.observe() {
            Ok(seen) => seen,
            Err(error) => {
                self.watch(told);
                return Err(error);
            }
        };
        // It may have been pulled and plugged in again between two looks: what is there is found at the next one.
        let is_another = self.instance.is_some() && seen.instance.is_some() && self.instance != seen.instance;
        if seen.route.is_none() || is_another {
            self.instance = None;
            self.take(Event::Gone, told);
            return Ok(());
        }
        self.instance = seen.instance;
        let was_watched = self.egpu.state.is_watched();
        match seen.dropped {
            Some(Dropped { why, comes_back: true }) if was_watched => {
                self.take_because(Event::Dropped, Some(why), told);
            }
            dropped => {
                let why = dropped.filter(|_| was_watched).map(|dropped| dropped.why);
                self.take_because(Event::Found { authorised: seen.authorised }, why, told);
            }
        }
        // What was seen before it was connected, or reconnected, says nothing of it now.
        if was_watched && seen.authorised && self.egpu.state.is_watched() {
            let event = match (seen.functions.is_empty(), seen.users.is_empty()) {
                (true, _) => Event::Lost,
                (false, true) => Event::Idle,
                (false, false) => Event::Used,
            };
            self.take(event, told);
        }
        self.watch(told);
        Ok(())
    }

    /// Reads whether it answers, and its temperature.
    fn watch(&mut self, told: &mut dyn FnMut(&Change)) {
        if !self.egpu.state.is_watched() {
            return;
        }
        match self.enclosure.heartbeat() {
            Ok(()) => self.take(Event::Answered, told),
            Err(error) => {
                let error = error.to_string();
                tracing::info!("heartbeat missed: {error}");
                self.take_because(Event::Missed, Some(error), told);
            }
        }
        if let Some(celsius) = self.enclosure.temperature() {
            let why = (celsius >= self.limits.hottest).then(|| self.too_hot(celsius));
            self.take_because(Event::Temperature(celsius), why, told);
        }
    }
}
