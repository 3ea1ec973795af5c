//! PCI functions of the host: their addresses, what they are, and what sysfs says of them.

mod address;
mod function;

pub use address::{ParsePciAddressError, PciAddress};
pub use function::{
    Bar, BarKind, Capability, DeviceType, ExtendedCapability, Link, PciClass, PciFunction, PciIds,
    PowerState, ResetMethod, Rom, Sriov,
};
