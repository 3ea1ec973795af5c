//! The devices of a guest: claimed, opened and attached while it boots, detached and released after.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vm_passthrough::claim::{BindError, ClaimError, ClaimOptions};
use vm_passthrough::deadlines::LEDGER;
use vm_passthrough::guest::{self, DeviceError, KvmVmm, VfioPciDevice};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::pci::placement::FunctionRequest;
use vm_passthrough::readiness::{
    BlockerCode, ExplainOptions, Explainer, FILES_PER_VECTOR, Readiness, Severity,
};
use vm_passthrough::vfio::{
    self, AddressSpace as _, Backend, DeviceFile, MSI_IRQ, MSIX_IRQ, Presence, Space, VfioDevice, VfioError,
};
use vm_passthrough::{PassthroughDevice, PassthroughManager, PciAddress, PciFunction};

use super::handle::{AttachRequest, Message, Refused};
use super::keeper::entrust;
use super::state::{Action, Detached, Event};
use super::watch::{Watch, Watched};
use crate::deadlines::CLOSE;
use crate::limits;
use crate::vmm::{ExpectedFunction, Machine, MachineError, MachineHandle, Stop};

/// How devices are taken.
#[derive(Clone, Debug)]
pub(crate) struct DeviceOptions {
    /// How they are claimed.
    pub(crate) claim: ClaimOptions,
    /// `None` for the best that there is.
    pub(crate) backend: Option<Backend>,
    /// Whether a device is given to the guest although nothing resets it.
    pub(crate) without_reset: bool,
}

/// A function that the guest has, or is to have.
struct Function {
    /// As it was found before it was claimed.
    found: PciFunction,
    /// What its BARs need, and the slot that it belongs into.
    request: FunctionRequest,
    options: DeviceOptions,
    /// How many interrupt vectors it has, once it is open.
    vectors: u64,
    /// What is needed to watch it, once it is open and until it is attached.
    watched: Option<Watched>,
}

impl Function {
    fn new(found: PciFunction, options: DeviceOptions) -> Self {
        let request = FunctionRequest::of(&found, true);
        Self { found, request, options, vectors: 0, watched: None }
    }
}

/// A guest's devices, and the manager that claims them. Dropping it gives them back too, and only logs what fails.
pub(crate) struct Devices {
    // The order matters: what is open is closed before its claim is released.
    open: BTreeMap<PciAddress, Arc<VfioPciDevice>>,
    /// What they are opened in, and what their DMA is mapped in, which is the same, shared; there while a device is open.
    space: Option<(Arc<Space>, Arc<Space>)>,
    manager: PassthroughManager,
    functions: BTreeMap<PciAddress, Function>,
    /// How those that the guest starts with are taken; others by what their request says.
    options: DeviceOptions,
    /// What is to be known of the guest to explain what it can have.
    explain: ExplainOptions,
    /// The machine, while there is one.
    machine: Option<(Arc<KvmVmm>, MachineHandle)>,
    /// What watches the devices that are attached.
    watch: Option<Watch>,
}

impl Devices {
    /// The devices that were found as `functions`, which `manager` claims; none is touched yet. What comes later must pass
    /// `explain`.
    pub(crate) fn new(
        manager: PassthroughManager,
        functions: Vec<PciFunction>,
        options: DeviceOptions,
        explain: ExplainOptions,
    ) -> Self {
        let functions = functions
            .into_iter()
            .map(|found| (found.address, Function::new(found, options.clone())))
            .collect();
        let (open, space, machine, watch) = (BTreeMap::new(), None, None, None);
        Self { open, space, manager, functions, options, explain, machine, watch }
    }

    /// The functions that it has, those of each slot together.
    pub(super) fn slots(&self) -> Vec<Vec<PciAddress>> {
        let mut slots: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (&address, function) in &self.functions {
            slots.entry(function.request.slot).or_default().push(address);
        }
        slots.into_values().collect()
    }

    /// Makes room for them in the guest's machine. `stop` gives up the claim that is under way; until then another command is
    /// waited for that has the ledger, as the guest runs already.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn announce(&mut self, machine: &Machine, stop: &Stop) -> Result<(), MachineError> {
        let options =
            self.functions.values_mut().map(|function| &mut function.options).chain([&mut self.options]);
        for options in options {
            options.claim.cancel = Some(stop.cancel());
            options.claim.ledger_deadline = LEDGER;
        }
        self.machine = Some((machine.vmm(), machine.handle()));
        self.functions.values().try_for_each(|function| machine.expect(ExpectedFunction::of(&function.found)))
    }

    /// Watches them, from when they are attached.
    ///
    /// # Errors
    /// When this process has no threads or descriptors left.
    pub(super) fn watch(&mut self, events: Sender<Message>) -> Result<(), String> {
        let watch = Watch::start(events);
        let failed =
            |error| format!("the devices can't be watched: {error}; raise `ulimit -n` and `ulimit -u`");
        self.watch = Some(watch.map_err(failed)?);
        Ok(())
    }

    /// Lets go of the machine, which is dropped.
    pub(super) fn leave(&mut self) {
        self.machine = None;
        if let Some(watch) = self.watch.take() {
            watch.end();
        }
    }

    /// Does what is to be done with a device, and answers what came of it.
    pub(super) fn perform(&mut self, action: Action) -> Option<Event> {
        Some(match action {
            Action::Explain(request) => {
                let explained = self.explain(&request);
                Event::Explained(request, explained)
            }
            Action::Claim(address) => self.claim(address),
            Action::Open(address) => Event::Opened(address, self.open(address)),
            Action::Attach(address) => self.attach(address),
            Action::Plug(slot) => Event::Plugged(slot, self.plug(slot)),
            Action::Unplug(slot) => {
                // One of which nothing has come yet is not there.
                let unplugged = self.machine.as_ref().map(|(_, machine)| machine.unplug(slot));
                if let Some(Err(error)) = unplugged {
                    tracing::debug!(%error, "nothing was unplugged");
                }
                Event::Unplugged(slot)
            }
            Action::Stop(address) => {
                if let Err(error) = self.of(address, VfioPciDevice::stop) {
                    tracing::debug!("{error}; detaching tells what is left");
                }
                let wanted = self.open.get(&address).is_some_and(|device| device.is_wanted_back());
                Event::Stopped(address, wanted)
            }
            Action::Detach(address) => {
                let detach = |device: &VfioPciDevice| {
                    device.detach()?;
                    Ok(if device.was_left_unreset() { Detached::Unreset } else { Detached::Reset })
                };
                Event::Detached(address, self.of(address, detach))
            }
            Action::Close(address) => {
                if let Some(watch) = &self.watch {
                    watch.remove(address);
                }
                self.open.remove(&address);
                self.functions.remove(&address);
                self.space = self.space.take().filter(|_| !self.open.is_empty());
                Event::Closed(address)
            }
            Action::Release(target) => {
                Event::Released(target, self.release(target).map_err(|error| error.to_string()))
            }
            Action::Boot
            | Action::StopGuest
            | Action::DropMachine
            | Action::Ask(..)
            | Action::Unask(_)
            | Action::Answer(..) => return None,
        })
    }

    /// Whether the guest can have what is asked for, beside what it has. Nothing is touched.
    fn explain(&mut self, request: &AttachRequest) -> Result<(), Refused> {
        let failed = |error: &dyn std::fmt::Display| Refused::Failed(error.to_string());
        let (_, machine) = self.machine.as_ref().ok_or_else(|| failed(&MachineError::Unusable))?;
        let host = self.manager.host().clone();
        let all = self.manager.scan_devices().map_err(|error| failed(&error))?;
        let find = |address: &PciAddress| {
            let not_there = || {
                Refused::NotFound(format!(
                    "there is no PCI function {address} on this host; `vm-service list --all` shows those that there are"
                ))
            };
            all.iter().find(|function| function.address == *address).cloned().ok_or_else(not_there)
        };
        let found = request.functions.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        // What did not come as far as being opened is turned back by now.
        self.functions.retain(|address, _| self.open.contains_key(address));
        let requests: Vec<_> = found.iter().map(|function| FunctionRequest::of(function, true)).collect();
        let slot = requests.first().and_then(|request| request.slot);
        if requests.iter().any(|request| request.slot != slot) {
            return Err(Refused::Conflict(
                "the functions are of several devices; attach one device after the other".into(),
            ));
        }
        if let Some((address, _)) = self.functions.iter().find(|(_, other)| other.request.slot == slot) {
            return Err(Refused::Conflict(format!(
                "the guest has {address} of the same device, which share a slot: detach that, and attach all of them at once"
            )));
        }
        if let (Some((space, _)), Some(backend)) = (&self.space, request.backend)
            && space.backend() != backend
        {
            return Err(Refused::Conflict(format!(
                "the guest's devices are open through {}, and this one can't be through {backend}; leave the back end out",
                space.backend()
            )));
        }
        let room = machine.room_for(&requests).map_err(|error| Refused::Conflict(error.to_string()))?;
        let mut options = self.explain.clone();
        options.slot = room;
        options.ram_is_pinned = self.space.is_some();
        options.with_group = request.with_group;
        options.accept = request.accept.clone();
        let vectors: u64 = self.functions.values().map(|function| function.vectors).sum();
        options.open_files += vectors * FILES_PER_VECTOR;
        let judged = Explainer::new(&host).explain_guest(&found.iter().collect::<Vec<_>>(), &options);
        let (ready, blocked): (Vec<_>, Vec<_>) =
            judged.map_err(|error| failed(&error))?.into_iter().partition(Readiness::is_ready);
        if !blocked.is_empty() {
            return Err(Refused::Blocked(blocked));
        }
        for warning in ready.iter().flat_map(|readiness| &readiness.blockers) {
            if warning.severity == Severity::Warning {
                tracing::warn!("{warning}");
            }
        }
        let mut options = DeviceOptions { backend: request.backend, ..self.options.clone() };
        options.claim.with_group = request.with_group;
        options.without_reset = request.accept.contains(&BlockerCode::NoReset);
        let functions = found.into_iter().map(|found| (found.address, Function::new(found, options.clone())));
        self.functions.extend(functions);
        Ok(())
    }

    /// Does something with an open device.
    fn of<T>(
        &self,
        address: PciAddress,
        act: impl FnOnce(&VfioPciDevice) -> Result<T, DeviceError>,
    ) -> Result<T, String> {
        let device = self.open.get(&address).ok_or_else(|| format!("{address} is not open"))?;
        act(device).map_err(|error| format!("{address}: {error}"))
    }

    /// Claims a function, unless an earlier claim covers it.
    fn claim(&mut self, address: PciAddress) -> Event {
        let claimed = match (self.manager.claimed(address), self.functions.get(&address)) {
            (Some(claimed), _) => Ok(claimed),
            (None, Some(function)) => self.manager.claim(address, &function.options.claim),
            (None, None) => return Event::Claimed(address, Err(unknown(address))),
        };
        match claimed {
            Err(ManagerError::Claim(ClaimError::Failed { cause }))
                if matches!(*cause, BindError::Cancelled(_)) =>
            {
                Event::NotClaimed(address)
            }
            claimed => {
                let target = claimed.map(|claimed| claimed.target).map_err(|error| error.to_string());
                Event::Claimed(address, target)
            }
        }
    }

    /// Releases a claim. A vCPU that has come to a device before it was unplugged, or the watch, may have it open for a moment
    /// more.
    fn release(&mut self, target: PciAddress) -> Result<(), ManagerError> {
        let until = Instant::now() + CLOSE;
        loop {
            let claimed = self.manager.find_claim(target)?;
            match self.manager.release(&claimed) {
                Err(ManagerError::Open(_)) if Instant::now() < until => sleep(Duration::from_millis(1)),
                released => return released,
            }
        }
    }

    /// Opens a claimed device.
    fn open(&mut self, address: PciAddress) -> Result<Backend, String> {
        let (vmm, _) = self.machine.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?;
        let host = self.manager.host();
        let addresses: Vec<_> = self.functions.keys().copied().collect();
        let options = self.functions.get(&address).ok_or_else(|| unknown(address))?.options.clone();
        let (space, shared) = match &self.space {
            Some(spaces) => spaces.clone(),
            None => {
                let space = vfio::open_space(host, &addresses, options.backend);
                let space = space.map_err(|error| error.to_string())?;
                let parts =
                    space.share().map_err(|error| format!("no descriptor: {error}; raise `ulimit -n`"))?;
                (space, Space::receive(parts))
            }
        };
        let claimed = self.manager.claimed(address).ok_or_else(|| format!("{address} is not claimed"))?;
        let opened = claimed.open(&space).map_err(|error| error.to_string())?;
        let function = self.functions.get_mut(&address).ok_or_else(|| unknown(address))?;
        function.watched = Some(watch_over(&opened)?);
        let file = entrust(opened, &shared)?;
        function.vectors = vectors_of(&*file).map_err(|error| error.to_string())?;
        limits::check_vectors(self.functions.values().map(|function| function.vectors).sum())?;
        let options =
            guest::DeviceOptions::default().without_reset(options.without_reset).cancel(options.claim.cancel);
        let device = VfioPciDevice::with_options(file, vmm.clone(), options)
            .map_err(|error| format!("{address}: {error}"))?;
        self.open.insert(address, device);
        let backend = space.backend();
        self.space = Some((space, shared));
        Ok(backend)
    }

    /// Attaches an open device, puts it into the machine if that expects it, and watches it.
    fn attach(&mut self, address: PciAddress) -> Event {
        let Some(device) = self.open.get(&address).cloned() else {
            return Event::Attached(address, Err(unknown(address)));
        };
        let attached = match device.attach() {
            Err(DeviceError::Cancelled) => return Event::NotAttached(address),
            attached => attached.map_err(|error| format!("{address}: {error}")),
        };
        Event::Attached(address, attached.and_then(|()| self.arrive(address, &device)))
    }

    fn arrive(&mut self, address: PciAddress, device: &Arc<VfioPciDevice>) -> Result<(), String> {
        let (_, machine) = self.machine.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?;
        if machine.expects(address) {
            machine.arrive(device.clone()).map_err(|error| error.to_string())?;
        }
        let watched = self.functions.get_mut(&address).and_then(|function| function.watched.take());
        if let (Some(watch), Some(watched)) = (&self.watch, watched) {
            watch.add(watched);
        }
        Ok(())
    }

    /// Puts a device, whose functions are attached, into a slot of the guest.
    fn plug(&self, slot: PciAddress) -> Result<Option<PciAddress>, String> {
        let (_, machine) = self.machine.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?;
        let named = self.functions.get(&slot).ok_or_else(|| unknown(slot))?.request.slot;
        let is_of =
            |address| self.functions.get(address).is_some_and(|function| function.request.slot == named);
        let device = self.open.iter().filter(|(address, _)| is_of(address));
        let device = device.map(|(_, device)| device.clone() as Arc<dyn PassthroughDevice>).collect();
        machine.plug(device).map_err(|error| error.to_string())
    }
}

/// What is said of a function that nobody has announced.
fn unknown(address: PciAddress) -> String {
    format!("{address} is none of the guest's devices")
}

/// What to watch of a device: that it is there, and that the host does not want it back.
fn watch_over(file: &Arc<VfioDevice>) -> Result<Watched, String> {
    let address = file.address();
    let wanted = file.wanted_back().map(|event| event.try_clone_to_owned()).transpose();
    let wanted = wanted.map_err(|error| format!("no eventfd can be had: {error}; raise `ulimit -n`"))?;
    // The device is closed when the guest's view of it is dropped, whatever the watch does.
    let file = Arc::downgrade(file);
    let presence = move || file.upgrade().map_or(Presence::Present, |file| file.presence());
    Ok(Watched { address, wanted, presence: Box::new(presence) })
}

/// Interrupt vectors that a driver of a device may use.
fn vectors_of(file: &impl DeviceFile) -> Result<u64, VfioError> {
    Ok(u64::from(file.irq(MSI_IRQ)?.count.max(file.irq(MSIX_IRQ)?.count)))
}
