//! `egpu watch`: watches over enclosures until a signal comes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Change, Event, HostEnclosure, Limits, Manager, State, is_accelerator};
use vm_passthrough::ledger::EnclosuresLock;
use vm_passthrough::pci::{self, PciFunction};
use vm_passthrough::usb4::{self, Domain, HotplugEvents, Route, Router, UniqueId};

use super::enclosure::{all, enclosure, log, name};
use super::gift::Gift;
use crate::context::Context;
use crate::failure::Failure;
use crate::json::{Body, EgpuChange, action_of, fault_of};
use crate::known_egpus::EgpuStore;
use crate::log::now;
use crate::signals::StopSignals;

/// How long a look may wait for another command on an enclosure. The next one comes soon.
const LOCK: Duration = Duration::from_millis(500);

/// How soon a signal is seen.
const SLICE: Duration = Duration::from_millis(100);

/// Arguments of `egpu watch`.
#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    #[command(flatten)]
    heartbeat: HeartbeatArgs,
    /// Hear of what comes and goes at a UNIX datagram socket that is made at PATH, where something passes uevents on, and not from
    /// the Linux kernel
    #[arg(long, value_name = "PATH")]
    uevents: Option<PathBuf>,
}

/// When an eGPU is not well.
#[derive(Debug, Args)]
pub(super) struct HeartbeatArgs {
    /// How often each is asked whether it is well, in milliseconds
    #[arg(short, long, value_name = "MILLISECONDS", default_value = "1000", value_parser = clap::value_parser!(u64).range(100..=60_000))]
    interval: u64,
    /// How many times in a row it may leave that unanswered before it is reset
    #[arg(long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u8).range(1..=100))]
    missed: u8,
    /// The temperature at which it is stopped, in degrees Celsius
    #[arg(long, value_name = "CELSIUS", default_value = "90", value_parser = clap::value_parser!(i32).range(30..=120))]
    hottest: i32,
}

impl HeartbeatArgs {
    pub(super) fn interval(&self) -> Duration {
        Duration::from_millis(self.interval)
    }

    pub(super) fn limits(&self) -> Limits {
        Limits { missed: self.missed, hottest: self.hottest * 1000, ..Limits::default() }
    }
}

/// Those that are watched over.
type Watched = BTreeMap<UniqueId, Egpu>;

/// One that is watched over.
struct Egpu {
    name: String,
    manager: Manager<HostEnclosure>,
    gift: Gift,
}

/// Watches over all enclosures with an accelerator, and those that may be connected.
///
/// # Errors
/// When the policy can't be read at first, or standard output can't be written.
pub(super) fn run(context: &mut Context<'_>, args: &WatchArgs) -> Result<(), Failure> {
    let limits = args.heartbeat.limits();
    EgpuStore::read(&context.host).map_err(Failure::failed)?;
    let cancel = Cancel::default();
    let stop = cancel.clone();
    let on_signal = move |signal| {
        tracing::info!("{signal}: enclosures stay as they are");
        stop.request();
    };
    let _signals = StopSignals::start(on_signal).map_err(Failure::failed)?;
    // Without announcements what comes is seen at the next look.
    let mut events = match &args.uevents {
        Some(path) => Some(HotplugEvents::at(path).map_err(|error| {
            Failure::failed(format_args!("no socket can be made at {}: {error}", path.display()))
        })?),
        None => HotplugEvents::listen().inspect_err(|error| tracing::debug!("no uevents: {error}")).ok(),
    };
    let mut watched = Watched::new();
    let mut refused = BTreeMap::new();
    while !cancel.is_requested() {
        match EnclosuresLock::take(&context.host, LOCK) {
            Ok(_lock) => look(context, &limits, &cancel, &mut watched, &mut refused)?,
            Err(error) => tracing::debug!("not looked at: {error}"),
        }
        wait(&mut events, args.heartbeat.interval(), &cancel);
    }
    Ok(())
}

/// Waits for the next look: until something comes or goes, a signal comes, or the interval has passed.
fn wait(events: &mut Option<HotplugEvents>, interval: Duration, cancel: &Cancel) {
    let until = Instant::now() + interval;
    while !cancel.is_requested() && Instant::now() < until {
        let slice = until.saturating_duration_since(Instant::now()).min(SLICE);
        match events.as_ref().map(|events| events.wait(slice)) {
            Some(Ok(false)) => {}
            // More come with it, and one that flaps must not keep this process busy.
            Some(Ok(true)) => return std::thread::sleep(SLICE),
            Some(Err(error)) => {
                tracing::warn!("uevents can't be read: {error}; what comes is seen at the next look");
                *events = None;
            }
            None => std::thread::sleep(slice),
        }
    }
}

/// Looks at all of them once.
fn look(
    context: &mut Context<'_>,
    limits: &Limits,
    cancel: &Cancel,
    watched: &mut Watched,
    refused: &mut BTreeMap<UniqueId, String>,
) -> Result<(), Failure> {
    let connected = match all(context) {
        Ok(connected) => connected,
        Err(error) => {
            tracing::warn!("{}", error.message);
            return Ok(());
        }
    };
    refused.retain(|id, _| connected.iter().any(|(_, router)| router.unique_id == Some(*id)));
    // One that comes again is another matter.
    watched.retain(|id, egpu| {
        egpu.manager.state() != State::Absent
            || !connected.iter().any(|(_, router)| router.unique_id == Some(*id))
    });
    for (domain, router) in &connected {
        let Some(id) = router.unique_id.filter(|id| !watched.contains_key(id)) else { continue };
        match admit(context, limits, cancel, domain, router, id) {
            Ok(Some((mut manager, asked))) => {
                refused.remove(&id);
                let (mut told, mut gift) = (Ok(()), Gift::default());
                let mut tell = |change: &Change| {
                    gift.note(change);
                    told = tell(context, id, &name(router), change);
                };
                if let Err(error) = manager.poll(&mut tell) {
                    tracing::warn!(enclosure = %id, "{error}");
                }
                if asked && manager.state() == State::Disconnected {
                    manager.take(Event::Connect, &mut tell);
                }
                watched.insert(id, Egpu { name: name(router), manager, gift });
                told?;
            }
            Ok(None) => {}
            // Said once, until it is pulled or the reason is another.
            Err(reason) if refused.get(&id) != Some(&reason) => {
                tracing::warn!(enclosure = %id, "{} is not connected: {reason}", name(router));
                refused.insert(id, reason);
            }
            Err(_) => {}
        }
    }
    for (id, Egpu { name, manager, gift }) in watched.iter_mut() {
        let mut told = Ok(());
        let mut tell = |change: &Change| {
            gift.note(change);
            told = tell(context, *id, name, change);
        };
        if let Err(error) = manager.poll(&mut tell) {
            tracing::warn!(enclosure = %id, "{error}");
        }
        told?;
        gift.give(context, *id, manager);
    }
    // What is left of one that is gone is tried to be undone at each look.
    watched.retain(|_, egpu| egpu.manager.state() != State::Absent || egpu.manager.leftover().is_some());
    Ok(())
}

/// A manager for an enclosure that has come, and whether it is to be connected; none for what has no accelerator.
fn admit(
    context: &Context<'_>,
    limits: &Limits,
    cancel: &Cancel,
    domain: &Domain,
    router: &Router,
    id: UniqueId,
) -> Result<Option<(Manager<HostEnclosure>, bool)>, String> {
    let store = EgpuStore::read(&context.host)?;
    let known = store.known.get(&id).map(|known| known.egpu.clone());
    let is_there = router.is_authorised();
    if is_there && known.is_none() && !has_accelerator(context, router.route)? {
        return Ok(None);
    }
    store.policy.judge(domain, router, known.is_some(), is_there).map_err(|refusal| refusal.to_string())?;
    let enclosure = enclosure(context, id, store.policy, known, cancel.clone());
    let enclosure = enclosure.map_err(|failure| failure.message)?;
    Ok(Some((Manager::new(enclosure, *limits), !is_there)))
}

/// Whether an accelerator may be behind a router.
fn has_accelerator(context: &Context<'_>, route: Route) -> Result<bool, String> {
    let functions = pci::scan(&context.host).map_err(|error| error.to_string())?;
    let domains = usb4::scan(&context.host).map_err(|error| error.to_string())?;
    let tunnels = usb4::tunnels(&context.host, &functions, &domains);
    let is_behind = |function: &&PciFunction| {
        tunnels.iter().any(|tunnel| tunnel.function == function.address && tunnel.via.router() == Some(route))
    };
    Ok(functions.iter().filter(is_behind).any(is_accelerator))
}

/// Prints what has happened.
fn tell(context: &mut Context<'_>, id: UniqueId, name: &str, change: &Change) -> Result<(), Failure> {
    log(id, change);
    let json = EgpuChange {
        enclosure: id.to_string(),
        name: name.into(),
        time: now(),
        from: change.from.name().into(),
        state: change.to.name().into(),
        action: action_of(change.to),
        fault: fault_of(change.to),
        error: change.error.clone(),
    };
    let because = json.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    let detail = json.fault.as_ref().or(json.action.as_ref()).map(|detail| format!(" ({detail})"));
    let text = format!("{} {name} {}{}{because}\n", json.time, json.state, detail.unwrap_or_default());
    context.print(|| Body::EgpuChange(json), || text)
}
