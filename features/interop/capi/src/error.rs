//! Why a call failed.

use thiserror::Error;
use vm_kernels::call::CallError;
use vm_kernels::functions::Invalid;
use vm_runtime::CompileError;

use crate::sys::vmk_status;

/// Why a call failed; its text is what `vmk_last_error` gives.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// What was asked for is not there.
    #[error("{0}")]
    Unavailable(String),
    /// A parameter has a value that it can't have.
    #[error("{function}: {parameter} {what}")]
    Invalid {
        /// The function.
        function: &'static str,
        /// The parameter.
        parameter: String,
        /// Its value, and what to do.
        what: String,
    },
    /// The kernel could not be made or started.
    #[error("{function}: {what}")]
    Launch {
        /// The function.
        function: &'static str,
        /// What happened.
        what: String,
    },
    /// There is not enough memory.
    #[error("{function}: {what}")]
    Memory {
        /// The function.
        function: &'static str,
        /// Which, and how much.
        what: String,
    },
}

impl Failure {
    /// What C is told.
    pub(crate) fn status(&self) -> vmk_status {
        match self {
            Failure::Unavailable(_) => vmk_status::VMK_NOT_AVAILABLE,
            Failure::Invalid { .. } => vmk_status::VMK_INVALID_VALUE,
            Failure::Launch { .. } => vmk_status::VMK_LAUNCH_FAILED,
            Failure::Memory { .. } => vmk_status::VMK_OUT_OF_MEMORY,
        }
    }

    /// That a parameter has a value that it can't have.
    pub(crate) fn invalid(function: &'static str, parameter: &str, what: impl Into<String>) -> Failure {
        Failure::Invalid { function, parameter: parameter.into(), what: what.into() }
    }

    /// What the function said of its arguments and the device.
    pub(crate) fn call(function: &'static str, error: &CallError) -> Failure {
        match error {
            CallError::Unsupported { what, .. } => {
                Failure::invalid(function, "the call", format!("can't be made: {what}"))
            }
            error => Failure::Unavailable(error.to_string()),
        }
    }

    /// What a device said.
    pub(crate) fn device(function: &'static str, error: &vm_accel::Error) -> Failure {
        let what = error.to_string();
        match error {
            vm_accel::Error::Unavailable { .. } | vm_accel::Error::NoDevice { .. } => {
                Failure::Unavailable(what)
            }
            vm_accel::Error::OutOfMemory { .. } => Failure::Memory { function, what },
            // CUDA_ERROR_OUT_OF_MEMORY.
            vm_accel::Error::Driver { code: 2, .. } => Failure::Memory { function, what },
            _ => Failure::Launch { function, what },
        }
    }

    /// What the compiler said.
    pub(crate) fn compiler(function: &'static str, error: &CompileError) -> Failure {
        match error {
            // The device lacks what every variant needs.
            CompileError::Device { .. } | CompileError::Rejected(_) => {
                Failure::Unavailable(error.to_string())
            }
            _ => Failure::Launch { function, what: error.to_string() },
        }
    }
}

impl From<Invalid> for Failure {
    fn from(Invalid { function, parameter, what }: Invalid) -> Self {
        Failure::invalid(function, parameter, what)
    }
}
