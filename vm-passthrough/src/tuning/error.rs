//! Why a GPU can't be set.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::Setting;
use crate::PciAddress;
use crate::ledger::{LedgerError, seconds};

/// Why a GPU can't be set, or not be asked what it is set to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TuningError {
    /// It is not there any more.
    #[error("{0} is gone")]
    Gone(PciAddress),
    /// Nobody can be asked to set it as things are. Nothing was touched.
    #[error("{address} can't be set: {why}; {remedy}")]
    NotSettable {
        /// The GPU.
        address: PciAddress,
        /// Why.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The GPU, or its driver, does not have this setting. Nothing was touched.
    #[error("{address}: its {setting} can't be set: {why}")]
    NotOffered {
        /// The GPU.
        address: PciAddress,
        /// The setting.
        setting: Setting,
        /// Why, and what to do.
        why: String,
    },
    /// The GPU says that it can't be set to this. Nothing was touched.
    #[error("{address}: its {setting} can't be {wanted}: {allowed}")]
    OutOfRange {
        /// The GPU.
        address: PciAddress,
        /// The setting.
        setting: Setting,
        /// What was asked for.
        wanted: String,
        /// What it may be.
        allowed: String,
    },
    /// Another process changes the function. Nothing was touched.
    #[error(
        "{address} has been changed by another command for {} s; wait for it, or look at what it does",
        seconds(*.deadline)
    )]
    Busy {
        /// The GPU.
        address: PciAddress,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// [`Cancel`](crate::claim::Cancel) asked for it. Nothing was touched.
    #[error("{0} was not set, as that was cancelled")]
    Cancelled(PciAddress),
    /// A step failed.
    #[error("{address}: can't {what}: {cause}; {after}")]
    Failed {
        /// The GPU.
        address: PciAddress,
        /// What was to be done.
        what: String,
        /// Why it failed.
        cause: Box<Cause>,
        /// What became of the steps before.
        after: String,
    },
    /// It was set, and read back; all that it is set to could not be read after that.
    #[error("{address} was set, and what it is set to now can't be read: {why}")]
    Unread {
        /// The GPU.
        address: PciAddress,
        /// Why.
        why: String,
    },
    /// The function's lock can't be used. Nothing was touched.
    #[error(transparent)]
    Lock(#[from] LedgerError),
}

/// Why a step failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The driver refused.
    Refused {
        /// What was asked: a file, or a function of NVML.
        by: String,
        /// What it said.
        reason: String,
        /// What to do; empty where `reason` says it.
        remedy: String,
    },
    /// The driver accepted it, and reads otherwise.
    NotTaken {
        /// What was set.
        wanted: String,
        /// What was read.
        found: String,
    },
    /// The driver did not answer before the deadline.
    NoAnswer(Duration),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { by, reason, remedy } if remedy.is_empty() => write!(f, "{by}: {reason}"),
            Self::Refused { by, reason, remedy } => write!(f, "{by}: {reason}; {remedy}"),
            Self::NotTaken { wanted, found } => {
                write!(f, "the driver accepted {wanted}, and {found} is read back")
            }
            Self::NoAnswer(deadline) => write!(
                f,
                "the driver did not answer within {} s, and may still do it; `dmesg` may say what holds it, and `vm-service egpu \
                 config show` what it is set to",
                seconds(*deadline)
            ),
        }
    }
}
