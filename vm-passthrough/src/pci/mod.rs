//! PCI functions of the host: their addresses, what they are, and what sysfs says of them.

mod address;
mod attributes;
pub mod config;
mod function;
mod kind;
pub mod regs;
mod scan;
mod text;

pub use address::{ParsePciAddressError, PciAddress};
pub use function::{
    Bar, BarKind, Capability, DeviceType, ExtendedCapability, Link, PciClass, PciFunction, PciIds,
    PowerState, ResetMethod, Rom, Sriov,
};
pub use scan::{ScanError, driver_override, read_config, read_function, scan};
