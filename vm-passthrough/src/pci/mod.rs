//! PCI functions of the host: their addresses, what they are, and what sysfs says of them.

mod address;
mod attributes;
pub mod config;
mod division;
mod function;
mod health;
mod kind;
pub mod placement;
pub mod regs;
mod rom;
mod scan;
mod slot;
mod text;

use std::path::PathBuf;

use crate::Host;

pub use address::{Meaning, ParsePciAddressError, PciAddress};
pub(crate) use division::nvidia_minor;
pub use division::{Part, PartKind, PartType, has_vendor_vgpu, mdev_types, parts, vgpu_types};
pub use function::{
    Bar, BarKind, Capability, DeviceType, ExtendedCapability, Link, PciClass, PciFunction, PciIds,
    PowerState, ResetMethod, ResizableBar, Rom, Sriov,
};
pub use health::{AerCount, AerCounters, DeviceHealth, Interrupts, LinkHealth, health, interrupts};
pub(crate) use health::{aer_counters, link};
pub use rom::{MAX_ROM, RomError, RomImage};
pub use scan::{
    ScanError, driver_override, read_attributes, read_config, read_function, scan, scan_attributes,
    virtual_functions,
};
pub(crate) use scan::{
    bar_size, bars, bridge_windows, config_state, is_virtual, lost_bar, physical_function,
};
pub use slot::slot_power;

impl Host {
    /// The directory of a PCI function in sysfs, `SYS/bus/pci/devices/ADDRESS`.
    pub fn pci_device(&self, address: PciAddress) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }
}
