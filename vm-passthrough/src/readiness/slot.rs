//! Functions of a slot in several IOMMU groups: a claim takes those of its own group alone.

use super::removal::Spare;
use super::{BlockerCode, Case, Severity, name};
use crate::pci::{self, PciFunction, ResetMethod, Sriov};
use crate::{Host, PciAddress, files};

/// Returns the functions of a function's slot that a claim of it leaves with the host, as they are in other IOMMU groups; but for
/// those of `beside`, which are claimed along or which the guest has.
///
/// Virtual functions, and functions on a root bus, are devices of their own.
pub fn left_with_host(host: &Host, function: &PciFunction, beside: &[PciAddress]) -> Vec<PciFunction> {
    let is_apart = |function: &PciFunction| {
        function.is_bridge() || matches!(function.sriov, Some(Sriov::Virtual { .. }))
    };
    if function.iommu_group.is_none() || function.upstream.is_none() || is_apart(function) {
        return Vec::new();
    }
    let names = files::names(&host.sys.join("bus/pci/devices")).unwrap_or_default();
    let others = names.iter().filter_map(|name| name.parse::<PciAddress>().ok()).filter(|other| {
        *other != function.address && other.same_slot(function.address) && !beside.contains(other)
    });
    let mut left: Vec<_> = others
        .filter_map(|other| pci::read_function(host, other).ok())
        .filter(|other| other.iommu_group != function.iommu_group && !is_apart(other))
        .collect();
    left.sort_by_key(|other| other.address);
    left
}

pub(super) fn judge(case: &mut Case<'_>) {
    let guest = case.guest.iter().map(|function| function.address);
    let beside: Vec<_> = guest.chain(case.options.beside.iter().copied()).collect();
    let left = left_with_host(case.host, &case.function, &beside);
    // Functions of one class are ports of one card, and work each for itself.
    let is_companion = |other: &PciFunction| other.class.0 >> 8 != case.function.class.0 >> 8;
    // A reset that reaches them is a finding of its own, which names them.
    let is_told = case
        .found
        .iter()
        .any(|found| (found.code, found.severity) == (BlockerCode::NoReset, Severity::Blocker));
    let Some(group) = case.function.iommu_group.filter(|_| left.iter().any(is_companion) && !is_told) else {
        return;
    };
    let address = case.function.address;
    let mut shown = Vec::new();
    for other in &left {
        let driver = other.driver.as_deref().unwrap_or("none");
        let of = other.iommu_group.map_or_else(|| "none".into(), |group| group.to_string());
        shown.push(format!("{} ({}, driver {driver}, IOMMU group {of})", other.address, name(other)));
    }
    let addresses: Vec<_> = left.iter().map(|other| other.address.to_string()).collect();
    let addresses = addresses.join(", ");
    let alone = |method: &&ResetMethod| !matches!(method, ResetMethod::Bus | ResetMethod::CxlBus);
    let reset = match case.function.resets.iter().find(alone) {
        Some(method) => format!("by {method} alone, as a reset of the bus would also reset {addresses}"),
        None => format!("only along with {addresses}"),
    };
    let pass = match Spare::functions(case, &left) {
        Ok(spare) => spare.name_too(address),
        Err(why) => why,
    };
    case.add(
        BlockerCode::SlotDivided,
        Severity::Warning,
        address,
        format!("a claim of {address}, in IOMMU group {group}, leaves {} with the host", shown.join(", ")),
        format!(
            "nothing, if it works without them: it is reset {reset}, and it stays powered while the host uses them; {pass}"
        ),
    );
}
