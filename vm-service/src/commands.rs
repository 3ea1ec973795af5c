//! What the commands do, one file each.

pub(crate) mod info;
pub(crate) mod list;
pub(crate) mod run;

use vm_passthrough::{Host, PciAddress, PciFunction, pci};

use crate::cli::Failure;

/// The host's functions, as found by one scan.
struct Scan {
    functions: Vec<PciFunction>,
}

impl Scan {
    fn of(host: &Host) -> Result<Self, Failure> {
        pci::scan(host).map(|functions| Self { functions }).map_err(Failure::failed)
    }

    fn functions(&self) -> &[PciFunction] {
        &self.functions
    }

    fn function(&self, address: PciAddress) -> Result<&PciFunction, Failure> {
        self.functions.iter().find(|function| function.address == address).ok_or_else(|| {
            Failure::failed(format_args!(
                "there is no PCI function {address} on this host; `vm-service list --all` shows those that there are"
            ))
        })
    }

    /// The other functions of a function's IOMMU group.
    fn companions<'a>(&'a self, of: &'a PciFunction) -> impl Iterator<Item = &'a PciFunction> {
        self.functions.iter().filter(|function| {
            of.iommu_group.is_some()
                && function.iommu_group == of.iommu_group
                && function.address != of.address
        })
    }
}
