//! Why a ring does not do what it is asked, and why it has failed.

use std::io;
use std::time::Duration;

use thiserror::Error;

use super::Ticket;
use super::layout::{FEWEST_ENTRIES, MOST_ENTRIES};
use crate::gpu::RegisterError;
use crate::vfio::VfioError;

/// Why a ring has failed, and with it every submission that was under way.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RingFailure {
    /// The device tells of an error.
    #[error("the device reports error {code} (as in NVIDIA's list of Xid errors)")]
    Fault {
        /// Which.
        code: u32,
    },
    /// `GP_GET` is outside of the ring.
    #[error("the device is at entry {get}, and the ring has {entries}; it is broken or hostile")]
    Outside {
        /// What it says.
        get: u32,
        /// How many entries there are.
        entries: u32,
    },
    /// `GP_GET` is where it can't be.
    #[error(
        "the device is at entry {get}, and must be between {last}, which was done, and {put}; it is broken or hostile"
    )]
    Astray {
        /// What it says.
        get: u32,
        /// What was done already.
        last: u32,
        /// Where the next entry goes.
        put: u32,
    },
    /// The fence is none that can be.
    #[error(
        "the fence reads {read:#x}, and must be between {completed:#x}, as it was, and {submitted:#x}; the device is broken or \
         hostile"
    )]
    Fence {
        /// What it reads.
        read: u32,
        /// What is done.
        completed: u32,
        /// What was submitted.
        submitted: u32,
    },
    /// The doorbell could not be rung.
    #[error("the doorbell can't be rung: {reason}")]
    Doorbell {
        /// Why not.
        reason: String,
    },
    /// It was given up.
    #[error("it was given up: {reason}")]
    Abandoned {
        /// Why.
        reason: String,
    },
}

/// Why a ring did not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RingError {
    /// It can't have that many entries.
    #[error("a ring has a power of two of entries, {FEWEST_ENTRIES} to {MOST_ENTRIES}, and not {entries}")]
    Entries {
        /// How many were asked for.
        entries: u32,
    },
    /// A place that a device can't reach so.
    #[error(
        "{len:#x} bytes at {at:#x} can't be used: both are multiples of 4, not 0 bytes, within 40 bits, and no copy onto itself"
    )]
    Range {
        /// Where.
        at: u64,
        /// How many bytes.
        len: u32,
    },
    /// More commands than a submission has room for.
    #[error("the commands take {dwords} dwords, and a submission has {most}; make several of it")]
    TooLong {
        /// How many they take.
        dwords: usize,
        /// How many there may be.
        most: usize,
    },
    /// Every entry is in use.
    #[error("all {pending} entries are in use; wait for one")]
    Full {
        /// How many are.
        pending: usize,
    },
    /// Nobody takes what has ended.
    #[error("{ended} submissions have ended, and nobody took their completions; take them")]
    Untaken {
        /// How many.
        ended: usize,
    },
    /// It has failed, and takes nothing more.
    #[error("the ring has failed: {0}; reset the device, and restart it")]
    Failed(RingFailure),
    /// It is not submitted, or its completion was taken already.
    #[error("the submission of fence {:#x} is not under way", .0.fence())]
    NotPending(Ticket),
    /// It was not done in time. It is still under way.
    #[error(
        "the submission of fence {:#x} was not done within {timeout:?}: the fence reads {fence:#x}, the device is at entry {get} of {put}, and its \
         boot register reads {boot}",
        ticket.fence()
    )]
    Deadline {
        /// Which.
        ticket: Ticket,
        /// How long it was waited for.
        timeout: Duration,
        /// What the fence reads.
        fence: u32,
        /// Where the device says it is.
        get: u32,
        /// Where the next entry goes.
        put: u32,
        /// What the boot register reads, or why it can't be read.
        boot: String,
    },
    /// VFIO did not do it.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// The device did not do it.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The system did not do it.
    #[error("{what} failed: {source}")]
    System {
        /// What was asked.
        what: &'static str,
        /// What it answered.
        source: io::Error,
    },
}
