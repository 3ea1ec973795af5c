//! Arrays on an accelerator.
#![doc = ""]

mod array;
mod device;
mod dtype;
mod emit;
mod error;
mod evaluate;
mod launch;
mod layout;
mod library;
mod node;
mod op;
mod own;
mod program;
mod progress;
mod random;
mod shape;

pub use array::Number;
pub use device::{Device, TIMEOUT};
pub use dtype::{DType, Kind};
pub use error::{Error, Fault, Result};
pub use launch::{Given, Kernel};
pub use layout::Shape;
pub use library::call;
pub use node::Array;
pub use op::{Binary, Reduction, Unary};
pub use progress::{Report, report_compilation};
pub use random::Generator;
pub use shape::Slice;
pub use vm_runtime::AnyAccelerator as Accelerator;
