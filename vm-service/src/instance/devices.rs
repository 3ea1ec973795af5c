//! The devices of a guest: claimed, opened and attached while it boots, detached and released after.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use vm_passthrough::claim::{BindError, ClaimError, ClaimOptions};
use vm_passthrough::deadlines::LEDGER;
use vm_passthrough::guest::{self, DeviceError, KvmVmm, VfioPciDevice};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::vfio::{
    self, AddressSpace as _, Backend, DeviceFile, MSI_IRQ, MSIX_IRQ, Presence, Space, VfioDevice, VfioError,
};
use vm_passthrough::{PassthroughDevice as _, PassthroughManager, PciAddress, PciFunction};

use super::state::{Action, Detached, Event};
use super::watch::{Watch, Watched};
use crate::limits;
use crate::vmm::{ExpectedFunction, Machine, MachineError, Slots, Stop};

/// How devices are taken.
#[derive(Debug)]
pub(crate) struct DeviceOptions {
    /// How they are claimed.
    pub(crate) claim: ClaimOptions,
    /// `None` for the best that there is.
    pub(crate) backend: Option<Backend>,
    /// Whether a device is given to the guest although nothing resets it.
    pub(crate) without_reset: bool,
}

/// A guest's devices, and the manager that claims them. Dropping it gives them back too, and only logs what fails.
pub(crate) struct Devices {
    // The order matters: what is open is closed before its claim is released.
    open: BTreeMap<PciAddress, Arc<VfioPciDevice>>,
    /// There while a device is open.
    space: Option<Arc<Space>>,
    manager: PassthroughManager,
    /// As they were found before they were claimed.
    functions: Vec<PciFunction>,
    options: DeviceOptions,
    /// The machine, while there is one.
    machine: Option<(Arc<KvmVmm>, Slots)>,
    /// What watches the devices that are attached, and what it needs of those that are not yet.
    watch: Option<Watch>,
    watched: BTreeMap<PciAddress, Watched>,
    /// How many interrupt vectors those that were opened have.
    vectors: u64,
}

impl Devices {
    /// The devices that were found as `functions`, which `manager` claims; none is touched yet.
    pub(crate) fn new(
        manager: PassthroughManager,
        functions: Vec<PciFunction>,
        options: DeviceOptions,
    ) -> Self {
        let (open, watched) = (BTreeMap::new(), BTreeMap::new());
        let (space, machine, watch) = (None, None, None);
        Self { open, space, manager, functions, options, machine, watch, watched, vectors: 0 }
    }

    pub(super) fn addresses(&self) -> Vec<PciAddress> {
        self.functions.iter().map(|function| function.address).collect()
    }

    /// Makes room for them in the guest's machine. `stop` gives up the claim that is under way; until then another command is
    /// waited for that has the ledger, as the guest runs already.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn announce(&mut self, machine: &Machine, stop: &Stop) -> Result<(), MachineError> {
        self.options.claim.cancel = Some(stop.cancel());
        self.options.claim.ledger_deadline = LEDGER;
        self.machine = Some((machine.vmm(), machine.slots()));
        self.functions.iter().try_for_each(|function| machine.expect(ExpectedFunction::of(function)))
    }

    /// Watches them, from when they are attached.
    ///
    /// # Errors
    /// When this process has no threads or descriptors left.
    pub(super) fn watch(&mut self, events: Sender<Event>) -> Result<(), String> {
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
            Action::Claim(address) => self.claim(address),
            Action::Open(address) => Event::Opened(address, self.open(address)),
            Action::Attach(address) => Event::Attached(address, self.attach(address)),
            Action::StopDevices => {
                for (address, device) in &self.open {
                    if let Err(error) = device.stop() {
                        tracing::debug!("{address}: {error}; detaching tells what is left");
                    }
                }
                let wanted = self.open.iter().filter(|(_, device)| device.is_wanted_back());
                Event::DevicesStopped(wanted.map(|(&address, _)| address).collect())
            }
            Action::Detach(address) => {
                let detach = |device: &VfioPciDevice| {
                    device.detach()?;
                    Ok(if device.was_left_unreset() { Detached::Unreset } else { Detached::Reset })
                };
                Event::Detached(address, self.of(address, detach))
            }
            Action::Close(address) => {
                self.open.remove(&address);
                self.space = self.space.take().filter(|_| !self.open.is_empty());
                Event::Closed(address)
            }
            Action::Release(target) => {
                Event::Released(target, self.release(target).map_err(|error| error.to_string()))
            }
            Action::Boot | Action::StopGuest | Action::DropMachine => return None,
        })
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
        let claimed = match self.manager.claimed(address) {
            Some(claimed) => Ok(claimed),
            None => self.manager.claim(address, &self.options.claim),
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

    /// Releases a claim.
    fn release(&mut self, target: PciAddress) -> Result<(), ManagerError> {
        let claimed = self.manager.find_claim(target)?;
        self.manager.release(&claimed)
    }

    /// Opens a claimed device.
    fn open(&mut self, address: PciAddress) -> Result<Backend, String> {
        let (vmm, _) = self.machine.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?;
        let host = self.manager.host();
        let space = match &self.space {
            Some(space) => space.clone(),
            None => vfio::open_space(host, &self.addresses(), self.options.backend)
                .map_err(|error| error.to_string())?,
        };
        self.space = Some(space.clone());
        let claimed = self.manager.claimed(address).ok_or_else(|| format!("{address} is not claimed"))?;
        let file = claimed.open(&space).map_err(|error| error.to_string())?;
        self.watched.insert(address, watch_over(&file)?);
        self.vectors += vectors_of(&*file).map_err(|error| error.to_string())?;
        limits::check_vectors(self.vectors)?;
        let options = guest::DeviceOptions::default().without_reset(self.options.without_reset);
        let device = VfioPciDevice::with_options(file, vmm.clone(), options)
            .map_err(|error| format!("{address}: {error}"))?;
        self.open.insert(address, device);
        Ok(space.backend())
    }

    /// Attaches an open device, puts it into the machine, and watches it.
    fn attach(&mut self, address: PciAddress) -> Result<(), String> {
        self.of(address, VfioPciDevice::attach)?;
        let (_, slots) = self.machine.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?;
        let device = self.open.get(&address).ok_or_else(|| format!("{address} is not open"))?;
        slots.arrive(device.clone()).map_err(|error| error.to_string())?;
        if let (Some(watch), Some(watched)) = (&self.watch, self.watched.remove(&address)) {
            watch.add(watched);
        }
        Ok(())
    }
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
