//! AMD GPUs, as the Linux kernel's compute driver (KFD, in `amdgpu`) lists them.
//!
//! This crate finds the GPUs that ROCm would run kernels on and says what they are: architecture, PCI address, compute
//! units, memory, device nodes. It needs no ROCm, only sysfs.
//!
//! [`assemble`] makes code objects of LLVM IR, which needs LLVM, no GPU.
//!
//! It does not run kernels yet: [`RocmDevice::open`] says so. Until it does, an AMD GPU can be passed whole to a guest,
//! and a kernel can run on the CPU.
//!
//! ```
//! use vm_rocm::{Roots, devices};
//!
//! match devices(&Roots::system()) {
//!     Ok(devices) => devices.iter().for_each(|device| println!("{device}")),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```

pub mod assemble;
mod device;
mod error;
mod topology;

pub use device::{RocmAccelerator, RocmDevice, Roots};
pub use error::RocmError;
pub use topology::devices;
