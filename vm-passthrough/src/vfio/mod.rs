//! A PCI function as Linux VFIO exposes it.
//!
//! Two back ends do the same work behind one interface: iommufd with the device's own character device where
//! the Linux kernel has them, group and container elsewhere. All system calls are in [`sys`].
//!
//! ```no_run
//! use vm_passthrough::vfio::{self, AddressSpace as _, DeviceFile as _, DmaPermission, HostMemory};
//! use vm_passthrough::PassthroughManager;
//! use vm_passthrough::claim::ClaimOptions;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut manager = PassthroughManager::new()?;
//! let claimed = manager.claim("0000:65:00.0".parse()?, &ClaimOptions::default())?;
//! let space = vfio::open_space(manager.host(), &[claimed.address()], None)?;
//! let device = claimed.open(&space)?;
//! space.map(0x10_0000, std::sync::Arc::new(HostMemory::new(4096)?), DmaPermission::ReadWrite)?;
//! let mut id = [0; 4];
//! device.read(vfio::CONFIG_REGION, 0, &mut id)?;
//! device.close()?;
//! space.close()?;
//! manager.close()?;
//! # Ok(())
//! # }
//! ```

mod device;
pub(crate) mod dma;
mod errors;
mod failure;
mod group;
mod interface;
mod iommufd;
mod keeper;
mod open;
mod open_devices;
mod parse;
mod power;
mod reset;
mod space;
mod sys;
mod token;

pub use device::{Presence, VfioDevice};
pub use errors::{ErrorSeverity, UncorrectableError};
pub(crate) use failure::check_vectors;
pub use interface::{
    AddressSpace, Backend, DeviceFile, DeviceInfo, DmaPermission, IrqInfo, IrqTrigger, Mapping, RegionInfo,
    ResetEvidence, ResetReport, ResetStep, Result, VfioError,
};
pub use keeper::{DeviceParts, Keeper};
pub(crate) use open::open_device;
pub use open::{choose_backend, open_space};
pub use space::{Space, SpaceParts};
pub use sys::{HostMemory, load_u32, store_u32};
pub use token::{ParseVfTokenError, VfToken};
pub use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX as CONFIG_REGION, VFIO_PCI_ERR_IRQ_INDEX as ERR_IRQ,
    VFIO_PCI_INTX_IRQ_INDEX as INTX_IRQ, VFIO_PCI_MSI_IRQ_INDEX as MSI_IRQ,
    VFIO_PCI_MSIX_IRQ_INDEX as MSIX_IRQ, VFIO_PCI_REQ_IRQ_INDEX as REQ_IRQ,
    VFIO_PCI_ROM_REGION_INDEX as ROM_REGION,
};

#[cfg(test)]
mod tests;
