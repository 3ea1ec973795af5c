//! What goes wrong.

use thiserror::Error;
use vm_runtime::CompileError;

use crate::DType;

/// Why something of an array failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that don't go together.
    #[error("{function}: {what}")]
    Shape {
        /// The function.
        function: &'static str,
        /// What does not fit.
        what: String,
    },
    /// A type that a function has not.
    #[error("{function} has no {dtype}: {what}")]
    Type {
        /// The function.
        function: &'static str,
        /// The type.
        dtype: DType,
        /// Which ones there are.
        what: &'static str,
    },
    /// An argument of a type that a function can't be given.
    #[error("{function}: {argument} is {what}")]
    Argument {
        /// The function.
        function: &'static str,
        /// The argument.
        argument: String,
        /// What it is, and what it must be.
        what: String,
    },
    /// An axis, an index or another number that can't be.
    #[error("{function}: {what}")]
    Value {
        /// The function.
        function: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// An index beyond an axis.
    #[error("index {index} is out of bounds for axis {axis} with size {size}")]
    Index {
        /// The index.
        index: i64,
        /// The axis.
        axis: usize,
        /// Its extent.
        size: u64,
    },
    /// A matrix that has no such decomposition or inverse.
    #[error("{function}: {what}")]
    Matrix {
        /// The function.
        function: &'static str,
        /// What it is or is not.
        what: &'static str,
    },
    /// Arrays of two devices, or of two streams of one.
    #[error("{function}: arrays of {left} and {right}; bring one to the other's device by `to_device`")]
    Devices {
        /// The function.
        function: &'static str,
        /// One device.
        left: String,
        /// The other.
        right: String,
    },
    /// The device has no memory for it.
    #[error("{0}")]
    OutOfMemory(String),
    /// The device is gone, or its context is lost.
    #[error("{0}")]
    Lost(String),
    /// A wait took longer than its deadline.
    #[error("{0}")]
    Deadline(String),
    /// The process was forked from one that had the device.
    #[error(
        "the device was opened before this process was forked: call `init` in the child, or start children by `spawn`"
    )]
    Forked,
    /// The text of a kernel breaks rules: where, and which.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Kernel(Vec<Fault>),
    /// The device was stopped.
    #[error(
        "the device was shut down, and its arrays can't be used any more: copy to the host before what is needed after"
    )]
    Ended,
    /// A kernel was not compiled, or not launched.
    #[error("{0}")]
    Device(String),
}

/// What is wrong on a line of a kernel's text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct Fault {
    /// The line, from 1; 0 where it is none.
    pub line: u32,
    /// What is wrong.
    pub what: String,
}

/// What functions of this crate give.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<vm_runtime::Error> for Error {
    fn from(error: vm_runtime::Error) -> Self {
        use vm_runtime::Error as Of;
        let text = error.to_string();
        match error {
            Of::OutOfMemory { .. } | Of::PoolLimit { .. } => Self::OutOfMemory(text),
            Of::Lost { .. } => Self::Lost(text),
            Of::Deadline { .. } | Of::DeadlineExceeded { .. } => Self::Deadline(text),
            _ => Self::Device(text),
        }
    }
}

impl From<CompileError> for Error {
    fn from(error: CompileError) -> Self {
        match error {
            CompileError::Artifact(error) => error.into(),
            other => Self::Device(other.to_string()),
        }
    }
}

impl From<vm_ir::builder::BuildError> for Error {
    fn from(error: vm_ir::builder::BuildError) -> Self {
        Self::Device(error.to_string())
    }
}
