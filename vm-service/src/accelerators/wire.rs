//! What a VMM and a worker say to each other: one packet each, with descriptors beside it.

use serde::{Deserialize, Serialize};

use crate::config::Trust;
use crate::os::sandbox::{Confinement, Measure};

/// A message of the VMM to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The first: open the accelerator. With a descriptor for each part of the guest's memory, and the file that keeps its
    /// time.
    Open(Open),
    /// The guest's driver is ready. With the doorbell's and, if it wants interrupts, the interrupt's eventfd.
    Start(Start),
    /// A program of the guest has connected. With its socket.
    Connect,
    /// Say that you are there.
    Ping,
}

/// Which accelerator, and what the guest may use of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Open {
    /// The guest's name, for messages.
    pub(crate) guest: String,
    /// `cpu`, a PCI address, or `npu:` and a number.
    pub(crate) device: String,
    /// The most bytes of the accelerator's memory.
    pub(crate) memory: u64,
    /// The longest that a launch may take, in microseconds.
    pub(crate) deadline_us: u64,
    /// How much of every [`TIME_PERIOD`](crate::config::TIME_PERIOD) the guest may keep it busy, in microseconds.
    pub(crate) time_slice_us: u64,
    /// The longest that the worker polls for something before it sleeps, in microseconds.
    pub(crate) poll_us: u64,
    /// The parts of the guest's memory that buffers can be made over: address and length. That is the RAM with its
    /// guest-physical addresses, or the window, which begins at 0.
    pub(crate) ram: Vec<(u64, u64)>,
    /// The measures of its confinement that the operator waived.
    pub(crate) unconfined: Vec<Measure>,
    /// The vsock port at which programs of the guest connect; `None` where its driver has a queue.
    pub(crate) port: Option<u32>,
    /// What it trusts, and where a library is that it names.
    pub(crate) trust: Trust,
}

/// The queue as the driver set it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Entries.
    pub(crate) size: u16,
    /// Where the descriptor table lies.
    pub(crate) descriptors: u64,
    /// Where the available ring lies.
    pub(crate) available: u64,
    /// Where the used ring lies.
    pub(crate) used: u64,
    /// Whether the driver says when it wants interrupts (`VIRTIO_F_EVENT_IDX`).
    pub(crate) event_index: bool,
}

/// A message of a worker to the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The accelerator is open.
    Ready {
        /// Its name.
        name: String,
        /// What code is compiled for.
        target: String,
        /// How far the worker is confined.
        confinement: Confinement,
    },
    /// It could not be opened, and why; the worker ends.
    Failed(String),
    /// The worker serves this guest no further, and why.
    Broken(String),
    /// Something takes longer than it may, and can't be stopped but by ending the worker.
    Overdue(String),
    /// The answer to a ping.
    Here,
}
