//! The devices of a guest that runs: claimed, opened and attached before, detached and given back after.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::guest::{DeviceOptions, VfioPciDevice};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::vfio::{
    self, Backend, DeviceFile, MSI_IRQ, MSIX_IRQ, Presence, Space, VfioDevice, VfioError,
};
use vm_passthrough::{PassthroughDevice as _, PassthroughManager, PciAddress};

use super::watch::{Watch, Watched};
use crate::limits;
use crate::vmm::{Machine, Stop};

/// How devices are taken.
#[derive(Debug)]
pub(super) struct How {
    pub(super) claim: ClaimOptions,
    /// `None` for the best that there is.
    pub(super) backend: Option<Backend>,
    /// Whether a device is given to the guest although nothing resets it.
    pub(super) without_reset: bool,
}

/// How long each step took for one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    pub(super) address: PciAddress,
    /// Zero when another device's claim covers it.
    pub(super) claim: Duration,
    pub(super) open: Duration,
    pub(super) attach: Duration,
    pub(super) detach: Duration,
    pub(super) release: Duration,
}

/// A guest's devices, and the manager that claimed them. Dropping it gives them back too, and only logs what fails.
#[derive(Debug)]
pub(super) struct Devices {
    manager: PassthroughManager,
    space: Option<Arc<Space>>,
    devices: Vec<Device>,
    /// Those that were opened. Functions that are reset along with each other are closed together.
    open: Vec<Arc<VfioPciDevice>>,
    watch: Option<Watch>,
}

impl Devices {
    /// No devices so far.
    pub(super) fn new(manager: PassthroughManager) -> Self {
        Self { manager, space: None, devices: Vec::new(), open: Vec::new(), watch: None }
    }

    /// The back end that they are opened through, once one is.
    pub(super) fn backend(&self) -> Option<Backend> {
        self.space.as_ref().map(|space| vfio::AddressSpace::backend(&**space))
    }

    /// Claims, opens and attaches `addresses`, and adds them to the machine.
    ///
    /// # Errors
    /// The first step that fails, or nothing more to do when `stop` is requested. What was done before is to be undone
    /// with [`detach`](Self::detach) and [`release`](Self::release).
    pub(super) fn attach(
        &mut self,
        addresses: &[PciAddress],
        how: &How,
        machine: &mut Machine,
        stop: &Stop,
    ) -> Result<(), String> {
        for &address in addresses {
            if stop.requested() {
                return Ok(());
            }
            let covered = self.manager.claims().iter().any(|claim| claim.addresses().contains(&address));
            let (claimed, claim) = timed(|| match covered {
                true => Ok(()),
                false => self.manager.claim(address, &how.claim).map(drop),
            });
            claimed.map_err(|error| error.to_string())?;
            tracing::info!("{address} claimed in {:.1} ms", claim.as_secs_f64() * 1e3);
            let zero = Duration::ZERO;
            self.devices.push(Device {
                address,
                claim,
                open: zero,
                attach: zero,
                detach: zero,
                release: zero,
            });
        }
        if addresses.is_empty() {
            return Ok(());
        }
        let host = self.manager.host().clone();
        let space = vfio::open_space(&host, addresses, how.backend).map_err(|error| error.to_string())?;
        self.space = Some(space.clone());
        let mut watched = Vec::new();
        let mut vectors = 0;
        for device in &mut self.devices {
            if stop.requested() {
                return Ok(());
            }
            let address = device.address;
            let (opened, open) = timed(|| {
                let file = vfio::open_device(&host, address, &space).map_err(|error| error.to_string())?;
                watched.push(watch_over(&file)?);
                vectors += vectors_of(&*file).map_err(|error| error.to_string())?;
                limits::check_vectors(vectors)?;
                let options = DeviceOptions { without_reset: how.without_reset };
                VfioPciDevice::with_options(file, space.clone(), machine.vmm(), options)
                    .map_err(|error| format!("{address}: {error}"))
            });
            let opened = opened?;
            device.open = open;
            self.open.push(opened.clone());
            machine.add_device(opened.clone()).map_err(|error| error.to_string())?;
            let (attached, attach) = timed(|| self.manager.attach_device(address, opened));
            attached.map_err(|error| error.to_string())?;
            device.attach = attach;
            tracing::info!(
                "{address} opened through {} and attached in {:.1} ms",
                vfio::AddressSpace::backend(&*space),
                (open + attach).as_secs_f64() * 1e3
            );
        }
        let watch = Watch::start(watched, stop.clone()).map_err(|error| {
            format!("the devices can't be watched: {error}; raise `ulimit -n` and `ulimit -u`")
        })?;
        self.watch = Some(watch);
        Ok(())
    }

    /// Takes the devices from the guest, which no longer runs, and answers what became of those that were lost meanwhile.
    /// What fails is tried again when they are released. Those that the host wants back are closed first, as it waits for
    /// that: nothing else, not the machine, may hold them.
    pub(super) fn detach(&mut self) -> Vec<String> {
        let mut lost = self.watch.take().map(Watch::end).unwrap_or_default();
        if let Err(error) = self.manager.stop_devices() {
            tracing::debug!("{error}; detaching tells what is left");
        }
        let mut attached = self.manager.attached();
        attached.reverse();
        attached.sort_by_key(|address| {
            !self.open.iter().any(|open| open.address() == *address && open.is_wanted_back())
        });
        for address in attached {
            let (detached, took) = timed(|| self.manager.detach_device(address));
            if let Err(error) = detached {
                tracing::warn!("{error}; it is tried again when {address} is released");
            }
            if let Some(device) = self.devices.iter_mut().find(|device| device.address == address) {
                device.detach = took;
            }
            self.open.retain(|open| {
                let is_given_up = open.address() == address && open.was_left_unreset();
                if is_given_up {
                    lost.push(format!(
                        "{address} was given up without a reset, which the Linux kernel refuses while it takes a device away: \
                         what the guest left in it stays there until it loses power, or is reset when a guest gets it again"
                    ));
                }
                !is_given_up
            });
        }
        self.open.clear();
        lost
    }

    /// Gives the devices back to their drivers. No one else may hold any of them: not the machine, which must be gone.
    ///
    /// # Errors
    /// All that could not be given back, and why; it stays in the ledger.
    pub(super) fn release(mut self) -> (Vec<Device>, Result<(), ManagerError>) {
        self.space = None;
        for claim in self.manager.claims() {
            if claim.addresses().iter().any(|address| self.manager.attached().contains(address)) {
                continue;
            }
            let (released, took) = timed(|| self.manager.release(claim.target));
            match released {
                Ok(()) => tracing::info!("{} given back in {:.1} ms", claim.target, took.as_secs_f64() * 1e3),
                Err(error) => tracing::warn!("{error}; it is tried once more"),
            }
            if let Some(device) = self.devices.iter_mut().find(|device| device.address == claim.target) {
                device.release = took;
            }
        }
        (self.devices, self.manager.close())
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

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let result = work();
    (result, started.elapsed())
}
