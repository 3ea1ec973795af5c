//! The enclosure that a command is about.

use std::time::{Duration, Instant};

use clap::Args;
use vm_passthrough::Host;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Change, Event, HostEnclosure, KnownEgpu, Limits, Manager, Policy, State};
use vm_passthrough::ledger::EnclosureLock;
use vm_passthrough::usb4::{self, Domain, Route, Router, UniqueId};

use super::guests::DaemonGuests;
use crate::context::Context;
use crate::failure::Failure;
use crate::json::{EgpuReport, EgpuStep};
use crate::signals::StopSignals;

/// How long to wait for another command on an enclosure.
pub(super) const LOCK: Duration = Duration::from_secs(120);

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
    let names: Vec<&str> =
        [router.vendor_name.as_deref(), router.device_name.as_deref()].into_iter().flatten().collect();
    if names.is_empty() { "unnamed".into() } else { names.join(" ") }
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
    /// Whether none is named.
    pub(super) fn is_any(&self) -> bool {
        self.enclosure.is_none()
    }

    /// The enclosure that is meant; where none is named, the only one that `can` be.
    ///
    /// # Errors
    /// When there is none, or several.
    pub(super) fn choose(
        &self,
        context: &Context<'_>,
        can: fn(&Router) -> bool,
        what: &str,
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
                    "{} has no UUID, so that it could not be told from another; update its firmware",
                    router.route
                ))),
            },
            (Some(last), _, _) => {
                meant.push(last);
                Err(Failure::usage(format_args!("which one is meant? {what}: {}", several(&meant))))
            }
            (None, _, Some(name)) => Err(Failure::failed(format_args!(
                "nothing that is connected is {name}; `vm-service egpu info` shows what is"
            ))),
            (None, _, None) => Err(Failure::failed(format_args!(
                "there is none: {what}; `vm-service egpu info` shows what is connected"
            ))),
        }
    }
}

/// A command under way.
pub(super) struct Work {
    pub(super) manager: Manager<HostEnclosure>,
    chosen: Chosen,
    began: Instant,
    steps: Vec<EgpuStep>,
    _signals: StopSignals,
    _lock: EnclosureLock,
}

impl Work {
    /// Begins, when no other command is at work.
    ///
    /// # Errors
    /// When another stays at work, or this process has no descriptors left.
    pub(super) fn begin(
        context: &Context<'_>,
        chosen: Chosen,
        policy: Policy,
        known: Option<KnownEgpu>,
    ) -> Result<Self, Failure> {
        let lock = EnclosureLock::of(&context.host, chosen.id, LOCK).map_err(Failure::failed)?;
        let cancel = Cancel::default();
        let enclosure = enclosure(&context.host, &chosen.router, chosen.id, policy, known, cancel.clone())?;
        let on_signal = move |signal| {
            tracing::warn!("{signal}: what was begun is undone");
            cancel.request();
        };
        let signals = StopSignals::start(on_signal).map_err(Failure::failed)?;
        let manager = Manager::new(enclosure, Limits::default());
        Ok(Self { manager, chosen, began: Instant::now(), steps: Vec::new(), _signals: signals, _lock: lock })
    }

    /// Takes an event, and does all that follows from it.
    pub(super) fn take(&mut self, event: Event) -> State {
        let (began, steps, id) = (self.began, &mut self.steps, self.chosen.id);
        self.manager.take(event, &mut |change| {
            log(id, change);
            let (state, error) = (change.to.name().to_owned(), change.error.clone());
            steps.push(EgpuStep { state, milliseconds: began.elapsed().as_secs_f64() * 1000.0, error });
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
            fault: crate::json::fault_of(state),
            functions: self.manager.enclosure().functions().iter().map(ToString::to_string).collect(),
            guest: None,
            steps: std::mem::take(&mut self.steps),
        }
    }

    /// Why the last step that failed did so.
    pub(super) fn failure(&self) -> Failure {
        Failure::failed(self.manager.failure().unwrap_or("it is not as it should be"))
    }

    /// What is said of it in a line.
    pub(super) fn line(&self, said: &str) -> String {
        let Chosen { router, .. } = &self.chosen;
        format!("{} {}: {said} in {:.1} s\n", router.route, name(router), self.began.elapsed().as_secs_f64())
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

/// Logs a step.
pub(super) fn log(id: UniqueId, change: &Change) {
    let (from, to) = (change.from.name(), change.to.name());
    match &change.error {
        Some(error) => tracing::warn!(enclosure = %id, "{from} → {to}: {error}"),
        None => tracing::info!(enclosure = %id, "{from} → {to}"),
    }
}
