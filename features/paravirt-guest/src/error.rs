//! What can go wrong, as values.

use core::fmt;

use vm_paravirt::{Malformed, NoRoom, Status};

/// Why the accelerator could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The function is not this device.
    WrongDevice {
        /// Its vendor in the low, its device in the high half.
        found: u32,
    },
    /// There is no such device.
    Absent,
    /// A range does not lie in its part of the window.
    Window,
    /// No part of the window of that length is free.
    WindowFull,
    /// The device lacks something that virtio requires, or refused what was negotiated.
    Transport(&'static str),
    /// The memory for the queue is used by another [`Accelerator`](crate::Accelerator).
    QueueInUse,
    /// As many batches are under way as the queue holds.
    QueueFull,
    /// A frame is longer than the device takes, or shorter than a header.
    FrameLength,
    /// The device needs a reset: its worker on the host has ended, or this driver broke a rule. Over a stream: the host
    /// has closed it.
    NeedsReset,
    /// An answer did not come in time. The device was reset, and everything on it is gone.
    Late,
    /// The device wrote something that is no answer.
    Malformed(Malformed),
    /// Something to be written does not fit.
    NoRoom(NoRoom),
    /// The Linux kernel refused something.
    System {
        /// What was to be done.
        what: &'static str,
        /// Its error number.
        errno: i32,
    },
    /// An operation failed.
    Status {
        /// Its number in the batch.
        operation: usize,
        /// How it ended.
        status: Status,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongDevice { found } => {
                write!(
                    f,
                    "PCI function {:04x}:{:04x} is no paravirtual accelerator",
                    found & 0xffff,
                    found >> 16
                )
            }
            Self::Absent => f.write_str(
                "the guest has no accelerator with a window: give it [[accelerators]] with `window` in its file",
            ),
            Self::Window => f.write_str("a range does not lie in its part of the window: see its length"),
            Self::WindowFull => f.write_str(
                "no part of the window of that length is free: end another program, or give the guest a larger `window`",
            ),
            Self::Transport(what) => write!(f, "the virtio device can't be used: {what}"),
            Self::QueueInUse => f.write_str("the memory for the queue is in use: give each device its own"),
            Self::QueueFull => f.write_str("the queue is full: take completed batches out of it first"),
            Self::FrameLength => f.write_str("a frame has no such length: see the device's configuration"),
            Self::NeedsReset => f.write_str("the device needs a reset: open it again"),
            Self::Late => {
                f.write_str("an answer did not come in time, and the device was reset: open it again")
            }
            Self::Malformed(error) => write!(f, "the device's answer: {error}"),
            Self::NoRoom(error) => error.fmt(f),
            #[cfg(feature = "linux")]
            Self::System { what, errno } => {
                write!(f, "{what} failed: {}", std::io::Error::from_raw_os_error(*errno))
            }
            #[cfg(not(feature = "linux"))]
            Self::System { what, errno } => write!(f, "{what} failed: error {errno}"),
            Self::Status { operation, status } => write!(f, "operation {operation}: {status}"),
        }
    }
}

impl core::error::Error for Error {}

impl From<Malformed> for Error {
    fn from(error: Malformed) -> Self {
        Self::Malformed(error)
    }
}

impl From<NoRoom> for Error {
    fn from(error: NoRoom) -> Self {
        Self::NoRoom(error)
    }
}
