//! What can go wrong when functions are claimed and released.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::Refusal;
use crate::PciAddress;
use crate::ledger::{LedgerError, Owner, UnreadRecord, seconds};
use crate::pci::ScanError;
use crate::readiness::{Holder, Readiness};

/// Why a function could not be claimed, or not released.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// It must not be taken. Nothing was touched.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It is not fit to be taken: all reasons, each with its remedy. Nothing was touched.
    #[error("{0}")]
    NotReady(Box<Readiness>),
    /// It could not be looked at. Nothing was touched.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The VFIO driver is not there. Nothing was touched.
    #[error(
        "the driver {driver} is not loaded ({path} is missing), so nothing can be bound to it; modprobe {driver}"
    )]
    NoVfioDriver {
        /// Its name.
        driver: String,
        /// Where it would be.
        path: PathBuf,
    },
    /// It is claimed already. Nothing was touched.
    #[error(
        "{address} is claimed already by {owner}{}; {}",
        if *.ended { ", which has ended, until it is released" } else if *.persistent { ", until it is released" } else { "" },
        if *.persistent { format!("run `vm-service release {address}` first") } else { "stop that process first".into() }
    )]
    Taken {
        /// The function.
        address: PciAddress,
        /// Who claimed it, or uses the claim.
        owner: Owner,
        /// Whether the claim outlives its owner.
        persistent: bool,
        /// Whether the owner of such a claim has ended.
        ended: bool,
    },
    /// Another process is claiming it, or releasing a claim of it. Nothing was touched.
    #[error(
        "{address} {}; wait until that has finished, and try again",
        if *.releasing { format!("is being released: {owner} claimed it") } else { format!("is being claimed by {owner}") }
    )]
    InProgress {
        /// The function.
        address: PciAddress,
        /// The process that claims it, or had claimed it.
        owner: Owner,
        /// Whether it is being released.
        releasing: bool,
    },
    /// A function could not be locked in time. Nothing was touched.
    #[error("cannot {action} {address}: {cause}")]
    Locked {
        /// The action that failed.
        action: &'static str,
        /// The function that was asked for.
        address: PciAddress,
        /// The locked function, and the process that holds the lock.
        cause: Box<BindError>,
    },
    /// Processes run kernels on it. Nothing was touched.
    #[error("{address} is shared by {owner}, which runs kernels on it; stop that process first")]
    Shared {
        /// The function.
        address: PciAddress,
        /// One that shares it.
        owner: Owner,
    },
    /// A persistent claim covers less than what was asked for. Nothing was touched.
    #[error(
        "{address} has a persistent claim that does not cover {missing}, which has to go with it; release it and claim it again"
    )]
    Uncovered {
        /// The function.
        address: PciAddress,
        /// The function that is not covered.
        missing: PciAddress,
    },
    /// An earlier claim, whose owner died, holds the function and could not be undone.
    #[error("{address} is still held by the claim of {owner}, which died, and it could not be undone: {}", join(.left))]
    NotRecovered {
        /// The function.
        address: PciAddress,
        /// Who claimed it.
        owner: Owner,
        /// What is left to undo, and why.
        left: Vec<BindError>,
    },
    /// There is no claim of it.
    #[error("{0} is not claimed, so there is nothing to release")]
    NotClaimed(PciAddress),
    /// A step failed, and everything was undone.
    #[error("{cause}; everything is as it was before")]
    Failed {
        /// The step that failed.
        cause: Box<BindError>,
    },
    /// A step failed, and not all could be undone. The ledger keeps the claim.
    #[error(
        "{cause}; undoing it is not finished: {}; the ledger remembers it, and the next release, recovery or claim completes it",
        join(.left)
    )]
    HalfUndone {
        /// The step that failed.
        cause: Box<BindError>,
        /// What is left to undo, and why.
        left: Vec<BindError>,
    },
    /// Not all could be released. The ledger keeps the claim.
    #[error("{address} is not wholly released: {}; the ledger remembers it, and the next release or recovery completes it", join(.left))]
    HalfReleased {
        /// The function that was asked for.
        address: PciAddress,
        /// What is left to undo, and why.
        left: Vec<BindError>,
    },
    /// Its claim's record can't be read, so that its former driver is not known for certain. Nothing was touched.
    #[error("{address}: {record}")]
    Unread {
        /// The function.
        address: PciAddress,
        /// The record.
        record: Box<UnreadRecord>,
    },
    /// A record of the ledger can't be read. It keeps its own device from being claimed, and nothing else.
    #[error("{0}")]
    Record(Box<UnreadRecord>),
    /// The ledger can't be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// Why a function could not be moved from one driver to another.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The Linux kernel refused.
    #[error("{address}: can't {what} ({path}): {source}; {remedy}", path = path.display())]
    Refused {
        /// The function.
        address: PciAddress,
        /// What was asked of the Linux kernel.
        what: String,
        /// The attribute that was accessed.
        path: PathBuf,
        /// What it answered.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// The Linux kernel refused, as the function does not answer, or has lost what was set up in it.
    #[error(
        "{address}: can't {what}: it {state}; check its cable and the slot's power, then find it again: echo 1 > {remove}; echo 1 > {rescan}",
        remove = remove.display(), rescan = rescan.display()
    )]
    Lost {
        /// The function.
        address: PciAddress,
        /// What was asked of the Linux kernel.
        what: String,
        /// What shows it.
        state: String,
        /// The attribute that has the Linux kernel forget the function.
        remove: PathBuf,
        /// The attribute that has it look for functions.
        rescan: PathBuf,
    },
    /// The Linux kernel did not finish before the deadline.
    #[error(
        "{address}: the Linux kernel did not {what} within {} s, as {}; it goes on trying and can't be stopped",
        seconds(*.deadline),
        blame(.holders)
    )]
    Stuck {
        /// The function.
        address: PciAddress,
        /// What was asked of the Linux kernel.
        what: String,
        /// How long it was waited for.
        deadline: Duration,
        /// Who holds the function.
        holders: Vec<Holder>,
    },
    /// Another process, or a write that it began, holds the function's lock.
    #[error(
        "timed out after {} s waiting for {} to unlock {address}; {}",
        seconds(*.deadline),
        holder.as_ref().map_or("another process".into(), ToString::to_string),
        if users.is_empty() {
            "wait for it; if that process has ended, dmesg may say what the driver of the function waits for".into()
        } else {
            format!("{}; stop them", join(.users))
        }
    )]
    Locked {
        /// The function.
        address: PciAddress,
        /// The process that locked it. It may have ended while its write is still under way.
        holder: Option<Owner>,
        /// How long it was waited for.
        deadline: Duration,
        /// Who has the function open.
        users: Vec<Holder>,
    },
    /// The driver is not the one that it was bound to.
    #[error("{address} is on {} after it was bound to {expected}; dmesg says why", found.as_deref().unwrap_or("no driver"))]
    WrongDriver {
        /// The function.
        address: PciAddress,
        /// The driver that it should be on.
        expected: String,
        /// The driver that it is on.
        found: Option<String>,
    },
    /// `driver_override` is not what was written to it.
    #[error(
        "{address}: driver_override is {} after {} was written to it; someone else writes it: stop what binds drivers, \
         and try again",
        found.as_deref().unwrap_or("empty"), expected.as_deref().unwrap_or("nothing")
    )]
    WrongOverride {
        /// The function.
        address: PciAddress,
        /// What was written; `None` to clear it.
        expected: Option<String>,
        /// What it reads as; `None` when it is cleared.
        found: Option<String>,
    },
    /// The former driver has gone.
    #[error("{address} can't go back to {driver}, which is not loaded; modprobe {driver}")]
    DriverGone {
        /// The function.
        address: PciAddress,
        /// Its former driver.
        driver: String,
    },
    /// The function has gone.
    #[error("{0} has vanished from the host")]
    Vanished(PciAddress),
    /// [`Cancel`](super::Cancel) asked for it.
    #[error("{0} was not taken, as the claim was cancelled")]
    Cancelled(PciAddress),
    /// The ledger could not be written, so nothing more was done.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

fn join(errors: &[impl fmt::Display]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Who is to blame, and what to do about them.
fn blame(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "something holds it that has no file open which names it (dmesg may tell)".into();
    }
    format!("{}; stop them", join(holders))
}
