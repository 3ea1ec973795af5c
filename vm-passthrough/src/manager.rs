//! The device manager: what an embedder uses.

mod claimed;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::claim::{self, ClaimError, ClaimOptions, Recovery, SharedLease, VfError, VfOptions};
use crate::guest::DeviceError;
use crate::ledger::{self, Ledger, Sharer};
use crate::pci::{self, ScanError};
use crate::readiness::{self, ExplainOptions, Readiness};
use crate::{DeviceType, Host, PassthroughDevice, PciAddress, PciFunction, deadlines};

use claimed::Held;
pub use claimed::{Claimed, MadeClaim, PendingClaim};

/// Why the manager could not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// The host has no PCI bus to manage.
    #[error(
        "there is no PCI bus in {path}: {source}; check that this is Linux and that sysfs is mounted there"
    )]
    NoPci {
        /// Where it would be.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// The host's functions can't be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A function can't be claimed or released.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// Virtual functions can't be created or removed.
    #[error(transparent)]
    Vfs(#[from] VfError),
    /// The function is claimed by this manager already.
    #[error(
        "{address} is claimed by this manager already, with {target}; use that claim, or release it first"
    )]
    ClaimedHere {
        /// The function.
        address: PciAddress,
        /// The function whose claim it belongs to.
        target: PciAddress,
    },
    /// The function is attached to a guest.
    #[error("{0} is attached to a guest; detach it first")]
    Attached(PciAddress),
    /// The function is not attached to a guest.
    #[error("{0} is not attached to a guest, so there is nothing to detach")]
    NotAttached(PciAddress),
    /// A function of a claim is open.
    #[error(
        "the claim of {0} can't be released while one of its functions is open; drop the device and all that uses it first"
    )]
    Open(PciAddress),
    /// The device could not be attached or detached.
    #[error("{address}: {source}")]
    Device {
        /// The function.
        address: PciAddress,
        /// Why.
        source: DeviceError,
    },
    /// Some of several things to end failed; all were tried.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<ManagerError>),
}

/// Finds, claims, attaches and releases the host's PCI devices.
///
/// Scan and print what there is:
///
/// ```no_run
/// use vm_passthrough::PassthroughManager;
///
/// let mut manager = PassthroughManager::new()?;
/// manager.scan_devices()?;
/// manager.print_devices();
/// # Ok::<(), vm_passthrough::manager::ManagerError>(())
/// ```
///
/// Filter the NVIDIA GPUs and print their names:
///
/// ```no_run
/// use vm_passthrough::{DeviceType, PassthroughManager};
///
/// let mut manager = PassthroughManager::new()?;
/// manager.scan_devices()?;
/// for gpu in manager.filter_by_type(DeviceType::GpuNvidia) {
///     println!("{} {}", gpu.address, gpu.device_name().unwrap_or("unknown GPU"));
/// }
/// # Ok::<(), vm_passthrough::manager::ManagerError>(())
/// ```
///
/// End its work with [`close`](Self::close), which says what failed. Dropping it does the same, and only logs it.
#[derive(Debug)]
pub struct PassthroughManager {
    host: Host,
    functions: Vec<PciFunction>,
    /// By the function that was asked for.
    claims: BTreeMap<PciAddress, Arc<Held>>,
    attached: BTreeMap<PciAddress, Arc<dyn PassthroughDevice>>,
}

impl PassthroughManager {
    /// A manager of the machine that this process runs on. It changes nothing.
    ///
    /// # Errors
    /// When there is no PCI bus in sysfs.
    pub fn new() -> Result<Self, ManagerError> {
        Self::with_host(Host::system())
    }

    /// A manager of `host`. It changes nothing.
    ///
    /// # Errors
    /// When there is no PCI bus in the host's sysfs.
    pub fn with_host(host: Host) -> Result<Self, ManagerError> {
        let path = host.sys.join("bus/pci/devices");
        match std::fs::read_dir(&path) {
            Ok(_) => {
                Ok(Self { host, functions: Vec::new(), claims: BTreeMap::new(), attached: BTreeMap::new() })
            }
            Err(source) => Err(ManagerError::NoPci { path, source }),
        }
    }

    /// The host that it manages.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Reads all PCI functions of the host again and returns them.
    ///
    /// # Errors
    /// When sysfs can't be read.
    pub fn scan_devices(&mut self) -> Result<&[PciFunction], ManagerError> {
        self.functions = pci::scan(&self.host)?;
        Ok(&self.functions)
    }

    /// All PCI functions that the last scan found, sorted by address.
    pub fn devices(&self) -> &[PciFunction] {
        &self.functions
    }

    /// Prints what the last scan found to standard output, a line for each function.
    pub fn print_devices(&self) {
        // A closed pipe is the reader's wish.
        if let Err(error) = self.write_devices(&mut io::stdout().lock()) {
            tracing::debug!(%error, "can't print the devices");
        }
    }

    /// Writes what the last scan found, a line for each function.
    ///
    /// # Errors
    /// When `out` fails.
    pub fn write_devices(&self, out: &mut dyn Write) -> io::Result<()> {
        for function in &self.functions {
            writeln!(out, "{}", Line(function))?;
        }
        Ok(())
    }

    /// The functions of one type that the last scan found, sorted by address.
    pub fn filter_by_type(&self, device_type: DeviceType) -> Vec<&PciFunction> {
        self.functions.iter().filter(|function| function.device_type == device_type).collect()
    }

    /// Every reason why a function can't be passed through, each with its remedy, for a guest of an ordinary size. For a
    /// guest with more to say of itself there is [`readiness::explain`].
    ///
    /// # Errors
    /// When there is no such function, or it can't be read.
    pub fn explain(&self, address: PciAddress) -> Result<Readiness, ManagerError> {
        Ok(readiness::explain(&self.host, address, &ExplainOptions::default())?)
    }

    /// Claims a function and its companions: takes them from their drivers and binds them to vfio-pci. When this host
    /// has a persistent claim of it that no process uses, that is taken up, and [`release`](Self::release) of this
    /// manager then leaves it as it was.
    ///
    /// Claims of processes that died and had one of the functions are undone first. Several managers, in one process or in several,
    /// may hold and make claims of different functions at once: none waits for another's device.
    ///
    /// # Errors
    /// When the function must not be taken, is claimed already, or a step fails; then everything is undone. When even
    /// that fails, the error says what is left, and the ledger remembers it.
    pub fn claim(&mut self, address: PciAddress, options: &ClaimOptions) -> Result<Claimed, ManagerError> {
        let made = self.begin_claim(address, options)?.make()?;
        Ok(self.adopt(made))
    }

    /// Prepares a claim that another thread makes, while this manager does other things. [`adopt`](Self::adopt) then hands the
    /// claim to this manager.
    ///
    /// # Errors
    /// When this manager has claimed the function already.
    pub fn begin_claim(
        &self,
        address: PciAddress,
        options: &ClaimOptions,
    ) -> Result<PendingClaim, ManagerError> {
        match self.held(address) {
            Some(target) => Err(ManagerError::ClaimedHere { address, target }),
            None => Ok(PendingClaim { host: self.host.clone(), address, options: options.clone() }),
        }
    }

    /// Takes over a claim that another thread has made.
    pub fn adopt(&mut self, made: MadeClaim) -> Claimed {
        let claimed = made.held.claimed(made.address);
        // A persistent claim that was just made is used by nobody yet: another process may take it up.
        if !made.is_left {
            self.claims.insert(claimed.target, made.held);
        }
        claimed
    }

    /// Has tentative claims of this manager live until they are released, by any process, and holds them no more. A process
    /// that dies before has none of them; one that dies in the moments that this takes may have some.
    ///
    /// # Errors
    /// When a claim is not held any more, or the ledger can't be written. Those that were not kept are held
    /// as before.
    pub fn keep(&mut self, claims: &[Claimed]) -> Result<(), ManagerError> {
        let ledger = Ledger::lock(&self.host, deadlines::LEDGER).map_err(ClaimError::from)?;
        for target in claims.iter().map(|claimed| claimed.target) {
            let held = self.claims.get(&target).ok_or(ClaimError::NotClaimed(target))?;
            held.keep(&ledger).map_err(ClaimError::from)?;
            self.claims.remove(&target);
        }
        Ok(())
    }

    /// Creates `count` virtual functions of a physical function that supports SR-IOV, and returns their addresses in order; where
    /// it has that number already, they are returned as they are. Scan again to see them.
    ///
    /// # Errors
    /// When it can't have that number, has another, is claimed, or the Linux kernel refuses; then there are none.
    pub fn create_vfs(
        &self,
        physical: PciAddress,
        count: u16,
        options: &VfOptions,
    ) -> Result<Vec<PciAddress>, ManagerError> {
        Ok(claim::create_vfs(&self.host, physical, count, options)?)
    }

    /// Removes all virtual functions of a physical function, and returns which they were.
    ///
    /// # Errors
    /// When one is claimed, or the host uses it (see [`VfOptions::force`]), or the Linux kernel refuses; then all are there
    /// still.
    pub fn remove_vfs(
        &self,
        physical: PciAddress,
        options: &VfOptions,
    ) -> Result<Vec<PciAddress>, ManagerError> {
        Ok(claim::remove_vfs(&self.host, physical, options)?)
    }

    /// Shares a function with whoever runs kernels on it: while the lease lives, nobody can claim it whole. An accelerator
    /// is opened with a lease of its function, and any number of processes may have one.
    ///
    /// # Errors
    /// When there is no such function, it is claimed, or the ledger can't be used.
    pub fn share(&self, address: PciAddress) -> Result<SharedLease, ManagerError> {
        Ok(claim::share(&self.host, address, claim::DEADLINE)?)
    }

    /// The processes that share a function now.
    ///
    /// # Errors
    /// When the ledger can't be read.
    pub fn sharers(&self, address: PciAddress) -> Result<Vec<Sharer>, ManagerError> {
        Ok(ledger::sharers(&self.host, address).map_err(ClaimError::from)?)
    }

    /// The claims that this manager holds, each by the function that was asked for.
    pub fn claims(&self) -> Vec<Claimed> {
        self.claims.iter().map(|(&target, held)| held.claimed(target)).collect()
    }

    /// A function that this manager holds, maybe as a companion of the one that was asked for.
    pub fn claimed(&self, address: PciAddress) -> Option<Claimed> {
        Some(self.claims[&self.held(address)?].claimed(address))
    }

    /// Attaches a device to its guest. `device` may be of this crate, made of what [`Claimed::open`] gives, or of another's
    /// making.
    ///
    /// # Errors
    /// When its function is attached already, or the device fails; then it is not attached. Where a device that fails can't
    /// be detached either, it counts as attached until detaching it succeeds.
    pub fn attach_device(&mut self, device: Arc<dyn PassthroughDevice>) -> Result<(), ManagerError> {
        let address = device.address();
        if self.attached.contains_key(&address) {
            return Err(ManagerError::Attached(address));
        }
        let attached = device.attach().map_err(|source| ManagerError::Device { address, source });
        let left = attached.is_err() && device.detach().is_err();
        if attached.is_ok() || left {
            self.attached.insert(address, device);
        }
        attached
    }

    /// Stops all attached devices, of guests that do not run, before they are detached one by one: functions that can be
    /// reset only along with each other need each other to be stopped.
    ///
    /// # Errors
    /// [`ManagerError::Several`] with all that failed; everything is tried.
    pub fn stop_devices(&self) -> Result<(), ManagerError> {
        let stop = |(&address, device): (&PciAddress, &Arc<dyn PassthroughDevice>)| {
            device.stop().err().map(|source| ManagerError::Device { address, source })
        };
        several(self.attached.iter().filter_map(stop).collect())
    }

    /// Detaches the functions that share a slot of a guest, which may run on: it must not see them any more. All are stopped
    /// before the first is detached, as they may have no reset but a common one. Other devices stay as they are.
    ///
    /// # Errors
    /// [`ManagerError::NotAttached`] when one of them is not, and nothing is done; [`ManagerError::Several`] with all that
    /// failed, as for [`detach_device`](Self::detach_device).
    pub fn detach_slot(&mut self, functions: &[PciAddress]) -> Result<(), ManagerError> {
        let device = |&address| self.attached.get(&address).ok_or(ManagerError::NotAttached(address));
        for device in functions.iter().map(device).collect::<Result<Vec<_>, _>>()? {
            if let Err(error) = device.stop() {
                tracing::debug!(device = %device.address(), %error, "it could not be stopped; detaching it tells");
            }
        }
        several(functions.iter().filter_map(|&address| self.detach_device(address).err()).collect())
    }

    /// Detaches a device from its guest.
    ///
    /// # Errors
    /// When the function is not attached, or the device fails or its reset can't be proved. It counts as attached until
    /// detaching it succeeds: it can be tried again, and until then it is not released.
    pub fn detach_device(&mut self, address: PciAddress) -> Result<(), ManagerError> {
        let device = self.attached.get(&address).ok_or(ManagerError::NotAttached(address))?;
        device.detach().map_err(|source| ManagerError::Device { address, source })?;
        self.attached.remove(&address);
        Ok(())
    }

    /// The functions that are attached to a guest, sorted.
    pub fn attached(&self) -> Vec<PciAddress> {
        self.attached.keys().copied().collect()
    }

    /// The claim that covers a function, whoever made it: one that this manager holds, or one that lives on without a process.
    ///
    /// # Errors
    /// When the function is not claimed, is claimed by another process, or the ledger can't tell.
    pub fn find_claim(&self, address: PciAddress) -> Result<Claimed, ManagerError> {
        match self.claimed(address) {
            Some(claimed) => Ok(claimed),
            None => {
                let claim = claim::find_persistent(&self.host, address)?;
                Ok(Claimed::elsewhere(address, claim))
            }
        }
    }

    /// Gives all functions of a claim back to their former drivers. A persistent claim that this manager took up is only left,
    /// and lives on; one that nobody uses is released.
    ///
    /// Each access has as long as the claim's options said, or [`claim::DEADLINE`].
    ///
    /// # Errors
    /// When it was released before, is used by another process, or one of its functions is attached to a guest or open. When
    /// it can't be released, the error says why, and the ledger remembers what is left.
    pub fn release(&mut self, claimed: &Claimed) -> Result<(), ManagerError> {
        let deadline = self.claims.get(&claimed.target).map_or(claim::DEADLINE, |held| held.deadline);
        self.release_within(claimed, deadline)
    }

    /// As [`release`](Self::release), with a deadline for the wait for the locks of the functions and for each access to their
    /// drivers.
    ///
    /// # Errors
    /// As for [`release`](Self::release).
    pub fn release_within(&mut self, claimed: &Claimed, deadline: Duration) -> Result<(), ManagerError> {
        let target = claimed.target;
        if !self.claims.get(&target).is_some_and(|held| claimed.is_of(held)) {
            if !claimed.persistent && !claimed.is_elsewhere() {
                return Err(ClaimError::NotClaimed(target).into());
            }
            return Ok(claim::release_persistent(&self.host, claimed.address(), deadline)?);
        }
        let covers = |attached: &&PciAddress| self.claims[&target].covers(**attached);
        if let Some(&attached) = self.attached.keys().find(covers) {
            return Err(ManagerError::Attached(attached));
        }
        match self.claims.remove(&target).map(Arc::try_unwrap) {
            Some(Ok(mut held)) => {
                let released = held.release(deadline);
                if released.is_err() {
                    self.claims.insert(target, Arc::new(held));
                }
                Ok(released?)
            }
            Some(Err(held)) => {
                self.claims.insert(target, held);
                Err(ManagerError::Open(target))
            }
            None => Ok(()),
        }
    }

    /// Releases what processes that died had claimed, and completes releases that were interrupted. Claims of live
    /// processes, and persistent ones, stay. None waits for another's device.
    ///
    /// # Errors
    /// When the ledger can't be used. What can't be recovered is in the [`Recovery`].
    pub fn recover(&mut self) -> Result<Recovery, ManagerError> {
        Ok(claim::recover(&self.host, claim::DEADLINE)?)
    }

    /// Like [`recover`](Self::recover), only for claims that have one of these functions or another of its IOMMU group.
    ///
    /// # Errors
    /// As for [`recover`](Self::recover).
    pub fn recover_near(&mut self, functions: &[PciAddress]) -> Result<Recovery, ManagerError> {
        Ok(claim::recover_near(&self.host, functions, true, claim::DEADLINE)?)
    }

    /// Detaches what is attached and releases what is claimed, except persistent claims.
    ///
    /// # Errors
    /// [`ManagerError::Several`] with all that failed; everything is tried. A function whose device can't be detached is
    /// released all the same, for the host to use it: whether what its guest left in it matters is for the caller, who is
    /// informed, to judge. The claim of what is still open is released when that is closed.
    pub fn close(mut self) -> Result<(), ManagerError> {
        let failed = self.end();
        if failed.is_empty() { Ok(()) } else { Err(ManagerError::Several(failed)) }
    }

    fn end(&mut self) -> Vec<ManagerError> {
        let mut failed = Vec::new();
        if let Err(error) = self.stop_devices() {
            tracing::debug!(%error, "a device could not be stopped; detaching it tells");
        }
        for (address, device) in std::mem::take(&mut self.attached) {
            if let Err(source) = device.detach() {
                failed.push(ManagerError::Device { address, source });
            }
        }
        for claimed in self.claims() {
            let target = claimed.target;
            let Err(error) = self.release(&claimed) else { continue };
            // Who has it open releases it; what could not be released is the ledger's.
            if let Some(Ok(held)) = self.claims.remove(&target).map(Arc::try_unwrap)
                && !matches!(error, ManagerError::Open(_))
            {
                held.give_up();
            }
            failed.push(error);
        }
        failed
    }

    /// Like [`recover`](Self::recover), for all claims except those of [`recover_near`](Self::recover_near).
    ///
    /// # Errors
    /// As for [`recover`](Self::recover).
    pub fn recover_except(&mut self, functions: &[PciAddress]) -> Result<Recovery, ManagerError> {
        Ok(claim::recover_near(&self.host, functions, false, claim::DEADLINE)?)
    }

    /// The function whose claim `address` belongs to.
    fn held(&self, address: PciAddress) -> Option<PciAddress> {
        self.claims.iter().find(|(_, held)| held.covers(address)).map(|(&target, _)| target)
    }
}

impl Drop for PassthroughManager {
    fn drop(&mut self) {
        for error in self.end() {
            tracing::error!(%error, "the device manager was dropped and could not end its work");
        }
    }
}

/// Nothing, unless something failed.
fn several(failed: Vec<ManagerError>) -> Result<(), ManagerError> {
    if failed.is_empty() { Ok(()) } else { Err(ManagerError::Several(failed)) }
}

/// A function in a line of text.
struct Line<'a>(&'a PciFunction);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = self.0;
        write!(f, "{} {:04x}:{:04x}", function.address, function.ids.vendor, function.ids.device)?;
        match (function.vendor_name(), function.device_name()) {
            (Some(vendor), Some(device)) => write!(f, " {vendor} {device}")?,
            (Some(vendor), None) => write!(f, " {vendor}")?,
            _ => {}
        }
        if let Some(group) = function.iommu_group {
            write!(f, ", IOMMU group {group}")?;
        }
        write!(f, ", {}", function.driver.as_deref().unwrap_or("no driver"))
    }
}

#[cfg(test)]
mod tests;
