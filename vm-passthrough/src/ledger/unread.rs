//! Records of the ledger that can't be read: damaged ones, and those of a newer version.
//!
//! Such a record is kept as it is, because what it knew, the former drivers, is nowhere else. It stands in the way of its own
//! device only: the slot of the function that its file is named after, and the functions that its sound lines name.

use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use thiserror::Error;

use super::journal::{self, ClaimedFunction, Unread};
use super::{LedgerError, io_error, open, read_record};
use crate::iommu::{VFIO_DRIVER, is_vfio_driver};
use crate::{Host, PciAddress, files};

/// A record of the ledger that can't be read, and is kept.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the ledger's record {path} can't be read: {what}; it is kept as it is; {remedy}", path = .path.display())]
pub struct UnreadRecord {
    /// The file.
    pub path: PathBuf,
    /// The function that the file is named after; `None` when its name is no address.
    pub target: Option<PciAddress>,
    /// The functions that its sound lines name, as they were before.
    pub functions: Vec<ClaimedFunction>,
    /// What is wrong with it.
    pub what: String,
    /// What to do by hand.
    pub remedy: String,
}

impl UnreadRecord {
    /// Whether it may be the record of this function.
    pub fn covers(&self, address: PciAddress) -> bool {
        self.target.is_some_and(|target| target.same_slot(address))
            || self.functions.iter().any(|function| function.address == address)
    }

    /// The file at `path`, which can't be read for this reason.
    pub(super) fn new(host: &Host, path: &Path, error: &LedgerError) -> Self {
        let what = match error {
            LedgerError::Untrusted { what, .. } => what.clone(),
            LedgerError::Io { operation, source, .. } => format!("can't {operation} it: {source}"),
            error => error.to_string(),
        };
        Self::read_as(host, path, &[], &what, false)
    }

    /// The file at `path`, of which `bytes` were read.
    pub(super) fn of(host: &Host, path: &Path, bytes: &[u8], unread: &Unread) -> Self {
        match unread {
            Unread::Damaged(what) => Self::read_as(host, path, bytes, what, false),
            Unread::Newer(version) => {
                let what =
                    format!("a newer version of this program wrote it, in version {version} of the format");
                Self::read_as(host, path, bytes, &what, true)
            }
        }
    }

    fn read_as(host: &Host, path: &Path, bytes: &[u8], what: &str, is_newer: bool) -> Self {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let target = name.strip_suffix(".claim").and_then(|name| name.parse().ok());
        let functions = journal::salvage(bytes);
        let mut remedy = String::new();
        if is_alive(path) {
            remedy += &format!(
                "a process still uses the claim: end it first (fuser {} names it); ",
                path.display()
            );
        }
        if is_newer {
            remedy += "release it with that version; without it, ";
        }
        remedy += &by_hand(host, path, target, &functions);
        Self { path: path.into(), target, functions, what: what.into(), remedy }
    }
}

/// Whether a process holds the record's lock.
fn is_alive(path: &Path) -> bool {
    let locked = open(path, OFlags::RDONLY).map(|file| flock(&file, FlockOperation::NonBlockingLockShared));
    matches!(locked, Ok(Err(rustix::io::Errno::WOULDBLOCK)))
}

/// The commands that put the functions of a record back, and then the record away.
fn by_hand(host: &Host, path: &Path, target: Option<PciAddress>, known: &[ClaimedFunction]) -> String {
    let slot = target.into_iter().flat_map(|target| {
        (0..8)
            .filter_map(move |number| PciAddress::new(target.domain(), target.bus(), target.device(), number))
    });
    let mut addresses: Vec<_> = slot.chain(known.iter().map(|function| function.address)).collect();
    addresses.sort();
    addresses.dedup();
    let commands: Vec<_> = addresses
        .into_iter()
        .filter_map(|address| {
            let known = known.iter().find(|function| function.address == address);
            put_back(host, address, known, target == Some(address))
        })
        .collect();
    let remove = format!("rm {}", path.display());
    if commands.is_empty() {
        return format!("nothing of it is on {VFIO_DRIVER} any more: {remove}");
    }
    format!("put it back by hand: {}; {remove}", commands.join("; "))
}

/// The commands that put one function back; `None` where there is nothing to do.
fn put_back(
    host: &Host,
    address: PciAddress,
    known: Option<&ClaimedFunction>,
    is_target: bool,
) -> Option<String> {
    let device = host.pci_device(address);
    if !device.exists() || known.is_some_and(|function| function.kept) {
        return None;
    }
    let drivers = host.sys.join("bus/pci/drivers");
    let unbind = match files::link_name(&device.join("driver")) {
        Some(driver) if is_vfio_driver(&driver) => {
            format!("echo {address} > {}; ", drivers.join(driver).join("unbind").display())
        }
        // Another driver has it since.
        Some(_) => return None,
        None if is_target || known.is_some_and(|function| function.driver.is_some()) => String::new(),
        None => return None,
    };
    let before = known.and_then(|function| function.driver_override.as_deref());
    let before = before.map_or_else(String::new, |name| format!("{name} "));
    let clear = format!("echo {before}> {}", device.join("driver_override").display());
    let bind = match known.map(|function| function.driver.as_deref()) {
        Some(Some(driver)) => drivers.join(driver).join("bind"),
        // It had none.
        Some(None) => return Some(unbind + &clear),
        // Linux binds the driver that it would have bound at the start.
        None => host.sys.join("bus/pci/drivers_probe"),
    };
    Some(format!("{unbind}{clear}; echo {address} > {}", bind.display()))
}

/// The record that can't be read and may be that of this function. It only reads, and needs no lock of the ledger.
///
/// # Errors
/// When the ledger's directory can't be read.
pub(crate) fn unread(host: &Host, address: PciAddress) -> Result<Option<UnreadRecord>, LedgerError> {
    let directory = host.state.join("ledger");
    let names = files::names(&directory).map_err(io_error("list", &directory))?;
    let records = names.iter().filter(|name| name.ends_with(".claim"));
    Ok(records
        .filter_map(|name| read_record(host, &directory.join(name)).err())
        .find(|record| record.covers(address)))
}
