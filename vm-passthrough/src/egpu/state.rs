//! The life of an eGPU: a pure function from a state and an event to the next state and what is to be done.
//!
//! ```text
//!             found            done             done            done
//!   Absent ─────────▶ Disconnected ─▶ Authorising ─▶ Enumerating ─▶ Verifying ─▶ Ready ◀─▶ InUse
//!      ▲                 ▲   connect       │              │             │          │  used   │
//!      │ gone            │                 │ failed       │ failed      │ failed   │  missed │
//!      │ (from any)      │                 ▼              ▼             ▼          ▼         ▼
//!      │                 │              Failed        Draining     Recovering ◀── Degraded ──┘
//!                        │                 ▲              │         │    │ ▲
//!                        │                 │              │         │    └─┘ next rung: soft reset, hard reset, reconnect,
//!                        │                 └──────────────┤         │        each verified; at most `rounds` times
//!                        └────────────────────────────────┘◀────────┘ given up; overheated; disconnect
//!
//!   Draining: work is waited for ─▶ detached from the guest ─▶ claims released ─▶ unbound ─▶ deauthorised
//! ```
//!
//! * What has not gone still answers: Ready and InUse are reached only by a verification that succeeded or a heartbeat that was
//!   answered, or from one of these states by a disconnect that was given up before anything was taken apart.
//! * Users lose it only by force, by a recovery of what does not answer, or by an emergency stop. By force, processes of the host
//!   that use it are ended. A tunnel that somebody else built stays when what came through it is of no use.
//! * An emergency stop that failed is not over: it is tried again at each look, until the tunnel is down.
//! * Whatever fails, a state without a pending action is reached in a bounded number of steps.
//! * Each event is taken in each state. What a state does not wait for changes nothing.

use std::fmt;

/// An eGPU, as far as it is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Egpu {
    /// Where it is.
    pub state: State,
    /// Rounds of recovery since it was last well for long.
    rounds: u8,
    /// Heartbeats in a row that were answered.
    answered: u8,
    /// Whether its tunnel was found, not asked for: somebody may have used it before it was looked at.
    is_found: bool,
    /// Whether the reset that is under way was asked for: then no other rung follows it.
    is_asked: bool,
}

impl Default for Egpu {
    fn default() -> Self {
        Self { state: State::Absent, rounds: 0, answered: 0, is_found: false, is_asked: false }
    }
}

/// Where an eGPU is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Its enclosure is not connected.
    Absent,
    /// Its enclosure is connected, and no PCIe is tunnelled to it.
    Disconnected,
    /// The tunnel is being built.
    Authorising,
    /// The tunnel is there, and its PCI functions are waited for.
    Enumerating,
    /// Its functions are there, and their identity and BARs are read back.
    Verifying,
    /// It can be used.
    Ready,
    /// Somebody uses it.
    InUse,
    /// It has missed heartbeats.
    Degraded {
        /// How many in a row.
        missed: u8,
        /// Whether somebody uses it.
        in_use: bool,
    },
    /// It is taken through the ladder of resets.
    Recovering(Recovery),
    /// Its users lose it, and its tunnel is taken down.
    Draining(Drain),
    /// It can't be used, and is left as it is until an operator acts; but see [`Fault::NotStopped`].
    Failed(Fault),
}

impl State {
    /// Its name, one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Disconnected => "disconnected",
            Self::Authorising => "authorising",
            Self::Enumerating => "enumerating",
            Self::Verifying => "verifying",
            Self::Ready => "ready",
            Self::InUse => "in-use",
            Self::Degraded { .. } => "degraded",
            Self::Recovering(_) => "recovering",
            Self::Draining(_) => "draining",
            Self::Failed(_) => "failed",
        }
    }

    /// Whether heartbeat and temperature are to be read.
    pub const fn is_watched(self) -> bool {
        matches!(self, Self::Ready | Self::InUse | Self::Degraded { .. })
    }

    /// Whether nothing is under way.
    pub const fn is_settled(self) -> bool {
        self.awaited().is_none()
    }

    /// The action whose outcome it waits for.
    pub const fn awaited(self) -> Option<Action> {
        Some(match self {
            Self::Authorising => Action::Authorise,
            Self::Enumerating => Action::Enumerate,
            Self::Verifying => Action::Verify,
            Self::Recovering(Recovery::Detach(_)) => Action::Detach { force: true },
            Self::Recovering(Recovery::Reset(rung)) => Action::Reset(rung),
            Self::Recovering(Recovery::Verify(_)) => Action::Verify,
            Self::Draining(Drain { step, force, .. }) => match step {
                DrainStep::StopWork => Action::StopWork { force },
                DrainStep::Detach => Action::Detach { force },
                DrainStep::Release => Action::Release,
                DrainStep::Unbind => Action::Unbind { force },
                DrainStep::Deauthorise => Action::Deauthorise,
            },
            _ => return None,
        })
    }
}

/// How far a recovery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Its guest loses it, before this rung.
    Detach(Rung),
    /// It is reset.
    Reset(Rung),
    /// Its identity and BARs are read back, after this rung.
    Verify(Rung),
}

/// A rung of the ladder of recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Rung {
    /// A reset of its functions alone (FLR, or by power management).
    SoftReset,
    /// A reset of the bus that it is on.
    HardReset,
    /// Its tunnel is taken down and built again.
    Reconnect,
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Drain {
    /// What is done now.
    pub step: DrainStep,
    /// Whether users are not waited for but ended, and a step that fails is skipped.
    pub force: bool,
    /// The fault that it ends in; `None` for [`State::Disconnected`].
    pub then: Option<Fault>,
    /// What it returns to if it is given up before anything was taken apart.
    pub before: Before,
}

/// What an eGPU was before it was drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Before {
    /// It worked.
    Working,
    /// It had missed so many heartbeats in a row.
    Degraded {
        /// How many.
        missed: u8,
    },
    /// It could not be used.
    Failed(Fault),
}

/// The steps of a drain, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DrainStep {
    /// Processes of the host that use it are waited for, or ended.
    StopWork,
    /// It is detached from its guest.
    Detach,
    /// Claims of it that no process holds are released, so that nothing is noted of it any more.
    Release,
    /// It is unbound from its driver.
    Unbind,
    /// Its tunnel is taken down.
    Deauthorise,
}

/// Why an eGPU can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Fault {
    /// Its tunnel could not be built.
    NotAuthorised,
    /// Its functions did not come, or are not those of a GPU that is allowed.
    NotEnumerated,
    /// Its functions do not answer as they should; no reset was tried, or only the one that was asked for.
    Unsound,
    /// No rung of the ladder helped.
    Unrecovered,
    /// It was hotter than allowed, and is stopped.
    Overheated,
    /// It was hotter than allowed, and its tunnel could not be taken down: it may be hot and in use still. The stop is tried
    /// again at each look, whatever its temperature reads: the sensor may have gone with its driver.
    NotStopped,
    /// A driver does not let go of it.
    Stuck,
    /// Its tunnel could not be taken down.
    NotDeauthorised,
}

impl Fault {
    /// Returns what an operator does about it; `None` where the failed step's error says it.
    pub const fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Overheated => Some(
                "let it cool, check the enclosure's fan and vents, then connect it again (`vm-service egpu connect`)",
            ),
            Self::NotStopped => Some(
                "it may be hot and in use still: switch the enclosure's power off, or pull its cable, now",
            ),
            _ => None,
        }
    }
}

/// What happens to an eGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its enclosure is connected.
    Found {
        /// Whether PCIe is tunnelled to it.
        authorised: bool,
    },
    /// It was connected before it was first looked at, and is taken as it is.
    Adopted {
        /// Whether its functions answer, and are in order.
        sound: bool,
    },
    /// Its enclosure is not connected any more.
    Gone,
    /// Its functions are gone, though the tunnel should be there.
    Lost,
    /// The tunnel that was built to it is gone, though no command took it down, and the policy wants it connected.
    Dropped,
    /// An operator or the policy asks for it to be connected.
    Connect,
    /// An operator or the policy asks for it to be disconnected.
    Disconnect {
        /// Without waiting for its users.
        force: bool,
    },
    /// An operator asks for this reset, and no other.
    Reset(Rung),
    /// Somebody began to use it.
    Used,
    /// Nobody uses it any more.
    Idle,
    /// It answered a heartbeat.
    Answered,
    /// It missed a heartbeat.
    Missed,
    /// Its temperature, in thousandths of a degree Celsius.
    Temperature(i32),
    /// An action was done.
    Done(Action),
    /// An action failed.
    Failed(Action),
    /// An action was not begun, as somebody uses it.
    Busy(Action),
    /// Its functions came, and are not such as may be used.
    Unfit,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have PCIe tunnelled to it.
    Authorise,
    /// Wait for its functions.
    Enumerate,
    /// Read back that its functions answer, have the identity that they had, and are set up as Linux set them up.
    Verify,
    /// Wait for the processes of the host that use it, or end them.
    StopWork {
        /// End them: SIGTERM, then SIGKILL.
        force: bool,
    },
    /// Detach it from its guest.
    Detach {
        /// Without the guest's consent.
        force: bool,
    },
    /// Release claims of it that no process holds.
    Release,
    /// Unbind it from its driver.
    Unbind {
        /// Though it may be in use.
        force: bool,
    },
    /// Take its tunnel down.
    Deauthorise,
    /// Reset it.
    Reset(Rung),
    /// It has gone: undo what is still noted of it.
    Settle,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Authorise => "authorise",
            Self::Enumerate => "enumerate",
            Self::Verify => "verify",
            Self::StopWork { .. } => "stop-work",
            Self::Detach { .. } => "detach",
            Self::Release => "release",
            Self::Unbind { .. } => "unbind",
            Self::Deauthorise => "deauthorise",
            Self::Reset(rung) => return rung.fmt(f),
            Self::Settle => "settle",
        })
    }
}

/// What is too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Heartbeats in a row that it misses before it is reset.
    pub missed: u8,
    /// Rounds on the ladder before it is given up.
    pub rounds: u8,
    /// Heartbeats in a row that it has to answer for earlier rounds to be forgotten.
    pub well: u8,
    /// The temperature at which it is stopped, in thousandths of a degree Celsius.
    pub hottest: i32,
}

impl Default for Limits {
    /// Three heartbeats, three rounds, 30 heartbeats, 90 °C.
    fn default() -> Self {
        Self { missed: 3, rounds: 3, well: 30, hottest: 90_000 }
    }
}

impl Egpu {
    /// What it is after an event, and what is to be done then; the outcome of each action but [`Action::Settle`] is the event
    /// that it waits for.
    #[must_use]
    pub fn step(self, event: Event, limits: &Limits) -> (Self, Option<Action>) {
        let mut next = self.next(event, limits);
        next.is_asked &= matches!(next.state, State::Recovering(_));
        let is_new = next.state != self.state;
        let action = match next.state {
            // Without a tunnel nothing of it was used.
            State::Absent | State::Disconnected if is_new && self.state.has_tunnel() => {
                let is_undone = matches!(event, Event::Done(_));
                (!is_undone).then_some(Action::Settle)
            }
            // Somebody else has taken the tunnel of an emergency down.
            State::Failed(Fault::Overheated) if self.state == State::Failed(Fault::NotStopped) => {
                Some(Action::Settle)
            }
            state if is_new => state.awaited(),
            _ => None,
        };
        (next, action)
    }

    fn next(self, event: Event, limits: &Limits) -> Self {
        let to = |state| Self { state, ..self };
        let in_use = matches!(self.state, State::InUse | State::Degraded { in_use: true, .. });
        match (self.state, event) {
            (_, Event::Gone) => Self::default(),
            (State::Absent | State::Disconnected, Event::Found { authorised: true }) => {
                Self { state: State::Enumerating, is_found: true, ..self }
            }
            (State::Absent, Event::Found { authorised: false }) => to(State::Disconnected),
            (State::Absent, Event::Adopted { sound }) => {
                let state = if sound { State::Ready } else { State::Failed(Fault::Unsound) };
                Self { state, is_found: true, ..self }
            }
            // Somebody else took its tunnel down.
            (State::Ready | State::InUse | State::Degraded { .. }, Event::Found { authorised: false }) => {
                Self { state: State::Disconnected, ..Self::default() }
            }
            (State::Failed(Fault::NotStopped), Event::Found { authorised: true }) => {
                to(State::Draining(Drain::forced(Fault::Overheated)))
            }
            (State::Failed(Fault::NotStopped), Event::Found { authorised: false }) => {
                Self { state: State::Failed(Fault::Overheated), is_found: false, ..self }
            }
            // Whose tunnel comes next is not known yet.
            (State::Failed(_), Event::Found { authorised: false }) => Self { is_found: false, ..self },
            (State::Disconnected, Event::Connect) => Self { state: State::Authorising, ..Self::default() },
            // It may have a tunnel still.
            (State::Failed(_), Event::Connect) => {
                Self { state: State::Authorising, is_found: self.is_found, ..Self::default() }
            }
            (State::Absent | State::Disconnected, Event::Disconnect { .. }) => self,
            (State::Draining(drain), Event::Disconnect { force }) => {
                to(State::Draining(Drain { force: drain.force || force, ..drain }))
            }
            (State::Ready | State::Degraded { in_use: false, .. } | State::Failed(_), Event::Reset(rung)) => {
                Self { state: State::Recovering(Recovery::Reset(rung)), is_asked: true, ..self }
            }
            (state, Event::Disconnect { force }) => {
                let before = match state {
                    State::Failed(fault) => Before::Failed(fault),
                    State::Degraded { missed, .. } => Before::Degraded { missed },
                    State::Authorising => Before::Failed(Fault::NotAuthorised),
                    State::Enumerating => Before::Failed(Fault::NotEnumerated),
                    State::Recovering(_) | State::Verifying => Before::Failed(Fault::Unsound),
                    _ => Before::Working,
                };
                to(State::Draining(Drain { step: DrainStep::StopWork, force, then: None, before }))
            }
            (State::Ready, Event::Used) => to(State::InUse),
            (State::InUse, Event::Idle) => to(State::Ready),
            (State::Degraded { missed, .. }, Event::Used) => to(State::Degraded { missed, in_use: true }),
            (State::Degraded { missed, .. }, Event::Idle) => to(State::Degraded { missed, in_use: false }),
            (State::Ready | State::InUse | State::Degraded { .. }, Event::Missed) => {
                let missed = if let State::Degraded { missed, .. } = self.state { missed } else { 0 };
                let this = Self { answered: 0, ..self };
                match missed.saturating_add(1) {
                    missed if missed < limits.missed => {
                        Self { state: State::Degraded { missed, in_use }, ..this }
                    }
                    _ => this.recover(Rung::SoftReset, in_use, limits),
                }
            }
            (State::Ready | State::InUse | State::Degraded { .. }, Event::Answered) => {
                let answered = self.answered.saturating_add(1);
                let rounds = if answered < limits.well { self.rounds } else { 0 };
                Self { state: if in_use { State::InUse } else { State::Ready }, rounds, answered, ..self }
            }
            // There is nothing left to reset.
            (State::Ready | State::InUse | State::Degraded { .. }, Event::Lost | Event::Dropped) => {
                Self { answered: 0, ..self }.recover(Rung::Reconnect, in_use, limits)
            }
            (state, Event::Temperature(celsius)) if celsius >= limits.hottest => match state {
                State::Draining(drain) => {
                    let then = drain.then.unwrap_or(Fault::Overheated);
                    let before = Before::Failed(then);
                    to(State::Draining(Drain { force: true, then: Some(then), before, ..drain }))
                }
                State::Verifying
                | State::Ready
                | State::InUse
                | State::Degraded { .. }
                | State::Recovering(_) => to(State::Draining(Drain::forced(Fault::Overheated))),
                _ => self,
            },
            (State::Enumerating, Event::Unfit) => to(State::Draining(Drain::unused(Fault::NotEnumerated))),
            // As what is waited for failing in any other way.
            (_, Event::Unfit) => self.failed(limits),
            // Nothing of the driver was taken apart: whoever has just begun to use it keeps it.
            (State::Draining(drain), Event::Busy(action))
                if self.state.awaited() == Some(action)
                    && drain.step == DrainStep::Unbind
                    && !drain.force =>
            {
                to(drain.given_up())
            }
            (state, Event::Busy(action)) if state.awaited() == Some(action) => self.failed(limits),
            (state, Event::Done(action)) if state.awaited() == Some(action) => self.done(),
            (state, Event::Failed(action)) if state.awaited() == Some(action) => self.failed(limits),
            _ => self,
        }
    }

    /// What comes after what it waited for was done.
    fn done(self) -> Self {
        let state = match self.state {
            State::Authorising => State::Enumerating,
            State::Enumerating => State::Verifying,
            State::Verifying | State::Recovering(Recovery::Verify(_)) => State::Ready,
            State::Recovering(Recovery::Detach(rung)) => State::Recovering(Recovery::Reset(rung)),
            State::Recovering(Recovery::Reset(rung)) => State::Recovering(Recovery::Verify(rung)),
            State::Draining(drain) if drain.step == DrainStep::Deauthorise => {
                return Self { state: drain.after(), is_found: false, ..self };
            }
            State::Draining(drain) => drain.after(),
            state => state,
        };
        Self { state, ..self }
    }

    /// What comes after what it waited for failed.
    fn failed(self, limits: &Limits) -> Self {
        let to = |state| Self { state, ..self };
        match self.state {
            State::Authorising => to(State::Failed(Fault::NotAuthorised)),
            // Whoever built its tunnel may want more than GPUs.
            State::Enumerating if self.is_found => to(State::Failed(Fault::NotEnumerated)),
            State::Enumerating => to(State::Draining(Drain::unused(Fault::NotEnumerated))),
            // One that was there before may be used.
            State::Verifying => self.recover(Rung::SoftReset, self.is_found, limits),
            // A guest that does not let go of it loses it by the reset.
            State::Recovering(Recovery::Detach(rung)) => to(State::Recovering(Recovery::Reset(rung))),
            State::Recovering(_) if self.is_asked => to(State::Failed(Fault::Unsound)),
            State::Recovering(Recovery::Reset(rung) | Recovery::Verify(rung)) => match rung {
                Rung::SoftReset => to(State::Recovering(Recovery::Reset(Rung::HardReset))),
                Rung::HardReset => to(State::Recovering(Recovery::Reset(Rung::Reconnect))),
                Rung::Reconnect => self.recover(Rung::SoftReset, false, limits),
            },
            State::Draining(drain) => to(drain.after_failure()),
            _ => self,
        }
    }

    /// Another round on the ladder, or none any more.
    fn recover(self, from: Rung, in_use: bool, limits: &Limits) -> Self {
        if self.rounds >= limits.rounds {
            return Self { state: State::Draining(Drain::forced(Fault::Unrecovered)), ..self };
        }
        let recovery = if in_use { Recovery::Detach(from) } else { Recovery::Reset(from) };
        Self { state: State::Recovering(recovery), rounds: self.rounds + 1, ..self }
    }
}

impl State {
    /// Whether PCIe may be tunnelled to it.
    const fn has_tunnel(self) -> bool {
        !matches!(self, Self::Absent | Self::Disconnected)
    }
}

impl Drain {
    /// One of what is of no use. It may have had a tunnel and users before, which are waited for.
    const fn unused(then: Fault) -> Self {
        Self { step: DrainStep::StopWork, force: false, then: Some(then), before: Before::Failed(then) }
    }

    /// One that no user can refuse.
    const fn forced(then: Fault) -> Self {
        Self { step: DrainStep::StopWork, force: true, then: Some(then), before: Before::Failed(then) }
    }

    fn after(self) -> State {
        let step = match self.step {
            DrainStep::StopWork => DrainStep::Detach,
            DrainStep::Detach => DrainStep::Release,
            DrainStep::Release => DrainStep::Unbind,
            DrainStep::Unbind => DrainStep::Deauthorise,
            DrainStep::Deauthorise => return self.then.map_or(State::Disconnected, State::Failed),
        };
        State::Draining(Self { step, ..self })
    }

    fn after_failure(self) -> State {
        match self.step {
            _ if self.force && self.step != DrainStep::Deauthorise => self.after(),
            DrainStep::StopWork | DrainStep::Detach | DrainStep::Release => self.given_up(),
            // The fault says that the tunnel is there still, whatever led to this.
            _ if self.is_emergency() => State::Failed(Fault::NotStopped),
            DrainStep::Unbind => State::Failed(Fault::Stuck),
            DrainStep::Deauthorise => State::Failed(Fault::NotDeauthorised),
        }
    }

    /// Whether it ends an emergency, or goes on where one could not be ended.
    fn is_emergency(self) -> bool {
        self.then == Some(Fault::Overheated) || self.before == Before::Failed(Fault::NotStopped)
    }

    /// What it is when nothing was taken apart: whoever has it keeps it.
    fn given_up(self) -> State {
        match self.before {
            Before::Working => State::InUse,
            Before::Degraded { missed } => State::Degraded { missed, in_use: true },
            Before::Failed(fault) => State::Failed(fault),
        }
    }
}
