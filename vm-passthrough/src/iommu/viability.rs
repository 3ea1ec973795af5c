//! What becomes of the other functions of an IOMMU group when one of them is claimed, and which of them keep VFIO from
//! using the group. It is decided here alone: for `explain`, for plans and so for claims, and for errors of VFIO.
//!
//! Linux gives a group to user space only while no driver in it uses DMA through the Linux kernel's own mappings
//! (`iommu_group_claim_dma_owner`). It takes that of every bound driver, a bridge's too, unless the driver says
//! otherwise of itself (`driver_managed_dma`, since Linux 5.19).

use std::path::PathBuf;

use super::{IommuGroup, group_dir};
use crate::pci::PciFunction;
use crate::{Host, PciAddress, files};

/// The VFIO driver of any function.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// Whether a driver gives functions to user space through VFIO: vfio-pci, or a variant of it for one kind of device
/// such as `mlx5_vfio_pci`.
pub fn is_vfio_driver(driver: &str) -> bool {
    let is_variant = driver.ends_with("_vfio_pci") || driver.ends_with("-vfio-pci");
    // A driver's name is that of a directory.
    driver == VFIO_DRIVER || is_variant && !driver.contains('/')
}

/// Whether a driver leaves DMA alone: one with `driver_managed_dma`. Those of PCI are the VFIO drivers, pci-stub, and the
/// driver of PCI Express ports.
fn leaves_dma_alone(driver: &str) -> bool {
    is_vfio_driver(driver) || matches!(driver, "pci-stub" | "pcieport")
}

/// Whether a bridge works without this driver: it only serves the hot-plug slots behind it.
fn only_serves_slots(driver: &str) -> bool {
    driver == "shpchp"
}

/// What becomes of a function when one of its group, or itself, is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It is taken too: a function of the same slot, or any when the whole group is asked for.
    Taken,
    /// A bridge that is taken from its driver and left without one, for the group to be viable.
    Parked,
    /// It stays as it is, and the group is viable with it.
    Stays,
    /// It stays as it is, and with its driver the group is not viable.
    InTheWay,
}

impl Part {
    /// The part of `other` in a claim of `target`.
    pub(crate) fn of(other: &PciFunction, target: &PciFunction, with_group: bool) -> Self {
        if target.controller == Some(other.address) {
            // The target vanishes when its controller's driver is unbound.
            return Self::InTheWay;
        }
        if other.controller.is_some_and(|controller| with_group || controller == target.address) {
            // It vanishes when its controller is claimed.
            return Self::Stays;
        }
        if !other.is_bridge() && (with_group || other.address.same_slot(target.address)) {
            return Self::Taken;
        }
        match other.driver.as_deref() {
            None => Self::Stays,
            Some(driver) if leaves_dma_alone(driver) => Self::Stays,
            Some(driver) if with_group && other.header_type != 0 && only_serves_slots(driver) => Self::Parked,
            Some(_) => Self::InTheWay,
        }
    }
}

/// A function that keeps a group from being used.
#[derive(Debug)]
pub(crate) struct InTheWay<'a> {
    pub(crate) function: &'a PciFunction,
    /// The driver that has it.
    pub(crate) driver: &'a str,
    /// Whether it is out of the way when the whole group is claimed.
    pub(crate) with_group_helps: bool,
}

/// `other`, if it keeps a claim of `target` from being used.
pub(crate) fn in_the_way<'a>(
    other: &'a PciFunction,
    target: &PciFunction,
    with_group: bool,
) -> Option<InTheWay<'a>> {
    if Part::of(other, target, with_group) != Part::InTheWay {
        return None;
    }
    let with_group_helps = Part::of(other, target, true) != Part::InTheWay;
    Some(InTheWay { function: other, driver: other.driver.as_deref()?, with_group_helps })
}

/// A member of a group, PCI function or not, whose driver keeps the group from being used.
#[derive(Debug)]
pub(crate) struct Occupant {
    /// What sysfs calls it.
    pub(crate) name: String,
    /// The driver that has it.
    pub(crate) driver: String,
    /// What takes it from its driver, by a write of its name.
    pub(crate) unbind: PathBuf,
}

/// Those of `members`, by the names of their directories in the group, that keep it from being used.
pub(crate) fn occupants<'a>(
    host: &Host,
    group: &IommuGroup,
    members: impl IntoIterator<Item = &'a str>,
) -> Vec<Occupant> {
    let occupant = |name: &str| {
        let link = group_dir(host, group.number).join("devices").join(name).join("driver");
        // Of other buses than PCI, these leave DMA alone.
        let stays = |driver: &str| match name.parse::<PciAddress>() {
            Ok(_) => leaves_dma_alone(driver),
            Err(_) => driver.starts_with("vfio-") || driver == "simple-pm-bus",
        };
        let driver = files::link_name(&link).filter(|driver| !stays(driver))?;
        let unbind = link.canonicalize().unwrap_or(link).join("unbind");
        Some(Occupant { name: name.to_owned(), driver, unbind })
    };
    members.into_iter().filter_map(occupant).collect()
}
