//! An enclosure of the host.

mod find;
mod heartbeat;
mod reset;
mod thermometer;

use std::collections::BTreeSet;
use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use super::{Action, EgpuError, Enclosure, KnownEgpu, Observation, Policy, Refusal, Rung, is_accelerator};
use crate::claim::{self, Cancel, ClaimError};
use crate::ledger::{self, EnclosureLock, Ledger};
use crate::pci::{self, PciFunction, PciIds};
use crate::usb4::{Route, Router, UniqueId};
use crate::{Host, PciAddress, deadlines, files, readiness};
use heartbeat::Heartbeat;
use thermometer::Thermometer;

/// How often what is waited for is looked at.
const POLL: Duration = Duration::from_millis(100);
/// How long functions must stay the same for all of them to have come: Linux adds them one after the other.
const QUIET: Duration = Duration::from_millis(500);

type Result<T, E = EgpuError> = std::result::Result<T, E>;

/// Who runs the guests of the host.
pub trait Guests: fmt::Debug + Send {
    /// Takes functions from the guest that has them; those that no guest has are passed over.
    ///
    /// # Errors
    /// Why a guest has one still.
    fn detach(&self, functions: &[PciAddress], force: bool) -> Result<(), String>;
}

/// An enclosure of the host, known by its router's UUID wherever it is connected.
#[derive(Debug)]
pub struct HostEnclosure {
    host: Host,
    id: UniqueId,
    policy: Policy,
    /// What has to be in it, if that is known.
    known: Option<KnownEgpu>,
    cancel: Cancel,
    guests: Box<dyn Guests>,
    thermometer: Thermometer,
    heartbeat: Heartbeat,
    /// From when it is taken from its driver until its tunnel is down: nobody claims it meanwhile.
    ledger: Option<Ledger>,
    /// From when its tunnel is asked for until its functions have come: no others come meanwhile.
    coming: Option<EnclosureLock>,
    /// Where it was seen last, which tells it from another that says the same UUID.
    route: Option<Route>,
    /// The host's functions before the tunnel was asked for.
    before: BTreeSet<PciAddress>,
    /// Its functions that are no bridges, as they were found when they came.
    functions: Vec<(PciAddress, PciIds)>,
    /// Which of them are accelerators.
    accelerators: Vec<PciIds>,
}

impl HostEnclosure {
    /// The enclosure of a router; nothing is looked at yet. Waits end early when `cancel` is requested.
    pub fn new(
        host: &Host,
        id: UniqueId,
        policy: Policy,
        known: Option<KnownEgpu>,
        cancel: Cancel,
        guests: Box<dyn Guests>,
    ) -> Self {
        Self {
            host: host.clone(),
            id,
            policy,
            known,
            cancel,
            guests,
            thermometer: Thermometer::default(),
            heartbeat: Heartbeat::default(),
            ledger: None,
            coming: None,
            route: None,
            before: BTreeSet::new(),
            functions: Vec::new(),
            accelerators: Vec::new(),
        }
    }

    /// The same, seen at this router: others that say that they have its UUID are not it.
    #[must_use]
    pub fn seen_at(self, route: Route) -> Self {
        Self { route: Some(route), ..self }
    }

    /// What is in it, to be known by. Empty before its functions have come.
    pub fn known(&self) -> KnownEgpu {
        KnownEgpu { id: self.id, accelerators: self.accelerators.clone() }
    }

    /// Its functions that are no bridges, as they came.
    pub fn functions(&self) -> Vec<PciAddress> {
        self.functions.iter().map(|(address, _)| *address).collect()
    }

    /// Takes it as it is, where it is connected already, and answers whether its functions are in order.
    ///
    /// # Errors
    /// When PCIe is not tunnelled to it, or it can't be looked at.
    pub fn adopt(&mut self) -> Result<bool> {
        let (_, router) = self.connected()?;
        if !router.is_authorised() {
            return Err(step("take it as it is", "no PCIe is tunnelled to it"));
        }
        let functions = self.endpoints(router.route)?;
        self.route = Some(router.route);
        self.note(functions);
        Ok(self.verify().is_ok())
    }

    /// Notes what is in it.
    fn note(&mut self, functions: Vec<PciFunction>) {
        let accelerators = functions.iter().filter(|function| is_accelerator(function));
        self.accelerators = accelerators.map(|function| function.ids).collect();
        self.functions = functions.into_iter().map(|function| (function.address, function.ids)).collect();
    }

    /// As [`wait`], but given up when that is asked for.
    fn wait<T>(&self, deadline: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
        wait(deadline, || match ready()? {
            None if self.cancel.is_requested() => Err(EgpuError::Cancelled),
            ready => Ok(ready),
        })
    }

    /// Writes its `authorized`.
    fn set_authorized(&self, router: &Router, value: &str) -> Result<()> {
        let path = self.host.thunderbolt.join("devices").join(router.route.to_string()).join("authorized");
        tracing::info!(target: "vm_passthrough::usb4", router = %router.route, value, "write authorized");
        let written = self.host.writer().write(&path, value, deadlines::TUNNEL);
        written.map_err(|error| step(&format!("write {value} to {}", path.display()), error))
    }

    fn authorise(&mut self) -> Result<()> {
        self.only(&self.routers()?)?;
        let (_, router) = self.connected()?;
        self.route = Some(router.route);
        if router.is_authorised() {
            return Ok(());
        }
        let is_given_up = || self.cancel.is_requested();
        let coming = EnclosureLock::of_all(&self.host, deadlines::OTHERS_COME, is_given_up);
        self.coming = Some(coming.map_err(|error| step("wait for other enclosures", error))?);
        let all = pci::scan(&self.host).map_err(|error| step("scan the host", error))?;
        self.before = all.iter().map(|function| function.address).collect();
        self.set_authorized(&router, "1")?;
        // Another enclosure may have come to the same port meanwhile.
        match self.connected()? {
            (_, now) if now.route == router.route && now.is_authorised() => Ok(()),
            _ => Err(step("have PCIe tunnelled to it", "its `authorized` reads 0 afterwards; see dmesg")),
        }
    }

    fn enumerate(&mut self) -> Result<()> {
        let (_, router) = self.connected()?;
        let route = router.route;
        self.route = Some(route);
        let mut last = (Vec::new(), Instant::now());
        let came = self.wait(deadlines::ENUMERATION, || {
            if !self.connected()?.1.is_authorised() {
                return Err(step("wait for its functions", "its tunnel was taken down meanwhile"));
            }
            let functions = self.endpoints(route)?;
            let now: Vec<PciAddress> = functions.iter().map(|function| function.address).collect();
            if now != last.0 {
                last = (now, Instant::now());
            }
            let is_whole = functions.iter().any(is_accelerator) && last.1.elapsed() >= QUIET;
            Ok(is_whole.then_some(functions))
        })?;
        let Some(functions) = came else {
            return Err(EgpuError::NoGpu { route, waited: deadlines::ENUMERATION, others: last.0 });
        };
        self.check_fit(&functions)?;
        self.note(functions);
        Ok(())
    }

    /// Checks whether its functions, if it has any, are those that are known, and what their slots say that they give.
    fn check_fit(&self, functions: &[PciFunction]) -> Result<()> {
        let accelerators = functions.iter().filter(|function| is_accelerator(function));
        let accelerators: Vec<PciIds> = accelerators.map(|function| function.ids).collect();
        let is_other = |known: &&KnownEgpu| !accelerators.is_empty() && known.accelerators != accelerators;
        if let Some(known) = self.known.as_ref().filter(is_other) {
            return Err(EgpuError::AnotherGpu {
                enclosure: self.id.to_string(),
                found: names(&accelerators),
                known: names(&known.accelerators),
            });
        }
        let needs = self.policy.minimum_power;
        let slots = functions.iter().filter(|function| is_accelerator(function));
        for slot in slots.filter_map(|function| function.upstream) {
            if let Some(has) = pci::slot_power(&self.host, slot).filter(|&has| has < needs) {
                return Err(Refusal::TooWeak { has, needs }.into());
            }
        }
        Ok(())
    }

    /// Whether each function answers, is what it was, and has its BARs.
    fn verify(&self) -> Result<()> {
        if self.functions.is_empty() {
            return Err(step("verify it", "it has no functions"));
        }
        for (address, ids) in &self.functions {
            let unsound = |what: String| EgpuError::Unsound { address: *address, what };
            let config =
                pci::read_config(&self.host, *address).map_err(|error| unsound(error.to_string()))?;
            heartbeat::check_ids(&config, ids).map_err(unsound)?;
            for bar in pci::bars(&self.host, *address) {
                if bar.size > 0 && bar.address == 0 && bar.kind != pci::BarKind::Io {
                    return Err(EgpuError::Unsound {
                        address: *address,
                        what: format!(
                            "Linux has no room for its BAR {} of {}; connect it before the host boots, or give its port more \
                             room (pci=hpmmiosize=, pci=hpmmioprefsize=)",
                            bar.index,
                            readiness::size_text(bar.size)
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    /// Who of the host uses its functions, without guests.
    fn users(&self, with_guests: bool) -> Result<Vec<String>> {
        let claims = match &self.ledger {
            Some(ledger) => ledger.entries(),
            None => ledger::claims(&self.host, deadlines::LEDGER_READ),
        };
        let claims = claims.map_err(|error| step("see who has it", error))?;
        let mut users = Vec::new();
        for (address, _) in &self.functions {
            let claim = claims
                .iter()
                .flatten()
                .find(|claim| claim.alive && !claim.void && claim.entry.function(*address).is_some());
            if let Some(claim) = claim {
                let owner = claim.entry.user.as_ref().unwrap_or(&claim.entry.owner);
                if with_guests {
                    users.push(owner.to_string());
                }
                continue;
            }
            users.extend(readiness::users(&self.host, *address).iter().map(ToString::to_string));
        }
        users.dedup();
        Ok(users)
    }

    /// Waits for who uses it on the host.
    fn stop_work(&self, force: bool) -> Result<()> {
        if force {
            return Ok(());
        }
        let mut users = Vec::new();
        let idle = self.wait(deadlines::WORK, || {
            users = self.users(false)?;
            Ok(users.is_empty().then_some(()))
        })?;
        idle.ok_or(EgpuError::Used { what: "it".into(), users })
    }

    fn detach(&self, force: bool) -> Result<()> {
        let functions = self.functions();
        if functions.is_empty() {
            return Ok(());
        }
        let detached = self.guests.detach(&functions, force);
        detached.map_err(|reason| step("take it from its guest", reason))
    }

    /// Takes its functions from their drivers.
    fn unbind(&mut self, force: bool) -> Result<()> {
        match Ledger::lock(&self.host, claim::DEADLINE) {
            Ok(ledger) => self.ledger = Some(ledger),
            Err(error) if force => tracing::warn!("it may be claimed until its tunnel is down: {error}"),
            Err(error) => return Err(step("keep others from it", error)),
        }
        // Who has begun to use it since it was free keeps it.
        let users = if force { Vec::new() } else { self.users(true)? };
        if !users.is_empty() {
            return Err(EgpuError::Used { what: "it".into(), users });
        }
        let mut failed = Vec::new();
        for (address, _) in &self.functions {
            match claim::unbind(&self.host, *address, claim::DEADLINE) {
                Ok(()) | Err(claim::BindError::Vanished(_)) => {}
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(step("take it from its driver", failed.join("; "))) }
    }

    fn deauthorise(&mut self) -> Result<()> {
        let router = self.router()?;
        if let Some((domain, router)) = router.as_ref().filter(|(_, router)| router.is_authorised()) {
            if !domain.deauthorization {
                return Err(step(
                    "take its tunnel down",
                    format!(
                        "domain{} can't (its `deauthorization` is 0); no driver of the host has it any more, so pull its cable",
                        domain.number
                    ),
                ));
            }
            self.set_authorized(router, "0")?;
        }
        // Also where somebody else took it down, or has pulled it. What undoes is not given up.
        let there = |(address, ids): &&(PciAddress, PciIds)| is_there(&self.host, *address, ids);
        let mut are_gone = || Ok((!self.functions.iter().any(|function| there(&function))).then_some(()));
        if router.is_some() && wait(deadlines::ENUMERATION, &mut are_gone)?.is_none() {
            // A port that has lost its link may not have told Linux.
            for (address, _) in self.functions.iter().filter(there) {
                let path = self.host.pci_device(*address).join("remove");
                tracing::warn!("{address} is there without its tunnel: write 1 to {}", path.display());
                if let Err(error) = self.host.writer().write(&path, "1", deadlines::TUNNEL) {
                    tracing::warn!("{}: {error}", path.display());
                }
            }
        }
        wait(deadlines::ENUMERATION, are_gone)?.ok_or_else(|| {
            step(
                "take its tunnel down",
                "its functions are there still; see dmesg for who does not let go of them",
            )
        })?;
        if self.router()?.is_some_and(|(_, router)| router.is_authorised()) {
            return Err(step("take its tunnel down", "its `authorized` does not read 0 afterwards"));
        }
        self.ledger = None;
        self.settle()
    }

    /// Ends what the ledger notes of functions that are gone. Those of which that fails, or that are not gone yet, are kept for
    /// the next try.
    fn settle(&mut self) -> Result<()> {
        let mut failed = Vec::new();
        self.functions.retain(|(address, ids)| {
            if is_there(&self.host, *address, ids) {
                failed.push(format!("{address} is there still; see dmesg for who does not let go of it"));
                return true;
            }
            match claim::release_persistent(&self.host, *address, claim::DEADLINE) {
                // Who has it hears of it, and releases it.
                Ok(()) | Err(ClaimError::NotClaimed(_) | ClaimError::Taken { .. }) => false,
                Err(error) => {
                    failed.push(error.to_string());
                    true
                }
            }
        });
        if failed.is_empty() { Ok(()) } else { Err(step("settle the ledger", failed.join("; "))) }
    }

    fn reset(&mut self, rung: Rung) -> Result<()> {
        match rung {
            Rung::SoftReset => reset::soft(&self.host, &self.functions()),
            Rung::HardReset => reset::hard(&self.host, &self.functions()),
            Rung::Reconnect => {
                let functions = self.functions.clone();
                let (_, router) = self.connected()?;
                // What would not be used afterwards keeps what it has.
                self.check_fit(&self.endpoints(router.route)?)?;
                if router.is_authorised() {
                    self.deauthorise()?;
                }
                self.authorise()?;
                let known = self.known.replace(self.known());
                let enumerated = self.enumerate();
                self.known = known;
                if enumerated.is_err() {
                    self.functions = functions;
                }
                enumerated
            }
        }
    }
}

impl Enclosure for HostEnclosure {
    fn observe(&mut self) -> Result<Observation> {
        let Some((_, router)) = self.router()? else {
            self.route = None;
            return Ok(Observation::default());
        };
        let authorised = router.is_authorised();
        // Another directory has another number in sysfs.
        let dir = self.host.thunderbolt.join("devices").join(router.route.to_string());
        let instance = std::fs::metadata(dir).ok().map(|dir| dir.ino());
        let functions = match authorised {
            true => self.endpoints(router.route)?,
            false => Vec::new(),
        };
        Ok(Observation {
            route: Some(router.route),
            instance,
            authorised,
            functions: functions.iter().map(|function| function.address).collect(),
            users: self.users(true)?,
        })
    }

    fn act(&mut self, action: Action) -> Result<()> {
        let done = match action {
            Action::Authorise => self.authorise(),
            Action::Enumerate => self.enumerate(),
            Action::Verify => self.verify(),
            Action::StopWork { force } => self.stop_work(force),
            Action::Detach { force } => self.detach(force),
            Action::Unbind { force } => self.unbind(force),
            Action::Deauthorise => self.deauthorise(),
            Action::Reset(rung) => self.reset(rung),
            Action::Settle => self.settle(),
        };
        if done.is_err() || !matches!(action, Action::Unbind { .. }) {
            self.ledger = None;
        }
        if done.is_err() || action != Action::Authorise {
            self.coming = None;
        }
        done
    }

    fn heartbeat(&mut self) -> Result<()> {
        self.heartbeat.beat(&self.host, &self.functions)
    }

    fn temperature(&mut self) -> Option<i32> {
        self.thermometer.hottest(&self.host, &self.functions)
    }
}

/// Waits until `ready` says what it has; none when the deadline passes first.
fn wait<T>(deadline: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let until = Instant::now() + deadline;
    loop {
        let ready = ready()?;
        if ready.is_some() || Instant::now() >= until {
            return Ok(ready);
        }
        std::thread::sleep(POLL);
    }
}

/// Whether the host has a function still. Another may have come to its address since.
fn is_there(host: &Host, address: PciAddress, ids: &PciIds) -> bool {
    let dir = host.pci_device(address);
    let says = |file: &str, id: u16| {
        files::read_trimmed(&dir.join(file)).is_none_or(|text| text == format!("{id:#06x}"))
    };
    dir.exists() && says("vendor", ids.vendor) && says("device", ids.device)
}

fn step(what: &str, reason: impl fmt::Display) -> EgpuError {
    EgpuError::Step { what: what.into(), reason: reason.to_string() }
}

fn names(accelerators: &[PciIds]) -> String {
    match accelerators {
        [] => "none".into(),
        _ => accelerators.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}
