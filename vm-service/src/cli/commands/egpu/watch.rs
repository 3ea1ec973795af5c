//! `egpu watch`: watches over enclosures until a signal comes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use clap::Args;
use vm_passthrough::Host;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Limits, Manager, Refusal, is_accelerator};
use vm_passthrough::ledger::{EnclosureLock, LedgerError};
use vm_passthrough::pci::{self, PciFunction};
use vm_passthrough::usb4::{self, Domain, HotplugEvents, Route, Router, SeenRouters, UniqueId};

use super::enclosure::{enclosure, name};
use super::warning::{Teller, Told, Warning, What};
use super::watcher::{Breach, Watcher, Work};
use crate::api::{Body, EgpuChange, EgpuWarning, action_of, fault_of};
use crate::cli::context::Context;
use crate::devices::known_egpus::EgpuStore;
use crate::failure::{EXIT_FAILED, Failure};
use crate::log;
use crate::os::signals::StopSignals;
use crate::os::sys;
use crate::text::table::printable;

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
        unread: Warning::default(),
        said: BTreeMap::new(),
        objections: BTreeMap::new(),
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
    /// That nothing can be read.
    unread: Warning,
    /// What was reported of those that may not be connected, each with its name.
    said: BTreeMap<UniqueId, (String, Warning)>,
    /// What the policy had against those that are watched over.
    objections: BTreeMap<UniqueId, Objection>,
    /// All that are connected, for the log.
    routers: SeenRouters,
}

/// An enclosure that is connected, and would not be by the policy.
struct Objection {
    /// Whether the operator has connected it, by an option or before the policy was this one.
    is_built: bool,
    breach: Breach,
}

impl Objection {
    /// Takes the policy's refusal of now, and returns the warning about it.
    fn update(&self, refusal: Option<Refusal>) -> Option<String> {
        let refusal = refusal.map(|refusal| refusal.to_string());
        if self.is_built {
            return refusal.map(|refusal| format!("it is connected, and would not be now: {refusal}"));
        }
        self.breach.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&refusal);
        refusal.map(|refusal| {
            format!(
                "it was authorised by the firmware or another program, and is disconnected once nobody uses it: {refusal}"
            )
        })
    }
}

impl Watched {
    /// Looks at what is connected.
    fn look(&mut self, host: &Host, is_woken: bool) {
        let all = self.teller(None, "");
        let connected = match connected(host) {
            Ok(connected) => connected,
            Err(error) => {
                let why = format!("cannot read {}: {error}", host.thunderbolt.display());
                return self.unread.update(Some(why), &all);
            }
        };
        self.unread.update(None, &all);
        self.routers.note(connected.iter().map(|(_, router)| router));
        // One that comes again is another matter.
        self.watchers.retain(|_, watcher| !watcher.has_ended());
        self.objections.retain(|id, _| self.watchers.contains_key(id));
        for watcher in self.watchers.values().filter(|_| is_woken) {
            watcher.wake();
        }
        let mut now = BTreeMap::new();
        for (domain, router) in &connected {
            let Some(id) = router.unique_id else { continue };
            let reason = match self.watchers.contains_key(&id) {
                true => self.objection(host, domain, router, id),
                false => self.admit(host, domain, router, id).unwrap_or_else(Some),
            };
            // Two may say the same UUID.
            if let Some(reason) = reason {
                now.entry(id).or_insert((name(router), reason));
            }
        }
        for (id, (name, _)) in &now {
            self.said.entry(*id).or_insert_with(|| (name.clone(), Warning::default()));
        }
        let tell = self.tell.clone();
        self.said.retain(|id, (name, warning)| {
            let teller = Teller { id: Some(*id), name: name.clone(), tell: tell.clone() };
            let reason = now.remove(id).map(|(_, reason)| reason);
            let holds = reason.is_some();
            warning.update(reason, &teller);
            holds
        });
    }

    fn teller(&self, id: Option<UniqueId>, name: &str) -> Teller {
        Teller { id, name: name.to_owned(), tell: self.tell.clone() }
    }

    /// Returns what the policy has now against an enclosure that is watched over, if it had anything when it came.
    fn objection(&self, host: &Host, domain: &Domain, router: &Router, id: UniqueId) -> Option<String> {
        let objection = self.objections.get(&id)?;
        let store = EgpuStore::read(host).unwrap_or_default();
        let known = store.known.contains_key(&id);
        let judged = store.policy.judge(domain, router, known, true);
        objection.update(judged.err().filter(|_| router.is_authorised()))
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
            store => store.map_err(|error| format!("it is not connected: {error}"))?,
        };
        let known = store.known.get(&id).map(|known| known.egpu.clone());
        let failed = |error: String| format!("it cannot be watched over: {error}");
        if is_there && known.is_none() && !has_accelerator(host, router.route).map_err(failed)? {
            return Ok(None);
        }
        let judged = store.policy.judge(domain, router, known.is_some(), is_there);
        if let (Err(refusal), false) = (&judged, is_there) {
            return Err(format!("it is not connected: {refusal}"));
        }
        let enclosure = enclosure(host, router, id, store.policy, known, self.cancel.clone());
        let enclosure = enclosure.map_err(|failure| failed(failure.message))?;
        let objection = Objection { is_built: enclosure.is_built(), breach: Breach::default() };
        let is_refused = judged.is_err();
        let said = objection.update(judged.err());
        let work = Work {
            host: host.clone(),
            id,
            manager: Manager::new(enclosure, self.limits),
            is_asked: !is_there,
            breach: objection.breach.clone(),
            interval: self.interval,
            cancel: self.cancel.clone(),
            teller: self.teller(Some(id), &name(router)),
        };
        let watcher = Watcher::start(work).map_err(|error| failed(error.to_string()))?;
        self.watchers.insert(id, watcher);
        if is_refused {
            self.objections.insert(id, objection);
        }
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
    let Told { id, name, what, time } = told;
    let change = match what {
        What::Changed(change) => change,
        What::Warned { text, is_withdrawn } => {
            let json = EgpuWarning {
                enclosure: id.map(|id| id.to_string()),
                name: id.map(|_| name.clone()),
                time,
                warning: text,
                withdrawn: is_withdrawn,
            };
            let of = if name.is_empty() { String::new() } else { format!("{} ", printable(&name)) };
            let word = if is_withdrawn { "warning withdrawn" } else { "warning" };
            let text = format!("{} {of}{word}: {}\n", json.time, printable(&json.warning));
            return context.print_line(|| Body::EgpuWarning(json), || text);
        }
    };
    let json = EgpuChange {
        enclosure: id.map(|id| id.to_string()).unwrap_or_default(),
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
