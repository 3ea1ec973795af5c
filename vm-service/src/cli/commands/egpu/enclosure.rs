//! The enclosure that a command is about.

use std::time::{Duration, Instant};

use clap::Args;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Action, Change, Event, HostEnclosure, KnownEgpu, Limits, Manager, Policy, State};
use vm_passthrough::ledger::{EnclosureLock, LedgerError};
use vm_passthrough::usb4::{self, Domain, Route, Router, UniqueId};
use vm_passthrough::{Host, PciAddress, pci};

use super::guests::DaemonGuests;
use crate::api::{EgpuReport, EgpuStep, INFERRED, action_of, fault_of};
use crate::cli::context::Context;
use crate::devices::gpus;
use crate::failure::Failure;
use crate::os::signals::StopSignals;

/// How long to wait for another command on an enclosure.
pub(super) const LOCK: Duration = Duration::from_secs(120);
/// The same by force.
pub(super) const LOCK_BY_FORCE: Duration = Duration::from_secs(5);
/// How long it is waited for in silence.
const SILENCE: Duration = Duration::from_secs(1);

/// Takes a lock of enclosures, and reports its holder where it is waited for.
///
/// # Errors
/// When it is held until `deadline` has passed, or can't be used.
pub(super) fn locked(
    deadline: Duration,
    lock: impl Fn(Duration) -> Result<EnclosureLock, LedgerError>,
) -> Result<EnclosureLock, Failure> {
    let locked = match lock(deadline.min(SILENCE)) {
        Err(LedgerError::Busy { path, holder, .. }) if deadline > SILENCE => {
            let holder = holder.map_or_else(
                || "another process".into(),
                |holder| format!("process {} ({})", holder.pid, holder.command),
            );
            let rest = deadline - SILENCE;
            tracing::warn!("{holder} holds {}: waiting for it, {} s at most", path.display(), rest.as_secs());
            lock(rest)
        }
        locked => locked,
    };
    locked.map_err(Failure::failed)
}

/// Which enclosure.
#[derive(Debug, Args)]
pub(super) struct EnclosureArgs {
    /// The enclosure: its UUID, or its router as in 0-1; without it, the only one that it can be
    #[arg(value_name = "ENCLOSURE")]
    enclosure: Option<String>,
}

/// An enclosure that is connected.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) domain: Domain,
    pub(super) router: Router,
    pub(super) id: UniqueId,
}

/// What a router says that it is.
pub(super) fn name(router: &Router) -> String {
    router.name().unwrap_or_else(|| "unnamed".into())
}

/// All that is connected, but for hosts, each with its domain.
pub(super) fn all(context: &Context<'_>) -> Result<Vec<(Domain, Router)>, Failure> {
    let domains = usb4::scan(&context.host).map_err(|error| {
        Failure::failed(format_args!("can't read {}: {error}", context.host.thunderbolt.display()))
    })?;
    let of = |domain: &Domain| {
        let routers = domain.routers.iter().filter(|router| router.route.depth() > 0);
        routers.map(|router| (domain.clone(), router.clone())).collect::<Vec<_>>()
    };
    Ok(domains.iter().flat_map(of).collect())
}

impl EnclosureArgs {
    /// As [`choose`](Self::choose), but where none is named and all that are connected are already as wanted, the only one of them.
    ///
    /// # Errors
    /// When there is none, or several.
    pub(super) fn choose_or_done(
        &self,
        context: &Context<'_>,
        can: fn(&Router) -> bool,
        none: &str,
    ) -> Result<Chosen, Failure> {
        let is_done = self.enclosure.is_none() && !all(context)?.iter().any(|(_, router)| can(router));
        self.choose(context, if is_done { |_| true } else { can }, none)
    }

    /// The enclosure that is meant; where none is named, the only one that `can` be. `none` is the message where there is none.
    ///
    /// # Errors
    /// When there is none, or several.
    pub(super) fn choose(
        &self,
        context: &Context<'_>,
        can: fn(&Router) -> bool,
        none: &str,
    ) -> Result<Chosen, Failure> {
        let all = all(context)?;
        let id = self.enclosure.as_deref().and_then(|name| name.parse::<UniqueId>().ok());
        let route = self.enclosure.as_deref().and_then(|name| name.parse::<Route>().ok());
        let is_meant = |router: &Router| match &self.enclosure {
            Some(_) => router.unique_id.is_some() && router.unique_id == id || Some(router.route) == route,
            None => can(router),
        };
        let mut meant: Vec<_> = all.into_iter().filter(|(_, router)| is_meant(router)).collect();
        let several = |meant: &[(Domain, Router)]| {
            let names = meant.iter().map(|(_, router)| format!("{} ({})", router.route, name(router)));
            names.collect::<Vec<_>>().join(", ")
        };
        match (meant.pop(), &*meant, &self.enclosure) {
            (Some((domain, router)), [], _) => match router.unique_id {
                Some(id) => Ok(Chosen { domain, router, id }),
                None => Err(Failure::failed(format_args!(
                    "{} has no UUID to identify it by; update its firmware",
                    router.route
                ))),
            },
            (Some(last), _, _) => {
                meant.push(last);
                Err(Failure::usage(format_args!("several enclosures match; name one: {}", several(&meant))))
            }
            (None, _, Some(name)) if name.is_empty() => Err(Failure::usage(
                "the name of the enclosure is empty: give its UUID, or its router, as in 0-1",
            )),
            (None, _, Some(name)) => Err(Failure::failed(format_args!(
                "nothing that is connected is {name}; `vm-service egpu info` shows what is"
            ))),
            (None, _, None) => {
                Err(Failure::failed(format_args!("{none}; `vm-service egpu info` shows what is connected")))
            }
        }
    }
}

/// A command under way.
pub(super) struct Work {
    pub(super) manager: Manager<HostEnclosure>,
    host: Host,
    chosen: Chosen,
    began: Instant,
    steps: Vec<EgpuStep>,
    _signals: StopSignals,
    _lock: EnclosureLock,
}

impl Work {
    /// Begins, when no other command is at work, which is waited for.
    ///
    /// # Errors
    /// When another stays at work, or this process has no descriptors left.
    pub(super) fn begin(
        context: &Context<'_>,
        chosen: Chosen,
        policy: Policy,
        known: Option<KnownEgpu>,
        wait: Duration,
    ) -> Result<Self, Failure> {
        let lock = locked(wait, |wait| EnclosureLock::of(&context.host, chosen.id, wait))?;
        let cancel = Cancel::default();
        let enclosure = enclosure(&context.host, &chosen.router, chosen.id, policy, known, cancel.clone())?;
        let on_signal = move |signal| {
            tracing::warn!("{signal}: cancelled; what was begun is undone");
            cancel.request();
        };
        let signals = StopSignals::start(on_signal).map_err(Failure::failed)?;
        let manager = Manager::new(enclosure, Limits::default());
        let (host, began) = (context.host.clone(), Instant::now());
        Ok(Self { manager, host, chosen, began, steps: Vec::new(), _signals: signals, _lock: lock })
    }

    /// Takes an event, and does all that follows from it.
    pub(super) fn take(&mut self, event: Event) -> State {
        let users = Users::of(&self.host, &self.manager.enclosure().functions());
        let (began, steps, id) = (self.began, &mut self.steps, self.chosen.id);
        self.manager.take(event, &mut |change| {
            log_of(id, change, &users);
            steps.push(EgpuStep {
                state: change.to.name().to_owned(),
                action: action_of(change.to),
                milliseconds: began.elapsed().as_secs_f64() * 1000.0,
                error: change.error.clone(),
            });
        });
        self.manager.state()
    }

    /// Takes it as it is.
    ///
    /// # Errors
    /// When it is not connected.
    pub(super) fn adopt(&mut self) -> Result<State, Failure> {
        let sound = self.manager.enclosure().adopt().map_err(Failure::failed)?;
        Ok(self.take(Event::Adopted { sound }))
    }

    /// What came of it.
    pub(super) fn report(&mut self) -> EgpuReport {
        let state = self.manager.state();
        EgpuReport {
            enclosure: self.chosen.id.to_string(),
            name: name(&self.chosen.router),
            router: (state != State::Absent).then(|| self.chosen.router.route.to_string()),
            state: state.name().into(),
            fault: fault_of(state),
            functions: self.manager.enclosure().functions().iter().map(ToString::to_string).collect(),
            functions_basis: INFERRED.into(),
            guest: None,
            steps: std::mem::take(&mut self.steps),
        }
    }

    /// Why the last step that failed did so.
    pub(super) fn failure(&self) -> Failure {
        Failure::failed(
            self.manager
                .failure()
                .unwrap_or("it is in another state than expected; see `vm-service egpu diag`"),
        )
    }

    /// A line about it.
    pub(super) fn line(&self, text: &str) -> String {
        let Chosen { router, .. } = &self.chosen;
        format!("{} {}: {text}\n", router.route, name(router))
    }

    /// How long it has taken so far, as a text: `0.6 s`.
    pub(super) fn took(&self) -> String {
        format!("{:.1} s", self.began.elapsed().as_secs_f64())
    }
}

/// The enclosure of a router, for a manager.
///
/// # Errors
/// When this process has no descriptors left.
pub(super) fn enclosure(
    host: &Host,
    router: &Router,
    id: UniqueId,
    policy: Policy,
    known: Option<KnownEgpu>,
    cancel: Cancel,
) -> Result<HostEnclosure, Failure> {
    let guests = Box::new(DaemonGuests::of(host)?);
    Ok(HostEnclosure::new(host, id, policy, known, cancel, guests).seen_at(router.route))
}

/// Guests and drivers that have the functions of an enclosure.
#[derive(Debug, Default)]
struct Users {
    guests: Vec<String>,
    drivers: Vec<String>,
}

impl Users {
    fn of(host: &Host, functions: &[PciAddress]) -> Self {
        let owners = gpus::guests(host);
        let mut guests: Vec<_> =
            functions.iter().filter_map(|function| owners.get(function).cloned()).collect();
        let read = |function: &PciAddress| pci::read_function(host, *function).ok()?.driver;
        let mut drivers: Vec<_> = functions.iter().filter_map(read).collect();
        guests.dedup();
        drivers.dedup();
        Self { guests, drivers }
    }
}

/// What is done in a state, or the state where nothing is.
fn doing(state: State, users: &Users) -> String {
    let named = |names: &[String], others: &str| match names {
        [] => others.to_owned(),
        names => names.join(" and "),
    };
    let Some(action) = state.awaited() else {
        return match fault_of(state) {
            Some(fault) => format!("{} ({fault})", state.name()),
            None => state.name().into(),
        };
    };
    match action {
        Action::Authorise => "building the tunnel".into(),
        Action::Enumerate => "waiting for its functions".into(),
        Action::Verify => "verifying its functions".into(),
        Action::StopWork { .. } => "stopping work".into(),
        Action::Detach { .. } => format!("detaching from {}", named(&users.guests, "guests")),
        Action::Unbind { .. } => format!("unbinding from {}", named(&users.drivers, "its driver")),
        Action::Deauthorise => "taking the tunnel down".into(),
        Action::Reset(rung) => format!("recovering by {rung}"),
        Action::Release => "releasing its claims".into(),
        Action::Settle => "settling the ledger".into(),
    }
}

/// What an action is called by people, as in `detach by force`.
pub(super) fn action_text(action: Action) -> String {
    match action {
        Action::StopWork { force: true }
        | Action::Detach { force: true }
        | Action::Unbind { force: true } => {
            format!("{action} by force")
        }
        _ => action.to_string(),
    }
}

/// Logs a step.
pub(super) fn log(id: UniqueId, change: &Change) {
    log_of(id, change, &Users::default());
}

fn log_of(id: UniqueId, change: &Change, users: &Users) {
    let doing = doing(change.to, users);
    match &change.error {
        Some(error) => tracing::warn!(enclosure = %id, "{error}; then: {doing}"),
        None => tracing::info!(enclosure = %id, "{doing}"),
    }
}

#[cfg(test)]
mod tests {
    use vm_passthrough::egpu::{Before, Drain, DrainStep, Fault};

    use super::*;

    #[test]
    fn a_step_is_named_by_what_is_done() {
        let users =
            Users { guests: vec!["web1".into()], drivers: vec!["amdgpu".into(), "snd_hda_intel".into()] };
        let drain = |step| State::Draining(Drain { step, force: false, then: None, before: Before::Working });
        let check = |state, users: &Users, expect: &str| assert_eq!(doing(state, users), expect);
        check(drain(DrainStep::StopWork), &users, "stopping work");
        check(drain(DrainStep::Detach), &users, "detaching from web1");
        check(drain(DrainStep::Unbind), &users, "unbinding from amdgpu and snd_hda_intel");
        check(drain(DrainStep::Deauthorise), &users, "taking the tunnel down");
        check(drain(DrainStep::Unbind), &Users::default(), "unbinding from its driver");
        check(State::Authorising, &users, "building the tunnel");
        check(State::Ready, &users, "ready");
        check(State::Failed(Fault::Stuck), &users, "failed (stuck)");
        assert_eq!(action_text(Action::Detach { force: true }), "detach by force");
        assert_eq!(action_text(Action::Deauthorise), "deauthorise");
    }
}
