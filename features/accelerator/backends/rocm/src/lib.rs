//! AMD GPUs by ROCm's HIP, as an accelerator.
//!
//! [`devices`] lists the GPUs that the Linux kernel's compute driver (KFD, in `amdgpu`) has, with architecture, PCI address, compute
//! units, memory and device nodes; it needs no ROCm. To run kernels there are three layers: [`sys`] is HIP's functions as they are,
//! found when the program runs; `result` owns its objects and turns its status into errors; [`RocmAccelerator`] and [`RocmQueue`]
//! are what [`vm_accel`] asks for. Building needs no ROCm; running needs HIP's `libamdhip64`, 5.2 to 7, and where it is missing or
//! finds no device the error says what to do. [`assemble`] makes code objects of LLVM IR, which needs LLVM, no GPU. [`health`] is what the driver tells of a device.
//!
//! ```
//! use vm_rocm::{Roots, devices};
//!
//! match devices(&Roots::system()) {
//!     Ok(devices) => devices.iter().for_each(|device| println!("{device}")),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```
//!
//! # Where it has run
//! On [the fake](crate#the-fake) alone: no AMD GPU was there to run it on. What is known of HIP is from its manual, from the header and
//! the library of 5.2.3, which was loaded without a card, and from the attributes and constants in the header of 7.
//!
//! # The fake
//! With the feature `fake` there is a HIP of this crate's own, which runs the kernels that a code object was compiled from on the
//! host's processor, and notes each wrong use: what is freed twice, or while a command uses it; what is reached beyond its
//! allocation; a block of parameters of another size; what is used after it was ended. [`RocmAccelerator`] passes the conformance
//! suite on it.
//!
//! # Memory
//! It is freed once the stream's commands so far have run, which is waited for with a deadline, and then by `hipFree`, which waits for all
//! of the device. HIP's stream-ordered allocator is not used: it came with 5.2 and was not dependable at first, and the pool of
//! [`vm_accel`] allocates seldom.
//!
//! # A fault on the device
//! ROCm ends the process on most faults of a kernel (`Memory access fault by GPU node`), so that there is nobody to tell of it. So each
//! guest's GPU work belongs in a process of its own.

mod accelerator;
mod access;
pub mod assemble;
mod descriptor;
mod device;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
pub mod health;
mod queue;
mod result;
pub mod sys;
mod topology;

pub use accelerator::{RocmAccelerator, device_count};
pub use device::{RocmDevice, Roots};
pub use error::RocmError;
pub use queue::{RocmEvent, RocmGraph, RocmKernel, RocmQueue};
pub use topology::devices;
