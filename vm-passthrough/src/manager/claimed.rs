//! What a claim gives: the way to its devices, which lasts as long as the claim does.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::ManagerError;
use crate::claim::{self, Claim, ClaimError, ClaimOptions, HeldClaim};
use crate::ledger::{Ledger, LedgerError};
use crate::vfio::{self, Space, VfToken, VfioDevice, VfioError};
use crate::{Host, PciAddress, pci};

/// A function that a [`PassthroughManager`](crate::PassthroughManager) has claimed, and the only way to open it. It may be
/// cloned, kept and sent to other threads.
///
/// What is opened holds the claim: it is released when all of it is closed, and not before. Once it is released, nothing can
/// be opened by it. A function that is not claimed can't be opened at all:
///
/// ```compile_fail,E0603
/// use vm_passthrough::{Host, vfio};
///
/// let host = Host::system();
/// let address = "0000:65:00.0".parse().unwrap();
/// let space = vfio::open_space(&host, &[address], None).unwrap();
/// vfio::open_device(&host, address, &space);
/// ```
#[derive(Clone, Debug)]
pub struct Claimed {
    address: PciAddress,
    claim: Arc<Claim>,
    held: Weak<Held>,
}

impl Claimed {
    /// Of a claim that no process holds.
    pub(super) fn elsewhere(address: PciAddress, claim: Claim) -> Self {
        Self { address, claim: Arc::new(claim), held: Weak::new() }
    }

    /// Whether this manager never held it.
    pub(super) fn is_elsewhere(&self) -> bool {
        self.held.ptr_eq(&Weak::new())
    }

    /// Whether it is of this claim.
    pub(super) fn is_of(&self, held: &Arc<Held>) -> bool {
        std::ptr::eq(self.held.as_ptr(), Arc::as_ptr(held))
    }

    /// The function.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Opens the function in an address space, powered up. It may be done at any time, and for several functions of one
    /// group.
    ///
    /// # Errors
    /// [`VfioError::Unavailable`] when the claim is not held any more, the function is not bound to a VFIO driver, has no
    /// IOMMU group, or its group is not viable; otherwise what the Linux kernel refused. Nothing stays open.
    pub fn open(&self, space: &Arc<Space>) -> vfio::Result<Arc<VfioDevice>> {
        self.open_with(space, None)
    }

    /// As [`open`](Self::open), of a virtual function whose physical function a user-space driver has by vfio-pci: with the token
    /// that this driver has set.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and when it is not that token. iommufd looks at none before Linux 6.18.
    pub fn open_with_token(&self, space: &Arc<Space>, token: &VfToken) -> vfio::Result<Arc<VfioDevice>> {
        self.open_with(space, Some(token))
    }

    fn open_with(&self, space: &Arc<Space>, token: Option<&VfToken>) -> vfio::Result<Arc<VfioDevice>> {
        let held = self.hold()?;
        let host = held.host.clone();
        vfio::open_device(&host, self.address, space, token, held)
    }

    /// Keeps the claim from being released.
    pub(super) fn hold(&self) -> vfio::Result<Arc<Held>> {
        self.held.upgrade().ok_or_else(|| VfioError::Unavailable {
            address: self.address,
            reason: "its claim is not held by this manager any more; claim it again".into(),
        })
    }
}

impl Deref for Claimed {
    type Target = Claim;

    /// All that was claimed with it.
    fn deref(&self) -> &Claim {
        &self.claim
    }
}

/// A claim that any thread can make.
#[derive(Clone, Debug)]
pub struct PendingClaim {
    pub(super) host: Host,
    pub(super) address: PciAddress,
    pub(super) options: ClaimOptions,
}

impl PendingClaim {
    /// Makes the claim.
    ///
    /// # Errors
    /// As for [`PassthroughManager::claim`](crate::PassthroughManager::claim).
    pub fn make(self) -> Result<MadeClaim, ManagerError> {
        let Self { host, address, options } = self;
        let claim = claim::take(&host, address, &options, || pci::scan(&host))?;
        let is_left = options.persistent && !options.tentative;
        Ok(MadeClaim { address, held: Arc::new(Held::new(&host, claim, options.deadline)), is_left })
    }
}

/// A claim that was made for a manager. If the manager does not adopt it, dropping it releases it, unless it is persistent.
#[derive(Debug)]
pub struct MadeClaim {
    pub(super) address: PciAddress,
    pub(super) held: Arc<Held>,
    /// Whether it lives on without a process.
    pub(super) is_left: bool,
}

/// A claim that is held: by the manager, and by what is open of it. Who drops it last releases it.
#[derive(Debug)]
pub(super) struct Held {
    host: Host,
    claim: Arc<Claim>,
    pub(super) deadline: Duration,
    /// `None` once it is released.
    held: Mutex<Option<HeldClaim>>,
}

impl Held {
    pub(super) fn new(host: &Host, held: HeldClaim, deadline: Duration) -> Self {
        Self { host: host.clone(), claim: Arc::new(held.claim()), deadline, held: Mutex::new(Some(held)) }
    }

    /// A function of a claim.
    pub(super) fn claimed(self: &Arc<Self>, address: PciAddress) -> Claimed {
        Claimed { address, claim: self.claim.clone(), held: Arc::downgrade(self) }
    }

    /// Whether the function belongs to it.
    pub(super) fn covers(&self, address: PciAddress) -> bool {
        self.claim.functions.iter().any(|function| function.address == address)
    }

    /// Releases everything, except a persistent claim. What could not be released stays in the ledger, and here, to try
    /// again.
    pub(super) fn release(&mut self, deadline: Duration) -> Result<(), ClaimError> {
        let this = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        match this {
            Some(held) if !held.is_persistent() => held.release(&self.host, deadline)?,
            _ => {}
        }
        *this = None;
        Ok(())
    }

    /// Has a tentative claim outlive this process.
    pub(super) fn keep(&self, ledger: &Ledger) -> Result<(), LedgerError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_mut().map_or(Ok(()), |held| held.keep(ledger))
    }

    /// Leaves what could not be released to the ledger.
    pub(super) fn give_up(mut self) {
        *self.held.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = self.release(self.deadline) {
            tracing::error!(%error, "a claim could not be released when the last that held it was dropped");
        }
    }
}
