//! NPUs, and whatever else is in the Linux kernel's accel subsystem (`SYS/class/accel`).
//!
//! This crate finds them and says what they are: maker, driver, PCI address, device node. It needs only sysfs.
//!
//! It does not run kernels: NPUs take whole networks, not kernels of threads. [`NpuDevice::open`] says so. An NPU that
//! is a PCI function can be passed whole to a guest, and a kernel can run on a GPU or the CPU.
//!
//! ```
//! use vm_npu::{Roots, devices};
//!
//! match devices(&Roots::system()) {
//!     Ok(devices) => devices.iter().for_each(|device| println!("{device}")),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```

mod class;
mod device;
mod error;

pub use class::devices;
pub use device::{NpuAccelerator, NpuDevice, NpuKind, Roots};
pub use error::NpuError;
