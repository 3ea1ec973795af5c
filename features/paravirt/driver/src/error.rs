//! What can go wrong, as values.

use thiserror::Error;
use vm_paravirt::{Malformed, NoRoom, Status};

/// Why the accelerator could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The function is not this device.
    #[error("PCI function {:04x}:{:04x} is no paravirtual accelerator", .found & 0xffff, .found >> 16)]
    WrongDevice {
        /// Its vendor in the low, its device in the high half.
        found: u32,
    },
    /// There is no such device.
    #[error("the guest has no accelerator with a window: give it [[accelerators]] with `window` in its file")]
    Absent,
    /// A range does not lie in its part of the window.
    #[error("a range does not lie in its part of the window: see its length")]
    Window,
    /// No part of the window of that length is free.
    #[error(
        "no part of the window of that length is free: end another program, or give the guest a larger `window`"
    )]
    WindowFull,
    /// The device lacks something that virtio requires, or refused what was negotiated.
    #[error("the virtio device can't be used: {0}")]
    Transport(&'static str),
    /// The memory for the queue is used by another [`Virtqueue`](crate::Virtqueue).
    #[error("the memory for the queue is in use: give each device its own")]
    QueueInUse,
    /// As many batches are under way as the queue holds.
    #[error("the queue is full: take completed batches out of it first")]
    QueueFull,
    /// A frame is longer than the device takes, or shorter than a header.
    #[error("a frame has no such length: see the device's configuration")]
    FrameLength,
    /// The device needs a reset: its worker on the host has ended, or this driver broke a rule. Over a stream: the host
    /// has closed it.
    #[error("the device needs a reset: open it again")]
    NeedsReset,
    /// An answer did not come in time. The device was reset, and everything on it is gone.
    #[error("an answer did not come in time, and the device was reset: open it again")]
    Late,
    /// The device wrote something that is no answer.
    #[error("the device's answer: {0}")]
    Malformed(Malformed),
    /// Something to be written does not fit.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The Linux kernel refused something.
    #[cfg_attr(feature = "linux", error("{what} failed: {}", std::io::Error::from_raw_os_error(*errno)))]
    #[cfg_attr(not(feature = "linux"), error("{what} failed: error {errno}"))]
    System {
        /// What was to be done.
        what: &'static str,
        /// Its error number.
        errno: i32,
    },
    /// An operation failed.
    #[error("operation {operation}: {status}")]
    Status {
        /// Its number in the batch.
        operation: usize,
        /// How it ended.
        status: Status,
    },
}

impl From<Malformed> for Error {
    fn from(error: Malformed) -> Self {
        Self::Malformed(error)
    }
}
