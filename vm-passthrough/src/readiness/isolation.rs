//! Whether the IOMMU keeps the function to its guest.

use super::facts::CpuVendor;
use super::{BlockerCode, Case, Severity, name};
use crate::files;
use crate::iommu::{self, InterruptRemapping, ReservedKind, in_the_way};

pub(super) fn judge(case: &mut Case<'_>) {
    if case.group.as_ref().is_none_or(|group| group.noiommu) {
        // Without an IOMMU nothing else here has a meaning.
        no_iommu(case);
        return;
    }
    group(case);
    interrupts(case);
    firmware_memory(case);
}

fn no_iommu(case: &mut Case<'_>) {
    let switch = match case.facts.vendor {
        CpuVendor::Other if case.facts.is_virtual => {
            "this host is a virtual machine: give it an IOMMU (QEMU: -machine virt,iommu=smmuv3)"
        }
        // A guest on a processor of AMD's takes Intel's, too.
        _ if case.facts.is_virtual => {
            "this host is a virtual machine: give it an IOMMU (QEMU: -machine q35,kernel-irqchip=split -device \
             intel-iommu,intremap=on,caching-mode=on; libvirt: <iommu model='intel'>) and boot Linux in it with intel_iommu=on"
        }
        CpuVendor::Intel => "enable VT-d in the firmware setup and boot Linux with intel_iommu=on",
        CpuVendor::Amd => {
            "enable the IOMMU (AMD-Vi) in the firmware setup and boot Linux without amd_iommu=off"
        }
        CpuVendor::Other => "enable the IOMMU (SMMU) in the firmware setup and in the Linux kernel",
    };
    let sys = case.host.sys.display();
    let group = case.host.pci_device(case.function.address).join("iommu_group");
    let (evidence, remedy) = if case.group.is_some() {
        (
            format!("the group that {} names is VFIO's own, made without an IOMMU", group.display()),
            format!("{switch}, and set vfio's enable_unsafe_noiommu_mode to N"),
        )
    } else if iommu::is_present(case.host) {
        (
            format!("{} is missing, though the host has an IOMMU", group.display()),
            case.remedy(
                "check that the IOMMU covers this slot (in the firmware setup, and DMAR: or AMD-Vi: in dmesg), or use another \
                 slot",
                "put it behind the IOMMU of the virtual machine that this host is (QEMU: on a bus without bypass_iommu=on; \
                 DMAR: in dmesg)",
            )
            .into(),
        )
    } else {
        (
            format!(
                "{} is missing, {sys}/class/iommu and {sys}/kernel/iommu_groups are empty",
                group.display()
            ),
            switch.into(),
        )
    };
    case.blocker(BlockerCode::NoIommu, evidence, remedy);
}

fn group(case: &mut Case<'_>) {
    let Some(group) = &case.group else { return };
    let number = group.number;
    let dir = case.host.sys.join("kernel/iommu_groups").join(number.to_string()).join("devices");
    let target = case.function.address;
    let with_group = case.options.with_group;
    let neighbours: Vec<_> = case
        .others
        .iter()
        .filter(|other| !case.is_taken(other) && !other.is_bridge())
        .map(|other| other.address)
        .collect();
    let others = group.others.iter().map(String::as_str);
    let strangers = iommu::occupants(case.host, group, others).into_iter().map(|other| {
        let iommu::Occupant { name, driver, unbind } = other;
        let evidence = format!(
            "{name}, which is no PCI function, is in group {number} too, by {}, and has driver {driver}",
            dir.display()
        );
        (evidence, format!("take {name} from its driver: echo {name} > {}", unbind.display()))
    });
    let blockers: Vec<_> = case
        .others
        .iter()
        .filter_map(|other| in_the_way(other, target, with_group))
        .map(|other| {
            let (address, driver) = (other.function.address, other.driver);
            let evidence = format!(
                "{address} ({}, driver {driver}) is in group {number} too, by {}",
                name(other.function),
                dir.display()
            );
            let unbind = format!(
                "take {address} from its driver: echo {address} > {}/bus/pci/drivers/{driver}/unbind",
                case.host.sys.display()
            );
            let remedy = match (other.with_group_helps, other.function.is_bridge()) {
                (true, false) => format!("give the whole group away (--with-group), or {unbind}"),
                // Nothing behind it needs the driver while a guest has it.
                (true, true) => format!(
                    "give the whole group away (--with-group), which takes the bridge from {driver} until it is given \
                     back, or {unbind} (the slots behind it can't be hot-plugged meanwhile)"
                ),
                (false, _) => unbind,
            };
            (evidence, remedy)
        })
        .chain(strangers)
        .collect();
    let viable = blockers.is_empty();
    for (evidence, remedy) in blockers {
        case.blocker(BlockerCode::GroupNotViable, evidence, remedy);
    }
    if neighbours.is_empty() {
        return;
    }
    for fault in iommu::isolation_breaks(case.host, &case.function) {
        let severity = if viable { Severity::Warning } else { Severity::Blocker };
        let neighbours: Vec<_> = neighbours.iter().map(ToString::to_string).collect();
        case.add(
            BlockerCode::AcsMissing,
            severity,
            case.function.address,
            format!(
                "port {} above it {}, so Linux put {} into its group {number}",
                fault.port,
                fault.fault,
                neighbours.join(", ")
            ),
            format!(
                "{}; else give the group away as a whole (--with-group)",
                case.remedy(
                    "enable ACS for the port in the firmware setup, or move the card to a slot of another root port",
                    "put it behind a port of its own in the virtual machine that this host is (QEMU: -device \
                     pcie-root-port)"
                )
            ),
        );
    }
}

fn interrupts(case: &mut Case<'_>) {
    let InterruptRemapping::Off { evidence } = iommu::interrupt_remapping(case.host) else { return };
    let allowed = ["vfio_iommu_type1", "iommufd"].into_iter().find(|module| {
        let parameter = format!("module/{module}/parameters/allow_unsafe_interrupts");
        files::read_trimmed(&case.host.sys.join(parameter)).is_some_and(|value| value == "Y")
    });
    let firmware = match case.facts.vendor {
        _ if case.facts.is_virtual => {
            "have the IOMMU of the virtual machine that this host is remap interrupts (QEMU: -machine \
             kernel-irqchip=split -device intel-iommu,intremap=on) and boot without intremap=off"
        }
        CpuVendor::Intel => {
            "enable VT-d interrupt remapping in the firmware setup and boot without intremap=off"
        }
        _ => "enable interrupt remapping in the firmware setup and boot without intremap=off",
    };
    let address = case.function.address;
    match allowed {
        // The administrator accepted it.
        Some(module) => case.add(
            BlockerCode::InterruptRemappingOff,
            Severity::Warning,
            address,
            format!("{evidence}; allow_unsafe_interrupts of {module} lets VFIO go on all the same"),
            format!("{firmware}; until then give it to trusted guests only"),
        ),
        None => case.blocker(
            BlockerCode::InterruptRemappingOff,
            evidence,
            format!(
                "{firmware}; for trusted guests only, accept it: echo Y > \
                 {}/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
                case.host.sys.display()
            ),
        ),
    }
}

fn firmware_memory(case: &mut Case<'_>) {
    let Some(group) = &case.group else { return };
    let direct: Vec<_> = group
        .reserved
        .iter()
        .filter(|region| region.kind == ReservedKind::Direct)
        .map(|region| format!("{:#x}-{:#x}", region.range.start(), region.range.end()))
        .collect();
    if direct.is_empty() {
        return;
    }
    let path = case.host.sys.join(format!("kernel/iommu_groups/{}/reserved_regions", group.number));
    case.blocker(
        BlockerCode::FirmwareMemory,
        format!("{} has {} as direct (RMRR or IVMD), which Linux won't take from the firmware", path.display(), direct.join(", ")),
        case.remedy(
            "switch off what uses it in the firmware setup (shared memory of HP and Dell management controllers, RMRR for \
             this slot, legacy USB), or use another slot",
            "give the virtual machine that this host is the device without memory reserved for it, or pass another device",
        ),
    );
}
