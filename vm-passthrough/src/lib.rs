//! Gives the host's PCI devices to virtual machines on Linux.
//!
//! A device's way from the host to a guest, and the module that owns each step:
//!
//! ```text
//! sysfs ─▶ pci (scan) ─▶ readiness (explain) ─▶ claim ─▶ vfio ─▶ guest (attach)
//! ```
//!
//! Each module uses only those before it, as docs/architecture.md has them in order.
//!
//! * [`pci`] finds every PCI function and says what it is.
//! * [`iommu`] knows the isolation groups and what may reach what.
//! * [`readiness`] lists every reason why a function cannot be passed through, each with its remedy.
//! * [`ledger`] is what is claimed and shared, on disk.
//! * [`claim`] takes a function and its companions from their drivers, and returns them, also after a crash.
//! * [`egpu`] connects GPUs in USB4 and Thunderbolt enclosures, watches and recovers them, and disconnects them safely.
//! * [`vfio`] is the device as the Linux kernel exposes it: regions, interrupts, DMA, reset.
//! * [`gpu`] tells which chip a GPU is, reaches its registers and brings it up.
//! * [`guest`] is the device as a guest sees it: virtual config space, BARs, MSI-X; and [`guest::Vmm`], the
//!   small trait that a VMM implements. The cargo feature `kvm` brings an implementation for VMMs that are built on kvm-ioctls
//!   and vm-memory.
//! * [`manager`] ties them together as [`PassthroughManager`].
//! * [`telemetry`] is what a GPU tells of itself while it runs, and [`tuning`] sets its clocks, power limit and fans.
//! * `accelerator`, behind the cargo features `cpu`, `cuda`, `rocm`, `npu`, `gpu` and `all-accelerators`, is the other way: a
//!   device that stays with the host and runs kernels for many.
//!
//! What this crate does not know: JSON, HTTP, the command line, and any path that was not given to it (every
//! root, `/sys`, `/dev`, `/proc`, the state directory, is in [`Host`]).

#![warn(unnameable_types)]

mod blocks;
pub mod claim;
pub mod deadlines;
pub mod egpu;
mod error;
mod files;
pub mod gpu;
pub mod guest;
pub mod host;
pub mod iommu;
pub mod ledger;
pub mod manager;
pub mod numa;
pub mod pci;
pub mod readiness;
#[cfg(feature = "sim")]
pub mod sim;
pub mod telemetry;
pub mod tuning;
pub mod usb4;
pub mod vfio;

pub use error::Error;
pub use guest::PassthroughDevice;
pub use host::Host;
pub use manager::PassthroughManager;
pub use pci::{DeviceType, PciAddress, PciFunction};
#[cfg(feature = "accelerator")]
pub use vm_runtime as accelerator;
#[cfg(feature = "npu")]
pub use vm_runtime::NpuAccelerator;
#[cfg(feature = "cpu")]
pub use vm_runtime::{CpuAccelerator, CpuJITCompiler};
#[cfg(feature = "cuda")]
pub use vm_runtime::{CudaAccelerator, CudaJITCompiler};
#[cfg(feature = "accelerator")]
pub use vm_runtime::{GuestAddr, IRBlock};
#[cfg(feature = "rocm")]
pub use vm_runtime::{RocmAccelerator, RocmJITCompiler};

/// The documents' snippets, compiled with the doc tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    mod readme {}
    #[doc = include_str!("../../docs/embedding.md")]
    mod embedding {}
}
