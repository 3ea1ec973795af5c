//! An enclosure of the host.

mod heartbeat;
mod reset;
mod thermometer;

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use super::{Action, EgpuError, Enclosure, KnownEgpu, Observation, Policy, Refusal, Rung, is_accelerator};
use crate::claim::{self, Cancel, ClaimError};
use crate::ledger::{self, Ledger};
use crate::pci::{self, PciFunction, PciIds};
use crate::usb4::{self, Domain, Route, Router, UniqueId, Via};
use crate::{Host, PciAddress, deadlines, files, readiness};
use heartbeat::Heartbeat;
use thermometer::Thermometer;

/// How often what is waited for is looked at.
const POLL: Duration = Duration::from_millis(100);
/// How long functions must stay the same for all of them to have come: Linux adds them one after the other.
const QUIET: Duration = Duration::from_millis(500);

type Result<T, E = EgpuError> = std::result::Result<T, E>;

/// Who runs the guests of the host.
pub trait Guests: fmt::Debug {
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
            before: BTreeSet::new(),
            functions: Vec::new(),
            accelerators: Vec::new(),
        }
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
        self.note(functions);
        Ok(self.verify().is_ok())
    }

    /// Notes what is in it.
    fn note(&mut self, functions: Vec<PciFunction>) {
        let accelerators = functions.iter().filter(|function| is_accelerator(function));
        self.accelerators = accelerators.map(|function| function.ids).collect();
        self.functions = functions.into_iter().map(|function| (function.address, function.ids)).collect();
    }

    /// Its router, with the domain that it is in.
    fn router(&self) -> Result<Option<(Domain, Router)>> {
        let domains = usb4::scan(&self.host)
            .map_err(|error| step("look at USB4", format!("{}: {error}", self.host.thunderbolt.display())))?;
        let mut found = domains.into_iter().flat_map(|domain| {
            let of = domain.routers.clone().into_iter().map(move |router| (domain.clone(), router));
            of.filter(|(_, router)| router.route.depth() > 0).collect::<Vec<_>>()
        });
        let mut found = found.by_ref().filter(|(_, router)| router.unique_id == Some(self.id));
        match (found.next(), found.next()) {
            (Some((_, one)), Some((_, other))) => {
                let reason =
                    format!("the routers {} and {} both say that they are it", one.route, other.route);
                Err(step(&format!("tell which enclosure {} is", self.id), reason))
            }
            (first, _) => Ok(first),
        }
    }

    fn connected(&self) -> Result<(Domain, Router)> {
        self.router()?.ok_or_else(|| EgpuError::NotConnected(self.id.to_string()))
    }

    /// The functions behind its router, bridges too. Where several routers may be it, those that were there before
    /// its tunnel are not.
    fn behind(&self, route: Route) -> Result<Vec<PciFunction>> {
        let functions = pci::scan(&self.host).map_err(|error| step("scan the host", error))?;
        let domains = usb4::scan(&self.host).map_err(|error| step("look at USB4", error))?;
        let tunnels = usb4::tunnels(&self.host, &functions, &domains);
        let is_its = |address: PciAddress| {
            tunnels.iter().filter(|tunnel| tunnel.function == address).any(|tunnel| match &tunnel.via {
                via if via.router() == Some(route) => true,
                Via::OneOf(routes) => routes.contains(&route) && !self.before.contains(&address),
                _ => false,
            })
        };
        Ok(functions.into_iter().filter(|function| is_its(function.address)).collect())
    }

    fn endpoints(&self, route: Route) -> Result<Vec<PciFunction>> {
        let mut functions = self.behind(route)?;
        functions.retain(|function| !function.is_bridge());
        Ok(functions)
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
        tracing::info!(router = %router.route, value, "write authorized");
        let written = self.host.writer().write(&path, value, deadlines::TUNNEL);
        written.map_err(|error| step(&format!("write {value} to {}", path.display()), error))
    }

    fn authorise(&mut self) -> Result<()> {
        let (_, router) = self.connected()?;
        if router.is_authorised() {
            return Ok(());
        }
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
        let accelerators: Vec<PciIds> = functions
            .iter()
            .filter(|function| is_accelerator(function))
            .map(|function| function.ids)
            .collect();
        if let Some(known) = self.known.as_ref().filter(|known| known.accelerators != accelerators) {
            return Err(EgpuError::AnotherGpu {
                enclosure: self.id.to_string(),
                found: names(&accelerators),
                known: names(&known.accelerators),
            });
        }
        self.check_power(&functions)?;
        self.note(functions);
        Ok(())
    }

    /// Checks what the slots say that they give.
    fn check_power(&self, functions: &[PciFunction]) -> Result<()> {
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
        let Some((_, router)) = self.router()? else { return Ok(Observation::default()) };
        let authorised = router.is_authorised();
        let functions = match authorised {
            true => self.endpoints(router.route)?,
            false => Vec::new(),
        };
        Ok(Observation {
            route: Some(router.route),
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
