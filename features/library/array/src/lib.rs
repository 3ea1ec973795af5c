//! Arrays on an accelerator: functions of elements, reductions, views, and the kernel library, with shapes and types checked at the call.
//!
//! ```
//! use vm_array::{Array, Binary, DType, Device, Number, Reduction};
//!
//! # fn main() -> vm_array::Result<()> {
//! // `auto` takes a GPU where there is one, `cpu` always is there.
//! let device = Device::open("cpu")?;
//! let x = Array::arange(&device, DType::Float32, Number::Float(0.0), Number::Float(1.0), 6)?.reshape(&[2, 3])?;
//! let two = Array::full(&device, DType::Float32, &[], Number::Int(2))?;
//!
//! // Nothing runs yet: both functions and the sum become one kernel.
//! let sums = x.binary(Binary::Multiply, &two)?.reduce(Reduction::Sum, Some(&[1]), false, None)?;
//! let bytes = sums.to_bytes()?;
//! let numbers: Vec<f32> = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
//! assert_eq!(numbers, [6.0, 24.0]);
//!
//! // What does not fit is an error that says so.
//! let error = x.matmul(&x).unwrap_err();
//! assert_eq!(error.to_string(), "matmul: [2, 3] and [2, 3]: 3 columns are multiplied with 2 rows");
//! # Ok(())
//! # }
//! ```
//!
//! An [`Array`] is a value. A view shares memory with what it is of, and no operation writes to memory that an array has: what it gives is
//! another array. Functions of elements ([`Unary`], [`Binary`]) and reductions ([`Reduction`]) are computed when a value is needed, or by
//! [`Array::evaluate`], as one kernel for each shape class, which is compiled once and kept. Products, softmax, norms and attention are functions of
//! the kernel library; [`call`] runs any other of it, [`call_by_name`] those that C has. Sorts, scans, scatters and searches have kernels of their own, decompositions and Fourier
//! transforms are computed by the host's processor.
//!
//! Work of a [`Device`] runs in the order in which it was given, by its worker ([`Device::worker`]); methods may be called by any thread.
//! Kernels have checked accesses, as those of a guest.

mod array;
mod device;
mod dtype;
mod emit;
mod error;
mod evaluate;
mod fft;
#[cfg(all(test, feature = "cpu"))]
mod forms;
mod host;
mod launch;
mod layout;
mod library;
mod linalg;
mod named;
mod node;
mod op;
mod own;
mod pinned;
mod product;
mod program;
mod progress;
mod random;
mod shape;
mod share;
pub mod sys;

pub use array::Number;
pub use device::{Device, STREAMS, TIMEOUT};
pub use dtype::{DType, Kind};
pub use error::{Error, Fault, Result};
pub use launch::{Given, Kernel};
pub use layout::Shape;
pub use library::{call, call_with};
pub use named::{Passed, call_by_name};
pub use node::Array;
pub use op::{Binary, Reduction, Unary};
pub use progress::{Report, report_compilation};
pub use random::Generator;
pub use shape::Slice;
pub use share::{Place, Shared};
pub use sys::Pinned;
pub use vm_runtime::AnyAccelerator as Accelerator;

/// A chapter of the course, whose programs run with the doc tests.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../../../../docs/course/4-rust.md")]
mod course {}
