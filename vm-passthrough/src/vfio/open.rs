//! Chooses a back end and opens an address space and devices in it.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use super::device::VfioDevice;
use super::interface::{Backend, Result, VfioError};
use super::iommufd::device_node;
use super::reset;
use super::space::Space;
use super::token::VfToken;
use crate::iommu::is_vfio_driver;
use crate::{Host, PciAddress};

/// The back end that can open all of `functions`, which are claimed: iommufd where the Linux kernel has it and gives
/// every one of them a node of its own, the group back end elsewhere.
///
/// With no functions it is iommufd where `/dev/iommu` is and `/dev/vfio/vfio` is not, or where some function has a
/// node of its own.
///
/// # Errors
/// [`VfioError::Unavailable`] for the first function that is not bound to a VFIO driver, or when the host has neither
/// back end.
pub fn choose_backend(host: &Host, functions: &[PciAddress]) -> Result<Backend> {
    for &address in functions {
        check_bound(host, address)?;
    }
    let group = host.dev.join("vfio/vfio").exists();
    let iommufd = host.dev.join("iommu").exists()
        && match functions {
            [] => !group || has_entries(&host.dev.join("vfio/devices")),
            all => all.iter().all(|&address| device_node(host, address).is_some()),
        };
    match (iommufd, group, functions.first()) {
        (true, _, _) => Ok(Backend::Iommufd),
        (false, true, _) => Ok(Backend::Group),
        (false, false, Some(&address)) => Err(VfioError::Unavailable {
            address,
            reason: format!(
                "there is neither {dev}/vfio/vfio nor {dev}/iommu with a node for the function; load the modules \
                 vfio-pci and vfio_iommu_type1 (or iommufd), and pass the nodes into the container if this is one",
                dev = host.dev.display()
            ),
        }),
        (false, false, None) => Ok(Backend::Group),
    }
}

/// Opens a DMA address space for the devices of one guest. `functions` are those that it is known to get; others may
/// join later. `backend` forces a back end.
///
/// # Errors
/// As for [`choose_backend`], and when the Linux kernel refuses.
pub fn open_space(host: &Host, functions: &[PciAddress], backend: Option<Backend>) -> Result<Arc<Space>> {
    let backend = match backend {
        Some(backend) => backend,
        None => choose_backend(host, functions)?,
    };
    Space::open(host, backend).map(Arc::new)
}

/// Opens a claimed function in an address space, powered up, as [`Claimed::open`](crate::manager::Claimed::open) tells. What
/// holds its claim is dropped once it is closed.
///
/// # Errors
/// As there.
pub(crate) fn open_device(
    host: &Host,
    address: PciAddress,
    space: &Arc<Space>,
    token: Option<&VfToken>,
    claim: Arc<dyn Any + Send + Sync>,
) -> Result<Arc<VfioDevice>> {
    check_bound(host, address)?;
    let group = iommu_group(host, address)?;
    let ((file, member), reset) =
        reset::watch_open(host, address, || space.join(host, address, group, token))?;
    VfioDevice::open(host, address, file, member, reset, claim).map(Arc::new)
}

/// The number of a function's IOMMU group.
fn iommu_group(host: &Host, address: PciAddress) -> Result<u32> {
    let link = std::fs::read_link(host.pci_device(address).join("iommu_group")).ok();
    let number = link.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()?.parse().ok());
    number.ok_or_else(|| VfioError::Unavailable {
        address,
        reason: "it is in no IOMMU group, so nothing would keep it from all of the host's memory; turn on the IOMMU in \
                 the firmware (VT-d, AMD-Vi) and on the Linux kernel's command line (intel_iommu=on)"
            .into(),
    })
}

fn check_bound(host: &Host, address: PciAddress) -> Result<()> {
    let directory = host.pci_device(address);
    let unavailable = |reason: String| Err(VfioError::Unavailable { address, reason });
    if !directory.exists() {
        return unavailable("there is no such function; list those that there are".into());
    }
    let driver = std::fs::read_link(directory.join("driver")).ok();
    match driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) {
        Some(name) if is_vfio_driver(name) => Ok(()),
        Some(name) => unavailable(format!("the driver {name} has it; claim it first")),
        None => unavailable("no driver has it; claim it first, which binds vfio-pci".into()),
    }
}

fn has_entries(directory: &Path) -> bool {
    std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests;
