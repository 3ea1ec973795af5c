//! Virtual functions (PCI Express Base 6.0, chapter 9): those of a physical function are created, and removed, all together.
//!
//! Both change which functions there are, so both hold the ledger's lock, and the lock of the physical function: no claim
//! begins or ends meanwhile. The Linux kernel creates all or none, and knows how many there are; so the ledger notes nothing.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::act::recover_dead;
use super::lock::FunctionLock;
use super::{ClaimError, DEADLINE};
use crate::ledger::{Ledger, LedgerError, seconds};
use crate::pci::{self, ScanError, Sriov};
use crate::readiness::{ExplainOptions, Explainer, Readiness, Severity};
use crate::{Host, PciAddress, deadlines};

/// How to create or remove virtual functions. It grows: make one by [`default`](Self::default), and assign what differs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VfOptions {
    /// Whether the host's drivers take those that are created. The physical function keeps that setting
    /// (`sriov_drivers_autoprobe`).
    pub host_drivers: bool,
    /// Whether to remove them although [`explain`](crate::readiness::explain) says that the host uses one. One that is claimed
    /// is not removed in any case.
    pub force: bool,
    /// How long the Linux kernel may take.
    pub deadline: Duration,
}

impl Default for VfOptions {
    /// For guests: no driver of the host takes them. Within [`deadlines::VFS`].
    fn default() -> Self {
        Self { host_drivers: false, force: false, deadline: deadlines::VFS }
    }
}

/// Why virtual functions could not be created or removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VfError {
    /// The function has no SR-IOV capability, or is a virtual function itself.
    #[error(
        "{0} is no physical function: it has no SR-IOV capability; if its model has SR-IOV, enable that in the firmware setup of the host, or in the card's own firmware (NVIDIA ConnectX: mstconfig set SRIOV_EN=1 NUM_OF_VFS=N)"
    )]
    NotPhysical(PciAddress),
    /// It can't have as many, or none was asked for.
    #[error("{}", count_text(*address, *asked, *total))]
    Count {
        /// The physical function.
        address: PciAddress,
        /// How many were asked for.
        asked: u16,
        /// The most that it can have.
        total: u16,
    },
    /// It has others already.
    #[error(
        "{address} has {enabled} virtual functions already; remove them first, as their number can't be changed"
    )]
    Enabled {
        /// The physical function.
        address: PciAddress,
        /// How many it has.
        enabled: u16,
    },
    /// It, or one of its virtual functions, is claimed; or the ledger can't be used.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The host uses a virtual function.
    #[error("{0}")]
    InUse(Box<Readiness>),
    /// It can't be looked at.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The Linux kernel refused, or did not answer in time.
    #[error("{address}: can't write {value} to {path}: {source}; {remedy}", path = path.display())]
    Kernel {
        /// The physical function.
        address: PciAddress,
        /// The attribute.
        path: PathBuf,
        /// What was written.
        value: u16,
        /// What the Linux kernel answered.
        source: io::Error,
        /// What to do.
        remedy: String,
    },
}

fn count_text(address: PciAddress, asked: u16, total: u16) -> String {
    match total {
        0 => format!(
            "cannot create virtual functions of {address}: its firmware offers none (sriov_totalvfs is 0); enable SR-IOV in the \
             firmware setup of the host, or in the card's own firmware (NVIDIA ConnectX: mstconfig set SRIOV_EN=1 NUM_OF_VFS=N)"
        ),
        _ => format!("{address} can have from 1 to {total} virtual functions, not {asked}"),
    }
}

impl From<LedgerError> for VfError {
    fn from(error: LedgerError) -> Self {
        Self::Claim(error.into())
    }
}

/// Creates `count` virtual functions of `physical`, and returns them in their order. Where it has that number already they are
/// returned as they are.
pub(crate) fn create_vfs(
    host: &Host,
    physical: PciAddress,
    count: u16,
    options: &VfOptions,
) -> Result<Vec<PciAddress>, VfError> {
    let ledger = Ledger::lock(host, DEADLINE)?;
    let (total, enabled) = numbers(host, physical)?;
    if count == 0 || count > total {
        return Err(VfError::Count { address: physical, asked: count, total });
    }
    if enabled == count {
        return Ok(pci::virtual_functions(host, physical));
    }
    if enabled > 0 {
        return Err(VfError::Enabled { address: physical, enabled });
    }
    refuse_claimed(host, &ledger, &[physical])?;
    let lock = Locked::take(host, physical, options.deadline)?;
    lock.write("sriov_drivers_autoprobe", options.host_drivers.into())?;
    lock.write("sriov_numvfs", count)?;
    Ok(pci::virtual_functions(host, physical))
}

/// Removes all virtual functions of `physical`, and returns which they were.
pub(crate) fn remove_vfs(
    host: &Host,
    physical: PciAddress,
    options: &VfOptions,
) -> Result<Vec<PciAddress>, VfError> {
    let ledger = Ledger::lock(host, DEADLINE)?;
    let (_, enabled) = numbers(host, physical)?;
    let found = pci::virtual_functions(host, physical);
    if enabled == 0 {
        return Ok(found);
    }
    refuse_claimed(host, &ledger, &found)?;
    if !options.force {
        let explainer = Explainer::new(host);
        for &address in &found {
            let mut readiness = explainer.explain(address, &ExplainOptions::default())?;
            readiness
                .blockers
                .retain(|blocker| blocker.severity == Severity::Blocker && blocker.code.is_host_use());
            if !readiness.blockers.is_empty() {
                return Err(VfError::InUse(Box::new(readiness)));
            }
        }
    }
    // Processes that run kernels on one would lose it: not even by force.
    for &address in &found {
        if let Some(sharer) = ledger.sharers(address)?.into_iter().next() {
            return Err(ClaimError::Shared { address, owner: sharer.owner }.into());
        }
    }
    Locked::take(host, physical, options.deadline)?.write("sriov_numvfs", 0)?;
    Ok(found)
}

/// How many virtual functions a physical function can have, and has.
fn numbers(host: &Host, physical: PciAddress) -> Result<(u16, u16), VfError> {
    match pci::read_function(host, physical)?.sriov {
        Some(Sriov::Physical { total_vfs, num_vfs }) => Ok((total_vfs, num_vfs)),
        _ => Err(VfError::NotPhysical(physical)),
    }
}

/// Fails where one of the functions is claimed. Claims of processes that died are undone first.
fn refuse_claimed(host: &Host, ledger: &Ledger, functions: &[PciAddress]) -> Result<(), ClaimError> {
    let recovered = recover_dead(host, ledger, DEADLINE)?;
    for failure in recovered.failed {
        if let Some(&address) = functions.iter().find(|&&address| failure.is_about(address)) {
            return Err(failure.into_error(address));
        }
    }
    for journal in recovered.standing {
        let entry = journal.entry;
        if let Some(&address) = functions.iter().find(|&&address| entry.function(address).is_some()) {
            let user = if journal.locked { None } else { entry.user };
            let persistent = entry.persistent && user.is_none();
            let owner = user.unwrap_or(entry.owner);
            return Err(ClaimError::Taken { address, owner, persistent, ended: false });
        }
    }
    Ok(())
}

/// A physical function, locked.
struct Locked<'a> {
    host: &'a Host,
    lock: FunctionLock,
    deadline: Duration,
}

impl<'a> Locked<'a> {
    fn take(host: &'a Host, address: PciAddress, deadline: Duration) -> Result<Self, VfError> {
        let lock = FunctionLock::take(host, address, deadline)?.ok_or_else(|| VfError::Kernel {
            address,
            path: host.pci_device(address).join("sriov_numvfs"),
            value: 0,
            source: io::ErrorKind::TimedOut.into(),
            remedy: "an earlier command still changes this function; try again when it has ended".into(),
        })?;
        Ok(Self { host, lock, deadline })
    }

    fn write(&self, attribute: &str, value: u16) -> Result<(), VfError> {
        let address = self.lock.address();
        let path = self.host.pci_device(address).join(attribute);
        let written =
            self.host.writer().write_locked(&path, &value.to_string(), self.deadline, self.lock.file());
        written.map_err(|source| {
            let remedy = match source.kind() {
                io::ErrorKind::NotFound => {
                    "its driver creates none, or it has no driver: bind the vendor's driver for physical functions".into()
                }
                io::ErrorKind::TimedOut => format!(
                    "the Linux kernel did not answer within {} s and goes on with it: stop what has a virtual function open, \
                     and look at them again",
                    seconds(self.deadline)
                ),
                io::ErrorKind::PermissionDenied => "run this as root".into(),
                _ => "see the Linux kernel's log (dmesg) for the reason; often the firmware has given the bridge above too \
                      few bus numbers or too little memory (pci=realloc)"
                    .into(),
            };
            VfError::Kernel { address, path, value, source, remedy }
        })
    }
}
