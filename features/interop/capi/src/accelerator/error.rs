//! Why a call of `vmaccel.h` failed.

use thiserror::Error;
use vm_accel::Error as Device;
use vm_runtime::{CompileError, OpenError};

use crate::sys::accelerator as abi;

/// Why a call failed; `vma_last_error` gives the function's name and this text.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// A parameter has a value that it can't have.
    #[error("{parameter} {what}")]
    Invalid {
        /// The parameter.
        parameter: String,
        /// Its value, and what to do.
        what: String,
    },
    /// A handle is none, or another's.
    #[error("{parameter} {what}")]
    Handle {
        /// The parameter.
        parameter: String,
        /// What it is, and what is needed.
        what: String,
    },
    /// What a handle is of is in a state in which this can't be.
    #[error("{parameter} {what}")]
    State {
        /// The parameter.
        parameter: String,
        /// The state, and what to do.
        what: String,
    },
    /// A resource did not take a step.
    #[error("{what}")]
    Refused {
        /// Which, its state, and why.
        what: String,
        /// Why.
        #[source]
        error: Device,
    },
    /// The process can't use accelerators, or not any more.
    #[error("{0}")]
    Process(&'static str),
    /// There is no such device.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device, its worker, or what was given to them.
    #[error(transparent)]
    Device(#[from] Device),
    /// A module that is none.
    #[error("{0}")]
    Source(String),
    /// A module that has no code for the device.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A panic that was caught.
    #[error("a bug of libvmkernels, please report it: {0}")]
    Bug(String),
}

impl Failure {
    /// That a parameter has a value that it can't have.
    pub(crate) fn invalid(parameter: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Invalid { parameter: parameter.into(), what: what.into() }
    }

    /// That what a parameter is of is in a state in which this can't be.
    pub(crate) fn state(parameter: impl Into<String>, what: impl Into<String>) -> Self {
        Self::State { parameter: parameter.into(), what: what.into() }
    }

    /// What C is told.
    pub(crate) fn status(&self) -> abi::vma_status {
        match self {
            Self::State { .. } => abi::VMA_INVALID_STATE,
            Self::Invalid { .. } => abi::VMA_INVALID_VALUE,
            Self::Handle { .. } => abi::VMA_INVALID_HANDLE,
            Self::Process(_) | Self::Open(OpenError::Feature { .. } | OpenError::Unusable { .. }) => {
                abi::VMA_NOT_AVAILABLE
            }
            Self::Open(_) => abi::VMA_INVALID_VALUE,
            Self::Source(_) | Self::Compile(_) => abi::VMA_COMPILE_FAILED,
            Self::Bug(_) => abi::VMA_FAILED,
            Self::Device(error) | Self::Refused { error, .. } => match error {
                Device::Unavailable { .. } | Device::NoDevice { .. } => abi::VMA_NOT_AVAILABLE,
                Device::OutOfMemory { .. } | Device::PoolLimit { .. } => abi::VMA_OUT_OF_MEMORY,
                Device::OutOfRange { .. }
                | Device::Lengths { .. }
                | Device::NotHostVisible { .. }
                | Device::Arguments { .. }
                | Device::Grid { .. }
                | Device::Extents { .. }
                | Device::WrongWorker { .. }
                | Device::NotShareable { .. }
                | Device::OutOfOrder => abi::VMA_INVALID_VALUE,
                Device::Held { .. } => abi::VMA_INVALID_STATE,
                Device::Load { .. } => abi::VMA_COMPILE_FAILED,
                Device::QueueFull { .. } => abi::VMA_QUEUE_FULL,
                Device::Deadline { .. } => abi::VMA_TIMEOUT,
                Device::Cancelled => abi::VMA_CANCELLED,
                Device::Stopped => abi::VMA_STOPPED,
                Device::Lost { .. } => abi::VMA_LOST,
                Device::OutOfFuel { .. } | Device::DeadlineExceeded { .. } => abi::VMA_KERNEL_STOPPED,
                Device::Unsupported { .. } => abi::VMA_NOT_SUPPORTED,
                _ => abi::VMA_FAILED,
            },
        }
    }
}
