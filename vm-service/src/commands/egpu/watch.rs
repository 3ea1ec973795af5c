//! `egpu watch`: watches over enclosures until a signal comes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use clap::Args;
use vm_passthrough::Host;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Limits, Manager, is_accelerator};
use vm_passthrough::ledger::{EnclosureLock, LedgerError};
use vm_passthrough::pci::{self, PciFunction};
use vm_passthrough::usb4::{self, Domain, HotplugEvents, Route, Router, SeenRouters, UniqueId};

use super::enclosure::{enclosure, name};
use super::watcher::{Told, Watcher, Work};
use crate::context::Context;
use crate::failure::{EXIT_FAILED, Failure};
use crate::json::{Body, EgpuChange, action_of, fault_of};
use crate::known_egpus::EgpuStore;
use crate::signals::StopSignals;
use crate::table::printable;
use crate::{log, sys};

/// How soon a signal is seen.
const SLICE: Duration = Duration::from_millis(100);
/// How long standard output may not be read when all else has ended.
const UNREAD: Duration = Duration::from_secs(2);

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
    /// How often each sends a heartbeat, in milliseconds
    #[arg(short, long, value_name = "MILLISECONDS", default_value = "1000", value_parser = clap::value_parser!(u64).range(100..=60_000))]
    interval: u64,
    /// How many heartbeats in a row it may miss before it is reset
    #[arg(long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u8).range(1..=100))]
    missed: u8,
    /// The temperature at which the GPU is stopped, in degrees Celsius
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

/// Watches over all enclosures with an accelerator, and those that may be connected.
///
/// # Errors
/// When the ledger can't be used, or standard output can't be written.
pub(super) fn run(context: &mut Context<'_>, args: &WatchArgs) -> Result<(), Failure> {
    // A user without the rights for it gets to know at once.
    match EnclosureLock::of_all(&context.host, Duration::ZERO, || false) {
        Ok(_) | Err(LedgerError::Busy { .. }) => {}
        Err(error) => return Err(Failure::failed(error)),
    }
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
            Failure::failed(format_args!(
                "no socket can be made at {}: {error}; if no other `watch` uses it, remove it",
                path.display()
            ))
        })?),
        None => HotplugEvents::listen().inspect_err(|error| tracing::debug!("no uevents: {error}")).ok(),
    };
    let (tell, told) = channel();
    let mut watched = Watched {
        limits: args.heartbeat.limits(),
        interval: args.heartbeat.interval(),
        cancel: cancel.clone(),
        tell,
        watchers: BTreeMap::new(),
        said: BTreeMap::new(),
        routers: SeenRouters::default(),
    };
    let host = context.host.clone();
    let interval = args.heartbeat.interval();
    // Standard output may not be read: what is watched over must not wait for that.
    let (printing, printed) = channel::<()>();
    let watch = {
        let cancel = cancel.clone();
        move || {
            let mut is_woken = true;
            while !cancel.is_requested() {
                watched.look(&host, is_woken);
                is_woken = wait(&mut events, interval, &cancel);
            }
            watched.end();
            // Ends what is printed, once all of that has come.
            drop(watched);
            end_unread(&printed);
        }
    };
    let watch =
        std::thread::Builder::new().name("egpu-watch".into()).spawn(watch).map_err(Failure::failed)?;
    let outcome = told.iter().try_for_each(|told| print(context, told));
    cancel.request();
    drop(printing);
    let ended = watch.join().map_err(|_| Failure::failed("the thread that watches has panicked"));
    outcome.and(ended)
}

/// Ends this process where standard output is not read for as long as [`UNREAD`], once printing is all that it waits for.
fn end_unread(printed: &Receiver<()>) {
    if printed.recv_timeout(UNREAD) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!("standard output is not read; what was left to print is lost");
        log::flush();
        sys::exit_at_once(EXIT_FAILED);
    }
}

/// Waits for the next look: until something comes or goes, which it answers, a signal comes, or the interval has passed.
fn wait(events: &mut Option<HotplugEvents>, interval: Duration, cancel: &Cancel) -> bool {
    let until = Instant::now() + interval;
    loop {
        if cancel.is_requested() || Instant::now() >= until {
            return false;
        }
        let slice = until.saturating_duration_since(Instant::now()).min(SLICE);
        match events.as_ref().map(|events| events.wait(slice)) {
            Some(Ok(false)) => {}
            // More come with it, and one that flaps must not keep this process busy.
            Some(Ok(true)) => {
                std::thread::sleep(SLICE);
                return true;
            }
            Some(Err(error)) => {
                tracing::warn!("uevents can't be read: {error}; what comes is seen at the next look");
                *events = None;
            }
            None => std::thread::sleep(slice),
        }
    }
}

/// Those that are watched over, each on a thread of its own.
struct Watched {
    limits: Limits,
    interval: Duration,
    cancel: Cancel,
    tell: Sender<Told>,
    watchers: BTreeMap<UniqueId, Watcher>,
    /// What was reported of those that may not be connected.
    said: BTreeMap<UniqueId, String>,
    /// All that are connected, for the log.
    routers: SeenRouters,
}

impl Watched {
    /// Looks at what is connected.
    fn look(&mut self, host: &Host, is_woken: bool) {
        let connected = match connected(host) {
            Ok(connected) => connected,
            Err(error) => {
                tracing::warn!("can't read {}: {error}", host.thunderbolt.display());
                return;
            }
        };
        self.routers.note(connected.iter().map(|(_, router)| router));
        self.said.retain(|id, _| connected.iter().any(|(_, router)| router.unique_id == Some(*id)));
        // One that comes again is another matter.
        self.watchers.retain(|_, watcher| !watcher.has_ended());
        for watcher in self.watchers.values().filter(|_| is_woken) {
            watcher.wake();
        }
        for (domain, router) in &connected {
            let Some(id) = router.unique_id.filter(|id| !self.watchers.contains_key(id)) else { continue };
            let admitted = self.admit(host, domain, router, id).unwrap_or_else(Some);
            // Reported once, until it is pulled or the reason is another.
            if let Some(reason) = admitted
                && self.said.get(&id) != Some(&reason)
            {
                tracing::warn!(enclosure = %id, "{} {reason}", name(router));
                self.said.insert(id, reason);
            }
        }
    }

    /// Watches over an enclosure that has come, if it has an accelerator and may be connected or is, and answers what is to be reported
    /// of it.
    fn admit(
        &mut self,
        host: &Host,
        domain: &Domain,
        router: &Router,
        id: UniqueId,
    ) -> Result<Option<String>, String> {
        let is_there = router.is_authorised();
        let store = match EgpuStore::read(host) {
            // What is connected is watched over all the same.
            Err(error) if is_there => {
                tracing::debug!("{error}");
                EgpuStore::default()
            }
            store => store.map_err(|error| format!("is not connected: {error}"))?,
        };
        let known = store.known.get(&id).map(|known| known.egpu.clone());
        let failed = |error: String| format!("can't be watched over: {error}");
        if is_there && known.is_none() && !has_accelerator(host, router.route).map_err(failed)? {
            return Ok(None);
        }
        let judged = store.policy.judge(domain, router, known.is_some(), is_there);
        if let (Err(refusal), false) = (&judged, is_there) {
            return Err(format!("is not connected: {refusal}"));
        }
        let enclosure = enclosure(host, router, id, store.policy, known, self.cancel.clone());
        let enclosure = enclosure.map_err(|failure| failed(failure.message))?;
        let (said, breach) = match judged {
            Ok(()) => (None, None),
            // The operator has connected it, by an option or before the policy was this one.
            Err(refusal) if enclosure.is_built() => {
                (Some(format!("is connected, and would not be now: {refusal}")), None)
            }
            Err(refusal) => (
                Some(format!(
                    "was authorised by the firmware or another program, and is disconnected once nobody uses it: {refusal}"
                )),
                Some(refusal.to_string()),
            ),
        };
        let work = Work {
            host: host.clone(),
            id,
            name: name(router),
            manager: Manager::new(enclosure, self.limits),
            is_asked: !is_there,
            breach,
            interval: self.interval,
            cancel: self.cancel.clone(),
            tell: self.tell.clone(),
        };
        let watcher = Watcher::start(work).map_err(|error| failed(error.to_string()))?;
        self.watchers.insert(id, watcher);
        Ok(said)
    }

    /// Waits for all to end.
    fn end(&mut self) {
        for (_, watcher) in std::mem::take(&mut self.watchers) {
            watcher.end();
        }
    }
}

/// All that is connected, but for hosts, without what could wait for a router.
fn connected(host: &Host) -> std::io::Result<Vec<(Domain, Router)>> {
    let domains = usb4::scan_routers(host)?;
    let of = |domain: &Domain| {
        let routers = domain.routers.iter().filter(|router| router.route.depth() > 0);
        routers.map(|router| (domain.clone(), router.clone())).collect::<Vec<_>>()
    };
    Ok(domains.iter().flat_map(of).collect())
}

/// Whether an accelerator may be behind a router.
fn has_accelerator(host: &Host, route: Route) -> Result<bool, String> {
    let functions = pci::scan_attributes(host).map_err(|error| error.to_string())?;
    let domains = usb4::scan_routers(host).map_err(|error| error.to_string())?;
    let tunnels = usb4::tunnels(host, &functions, &domains);
    let is_behind = |function: &&PciFunction| {
        tunnels.iter().any(|tunnel| tunnel.function == function.address && tunnel.via.router() == Some(route))
    };
    Ok(functions.iter().filter(is_behind).any(is_accelerator))
}

/// Prints what has happened, with `--json` a document on a line of its own.
fn print(context: &mut Context<'_>, told: Told) -> Result<(), Failure> {
    let Told { id, name, change, time } = told;
    let json = EgpuChange {
        enclosure: id.to_string(),
        name,
        time,
        from: change.from.name().into(),
        state: change.to.name().into(),
        action: action_of(change.to),
        fault: fault_of(change.to),
        error: change.error,
    };
    let because = json.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    let detail = json.fault.as_ref().or(json.action.as_ref()).map(|detail| format!(" ({detail})"));
    let detail = detail.unwrap_or_default();
    let text = format!("{} {} {}{detail}{because}\n", json.time, printable(&json.name), json.state);
    context.print_line(|| Body::EgpuChange(json), || text)
}
