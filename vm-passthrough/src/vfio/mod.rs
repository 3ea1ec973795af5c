//! A PCI function as Linux VFIO hands it out.
//!
//! Two back ends do the same work behind one interface: iommufd with the device's own character device where
//! the Linux kernel has them, group and container elsewhere. All system calls are in [`sys`].

mod interface;

pub use interface::{
    AddressSpace, Backend, DeviceFile, DeviceInfo, DmaPermission, IovaRange, IrqInfo, IrqTrigger, Mapping,
    RegionInfo, Result, VfioError,
};
