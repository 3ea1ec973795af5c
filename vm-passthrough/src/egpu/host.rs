//! An enclosure of the host.

mod built;
mod find;
mod heartbeat;
mod release;
mod reset;
mod thermometer;
mod users;
mod verify;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use std::{fmt, io};

use super::{
    Action, Dropped, EgpuError, Enclosure, KnownEgpu, Observation, Policy, QUIET, Refusal, Rung,
    is_accelerator,
};
use crate::claim::FunctionLocks;
use crate::claim::{self, Cancel};
use crate::ledger::EnclosureLock;
use crate::pci::{self, PciFunction, PciIds};
use crate::usb4::{self, Domain, Route, Router, UniqueId};
use crate::{Host, PciAddress, deadlines};
use heartbeat::Heartbeat;
use thermometer::Thermometer;
use users::Processes;

/// How often what is waited for is looked at.
const POLL: Duration = Duration::from_millis(100);

type Result<T, E = EgpuError> = std::result::Result<T, E>;

/// What runs the guests of the host.
pub trait Guests: fmt::Debug + Send {
    /// Detaches functions from the guest that has them; those that no guest has are skipped.
    ///
    /// # Errors
    /// Why a guest has one still.
    fn detach(&self, functions: &[PciAddress], force: bool) -> Result<(), String>;
}

/// How long it is waited for, which tests shorten.
#[derive(Debug)]
pub(in crate::egpu) struct Deadlines {
    /// A driver lets go of a function.
    pub(in crate::egpu) unbinding: Duration,
    /// The functions behind a new tunnel come.
    pub(in crate::egpu) enumeration: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { unbinding: claim::DEADLINE, enumeration: deadlines::ENUMERATION }
    }
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
    processes: Processes,
    pub(in crate::egpu) deadlines: Deadlines,
    /// Users that the last action ended.
    ended: Option<String>,
    /// Why it was not sound when it was taken as it was.
    unsound: Option<String>,
    /// From when it is unbound from its driver until its tunnel is down: nobody claims it meanwhile.
    locks: Option<FunctionLocks>,
    /// From when its tunnel is built until its functions have come: no others come meanwhile.
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
            processes: Processes::default(),
            deadlines: Deadlines::default(),
            ended: None,
            unsound: None,
            locks: None,
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

    /// Whether its tunnel was built by [`Action::Authorise`] here, in any process, and not taken down since: firmware and others
    /// build tunnels too.
    pub fn is_built(&self) -> bool {
        self.route
            .is_some_and(|route| built::is_built(&self.host, self.id, usb4::instance(&self.host, route)))
    }

    /// What is in it, to be known by. Empty before its functions have come.
    pub fn known(&self) -> KnownEgpu {
        KnownEgpu { id: self.id, accelerators: self.accelerators.clone() }
    }

    /// Returns why its temperature is not known, though it should be; `None` also while it sleeps.
    pub fn unwatched(&self) -> Option<&str> {
        self.thermometer.blind.as_deref()
    }

    /// Its functions that are no bridges, as they came.
    pub fn functions(&self) -> Vec<PciAddress> {
        self.functions.iter().map(|(address, _)| *address).collect()
    }

    /// Takes it as it is, where it is connected already, and answers whether its functions are in order; where they are not,
    /// [`Enclosure::unsound`] says why.
    ///
    /// # Errors
    /// When PCIe is not tunnelled to it, or it can't be looked at.
    pub fn adopt(&mut self) -> Result<bool> {
        let (_, router) = self.connected()?;
        if !router.is_authorised() {
            let reason = "no PCIe is tunnelled to it; run `vm-service egpu connect`";
            return Err(step("take it as it is", reason));
        }
        let functions = self.endpoints(router.route)?;
        self.route = Some(router.route);
        self.note(functions);
        self.unsound = verify::verify(&self.host, &self.functions).err().map(|error| error.to_string());
        Ok(self.unsound.is_none())
    }

    /// Notes what is in it.
    fn note(&mut self, functions: Vec<PciFunction>) {
        let accelerators = functions.iter().filter(|function| is_accelerator(function));
        self.accelerators = accelerators.map(|function| function.ids).collect();
        self.functions = functions.into_iter().map(|function| (function.address, function.ids)).collect();
        self.heartbeat.begin(&self.host, &self.functions);
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
        written.map_err(|error| {
            let fix = match error.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    "run this as root, with sysfs mounted writable"
                }
                _ => "see dmesg for the reason of the thunderbolt driver, then plug the enclosure in again",
            };
            step(&format!("write {value} to {}", path.display()), format_args!("{error}; {fix}"))
        })
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
        let all = pci::scan_attributes(&self.host).map_err(|error| step("scan the host", error))?;
        self.before = all.iter().map(|function| function.address).collect();
        let written = self.set_authorized(&router, "1");
        // Another enclosure may have come to the same port meanwhile.
        match self.connected()? {
            // Linux refuses to authorise what is authorised already, as by bolt in the meantime.
            (_, now) if now.route == router.route && now.is_authorised() => {}
            _ => {
                written?;
                return Err(step(
                    "have PCIe tunnelled to it",
                    "its `authorized` reads 0 afterwards; see dmesg for the reason of the thunderbolt driver, check the cable, then plug the \
                     enclosure in again",
                ));
            }
        }
        if written.is_ok() {
            built::note(&self.host, self.id, router.instance);
        }
        Ok(())
    }

    fn enumerate(&mut self) -> Result<()> {
        let (_, router) = self.connected()?;
        let route = router.route;
        self.route = Some(route);
        let mut last = (Vec::new(), Instant::now());
        let came = self.wait(self.deadlines.enumeration, || {
            if !self.connected()?.1.is_authorised() {
                return Err(step(
                    "wait for its functions",
                    "its tunnel was taken down meanwhile; see dmesg, and whether another program manages it (`boltctl list`), then \
                     connect it again",
                ));
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
            return Err(EgpuError::NoGpu { route, waited: self.deadlines.enumeration, others: last.0 });
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

    /// Whether the tunnel that was built to it is gone unasked, and what to do then.
    fn dropped(&self, domain: &Domain, router: &Router, instance: Option<u64>) -> Option<Dropped> {
        if router.is_authorised() || !built::is_built(&self.host, self.id, instance) {
            return None;
        }
        let router_dir = self.host.thunderbolt.join("devices").join(router.route.to_string());
        let interface = domain.host_interface.map(|interface| self.host.pci_device(interface));
        let dirs = [router_dir].into_iter().chain(interface);
        let files: Vec<String> = dirs.map(|dir| dir.join("power/control").display().to_string()).collect();
        Some(Dropped {
            why: format!(
                "its tunnel is gone, and no command took it down; if runtime power management did, write `on` to {}",
                files.join(" and ")
            ),
            comes_back: self.policy.judge(domain, router, self.known.is_some(), false).is_ok(),
        })
    }

    fn reset(&mut self, rung: Rung) -> Result<()> {
        tracing::info!(enclosure = %self.id, "{rung} begins");
        match rung {
            Rung::SoftReset => reset::soft(&self.host, &self.functions()),
            Rung::HardReset => reset::hard(&self.host, &self.functions()),
            Rung::Reconnect => {
                let functions = self.functions.clone();
                let (_, router) = self.connected()?;
                let route = router.route;
                // What would not be used afterwards keeps what it has.
                self.check_fit(&self.endpoints(router.route)?)?;
                match router.is_authorised() {
                    true => self.deauthorise()?,
                    // What is noted of functions that went with their tunnel.
                    false => self.settle()?,
                }
                self.authorise()?;
                let known = self.known.clone();
                // The same GPU has to return. One whose functions went with their tunnel is known only if it was remembered.
                if !self.accelerators.is_empty() {
                    self.known = Some(self.known());
                }
                let enumerated = self.enumerate();
                self.known = known;
                enumerated.inspect_err(|_| {
                    self.give_up_tunnel(route);
                    self.functions = functions;
                })
            }
        }
    }
}

impl Enclosure for HostEnclosure {
    fn observe(&mut self) -> Result<Observation> {
        let Some((domain, router)) = self.router()? else {
            if self.route.take().is_some() {
                built::forget(&self.host, self.id);
            }
            return Ok(Observation::default());
        };
        let authorised = router.is_authorised();
        let instance = router.instance;
        let functions = match authorised {
            true => self.endpoints(router.route)?,
            false => Vec::new(),
        };
        Ok(Observation {
            route: Some(router.route),
            instance,
            authorised,
            functions: functions.iter().map(|function| function.address).collect(),
            users: self.remembered_users()?,
            dropped: self.dropped(&domain, &router, instance),
        })
    }

    fn act(&mut self, action: Action) -> Result<()> {
        self.ended = None;
        let done = match action {
            Action::Authorise => self.authorise(),
            Action::Enumerate => self.enumerate(),
            Action::Verify => verify::verify(&self.host, &self.functions),
            Action::StopWork { force } => self.stop_work(force),
            Action::Detach { force } => self.detach(force),
            Action::Release => self.release(),
            Action::Unbind { force } => self.unbind(force),
            Action::Deauthorise => self.deauthorise(),
            Action::Reset(rung) => self.reset(rung),
            Action::Settle => self.settle(),
        };
        if done.is_err() || !matches!(action, Action::Unbind { .. }) {
            self.locks = None;
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

    fn sensor(&self) -> Option<String> {
        self.thermometer.sensor.clone()
    }

    fn ended(&mut self) -> Option<String> {
        self.ended.take()
    }

    fn unsound(&self) -> Option<String> {
        self.unsound.clone()
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

fn step(what: &str, reason: impl fmt::Display) -> EgpuError {
    EgpuError::Step { what: what.into(), reason: reason.to_string() }
}

fn names(accelerators: &[PciIds]) -> String {
    match accelerators {
        [] => "none".into(),
        _ => accelerators.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}
