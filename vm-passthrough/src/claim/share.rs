//! Shared use of a function, beside claims of the whole: a claim is refused while a lease lives, and a lease is refused
//! while a claim does. Both are made with the function locked, and then the ledger, so one of two comes first.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use super::act::occupied;
use super::{ClaimError, Refusal, recover};
use crate::deadlines::LEDGER;
use crate::ledger::{self, Ledger};
use crate::{Host, PciAddress};

/// A function that this process shares with others: while this lives, nobody can claim it whole.
///
/// It ends when it is dropped, and with the process.
#[derive(Debug)]
pub struct SharedLease {
    address: PciAddress,
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl SharedLease {
    /// The function.
    pub fn address(&self) -> PciAddress {
        self.address
    }
}

impl Drop for SharedLease {
    fn drop(&mut self) {
        // Without the lock that goes with the file, it is stale anyway.
        if let Err(error) = ledger::remove(&self.path) {
            tracing::debug!(%error, "an ended lease is left for the next to remove");
        }
    }
}

/// Takes a lease of `address`, after claims of dead processes were undone.
pub(crate) fn share(host: &Host, address: PciAddress, deadline: Duration) -> Result<SharedLease, ClaimError> {
    if !host.pci_device(address).exists() {
        return Err(Refusal::NoSuchFunction(address).into());
    }
    let (_locks, failed) = recover::lock_settled(host, "share", address, deadline)?;
    if let Some(failure) = failed.into_iter().find(|failure| failure.is_about(address)) {
        return Err(failure.into_error(address));
    }
    let ledger = Ledger::lock(host, LEDGER)?;
    if let Some(journal) = recover::standing(&ledger, address)? {
        return Err(occupied(&journal, address));
    }
    let (path, file) = ledger.create_lease(address)?;
    tracing::debug!(function = %address, "shared");
    Ok(SharedLease { address, path, _file: file })
}
