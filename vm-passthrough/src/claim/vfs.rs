//! Virtual functions (PCI Express Base 6.0, chapter 9): those of a physical function are created, and removed, all together.
//!
//! Both change which functions there are, so both hold the lock of the physical function, which a claim of one of its virtual
//! functions shares: none begins meanwhile. The Linux kernel creates all or none, and knows how many there are; so the ledger notes nothing.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::act::occupied;
use super::lock::FunctionLocks;
use super::{ClaimError, DEADLINE, recover};
use crate::deadlines::LEDGER;
use crate::ledger::{Ledger, LedgerError, seconds, sharers};
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
    let action = "create virtual functions of";
    let (locks, failed) = recover::lock_settled(host, action, physical, options.deadline)?;
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
    if let Some(failure) = failed.into_iter().find(|failure| failure.is_about(physical)) {
        return Err(failure.into_error(physical).into());
    }
    if let Some(journal) = recover::standing(&Ledger::lock(host, LEDGER)?, physical)? {
        return Err(occupied(&journal, physical).into());
    }
    let lock = Locked { host, locks, address: physical, deadline: options.deadline };
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
    let found = pci::virtual_functions(host, physical);
    let recovery = recover::recover_covering(host, &found, DEADLINE)?;
    let (locks, _) = recover::lock_settled(host, "remove virtual functions of", physical, options.deadline)?;
    let (_, enabled) = numbers(host, physical)?;
    let found = pci::virtual_functions(host, physical);
    if enabled == 0 {
        return Ok(found);
    }
    recover::refuse_claimed(&Ledger::lock(host, LEDGER)?, &found, recovery)?;
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
        if let Some(sharer) = sharers(host, address)?.into_iter().next() {
            return Err(ClaimError::Shared { address, owner: sharer.owner }.into());
        }
    }
    let lock = Locked { host, locks, address: physical, deadline: options.deadline };
    lock.write("sriov_numvfs", 0)?;
    Ok(found)
}

/// How many virtual functions a physical function can have, and has.
fn numbers(host: &Host, physical: PciAddress) -> Result<(u16, u16), VfError> {
    match pci::read_function(host, physical)?.sriov {
        Some(Sriov::Physical { total_vfs, num_vfs }) => Ok((total_vfs, num_vfs)),
        _ => Err(VfError::NotPhysical(physical)),
    }
}

/// A physical function, locked.
struct Locked<'a> {
    host: &'a Host,
    locks: FunctionLocks,
    address: PciAddress,
    deadline: Duration,
}

impl Locked<'_> {
    fn write(&self, attribute: &str, value: u16) -> Result<(), VfError> {
        let (address, value_text) = (self.address, value.to_string());
        let path = self.host.pci_device(address).join(attribute);
        let written = match self.locks.get(address) {
            Some(lock) => self.host.writer().write_locked(&path, &value_text, self.deadline, lock.file()),
            None => Err(io::ErrorKind::TimedOut.into()),
        };
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
