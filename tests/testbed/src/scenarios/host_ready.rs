//! The testbed itself: L1 has what every other scenario stands on.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::agent::{Function, L1};
use crate::scenario::{Contents, Scenario, Variant, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "host-ready",
    about: "L1 has KVM, an IOMMU and the VFIO back end of its variant; a device behind a root port has its own group",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 512,
    deadline: Duration::from_secs(1800),
    contents: Contents::NONE,
    l1,
    l2: None,
};

fn l1(l1: &mut L1) -> Result<()> {
    for node in ["/dev/kvm", "/dev/vfio/vfio"] {
        l1.prove(Path::new(node).exists(), format!("{node} is there"))?;
    }
    let iommufd = l1.variant == Variant::Iommufd;
    l1.prove(Path::new("/dev/iommu").exists() == iommufd, format!("/dev/iommu is there: {iommufd}"))?;
    let edu = Function::find(0x1234, 0x11e8)?;
    l1.prove(edu.group().is_some(), format!("{} is in an IOMMU group", edu.address))?;
    Ok(())
}
