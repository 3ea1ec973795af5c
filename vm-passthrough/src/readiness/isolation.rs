//! Checks of isolation: IOMMU, group, ACS, interrupt remapping and reserved memory.

use super::facts::CpuVendor;
use super::removal::Spare;
use super::{BlockerCode, Case, Seat, Severity, iommu_setup, name};
use crate::iommu::{self, InterruptRemapping, ReservedKind, in_the_way};
use crate::{PciAddress, files, pci};

pub(super) fn judge(case: &mut Case<'_>) {
    if case.group.as_ref().is_none_or(|group| group.noiommu) {
        // All other checks need an IOMMU.
        no_iommu(case);
        return;
    }
    match case.function.controller {
        Some(controller) => behind_controller(case, controller),
        None => group(case),
    }
    interrupts(case);
    firmware_memory(case);
}

fn no_iommu(case: &mut Case<'_>) {
    let switch = match case.facts.vendor {
        CpuVendor::Arm | CpuVendor::Other if case.facts.is_virtual => {
            "this host is a virtual machine: give it an IOMMU (QEMU: -machine virt,iommu=smmuv3)"
        }
        // A guest on a processor of AMD's takes Intel's, too.
        _ if case.facts.is_virtual => {
            "this host is a virtual machine: give it an IOMMU (QEMU: -machine q35,kernel-irqchip=split -device \
             intel-iommu,intremap=on,caching-mode=on; libvirt: <iommu model='intel'>) and boot Linux in it with intel_iommu=on"
        }
        _ => "",
    };
    let (why, fix) = match switch {
        "" => iommu_setup::missing(case),
        switch => (String::new(), switch.to_owned()),
    };
    let why = if why.is_empty() { why } else { format!("; {why}") };
    let sys = case.host.sys.display();
    let group = case.host.pci_device(case.function.address).join("iommu_group");
    let (evidence, remedy) = if case.group.is_some() {
        (
            format!("the group that {} names is VFIO's own, made without an IOMMU", group.display()),
            format!("{fix}, and set vfio's enable_unsafe_noiommu_mode to N"),
        )
    } else if iommu::is_present(case.host)
        && matches!(case.facts.vendor, CpuVendor::Arm | CpuVendor::Other)
        && !case.facts.is_virtual
        && !has_pci_group(case)
    {
        // These IOMMUs serve devices of the SoC, such as its video decoder.
        (
            format!("{} is missing, and no PCI function of this host is in a group", group.display()),
            "use another host, unless the processor's manual names an SMMU for PCI Express; then the firmware has to describe \
             it (IORT, or iommu-map of the device tree)"
                .into(),
        )
    } else if iommu::is_present(case.host) {
        let root = match case.facts.vendor {
            CpuVendor::Arm | CpuVendor::Other if !case.facts.is_virtual => iommu_setup::unserved(case),
            _ => None,
        };
        let (why, fix) = root.unwrap_or_default();
        let why = if why.is_empty() { why } else { format!("; {why}") };
        let check = match case.facts.vendor {
            CpuVendor::Arm | CpuVendor::Other => {
                "check that the SMMU covers it (IORT, or iommu-map of the device tree)"
            }
            _ => "check that the IOMMU covers it (in the firmware setup, and DMAR: or AMD-Vi: in dmesg)",
        };
        let physical = fix.map_or_else(|| format!("{check}, or {}", elsewhere_or(case)), Into::into);
        (
            format!("{} is missing, though the host has an IOMMU{why}", group.display()),
            case.remedy(
                &physical,
                "put it behind the IOMMU of the virtual machine that this host is (QEMU: on a bus without bypass_iommu=on; \
                 DMAR: in dmesg)",
            )
            .into(),
        )
    } else {
        (
            format!(
                "{} is missing, {sys}/class/iommu and {sys}/kernel/iommu_groups are empty{why}",
                group.display()
            ),
            fix,
        )
    };
    case.blocker(BlockerCode::NoIommu, evidence, remedy);
}

/// Whether any PCI function of the host is in an IOMMU group.
fn has_pci_group(case: &Case<'_>) -> bool {
    let functions = case.host.sys.join("bus/pci/devices");
    let names = files::names(&functions).unwrap_or_default();
    names.iter().any(|name| functions.join(name).join("iommu_group").exists())
}

/// Reports that a function cannot be isolated: the IOMMU sees its DMA as that of the controller.
fn behind_controller(case: &mut Case<'_>, controller: PciAddress) {
    let Ok(function) = pci::read_function(case.host, controller) else { return };
    let driver = function.driver.as_deref().unwrap_or("none");
    let evidence = format!(
        "it is behind {controller} ({}, driver {driver}) in PCI domain {:04x}, all of which has the controller's IOMMU group {}",
        name(&function),
        case.function.address.domain(),
        case.function.iommu_group.unwrap_or_default()
    );
    let pass = match Spare::controller(case, &function) {
        Ok(spare) => format!("or {} with all functions behind it", spare.pass()),
        Err(why) => format!("do not pass the controller, as {why}"),
    };
    case.blocker(
        BlockerCode::GroupNotViable,
        evidence,
        format!(
            "it can't be passed alone: disable the controller in the firmware setup (Intel: VMD, or RST), so that Linux finds its \
             disks without it; {pass}"
        ),
    );
}

fn group(case: &mut Case<'_>) {
    let Some(group) = &case.group else { return };
    let number = group.number;
    let dir = case.host.sys.join("kernel/iommu_groups").join(number.to_string()).join("devices");
    let elsewhere = elsewhere(case);
    let whole_group = Spare::whole_group(case);
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
        let remedy = Spare::device(case, &name).map(|spare| spare.unbind(&unbind));
        (evidence, remedy.unwrap_or_else(|why| format!("{why}; {elsewhere}")))
    });
    let blockers: Vec<_> = case
        .others
        .iter()
        .filter_map(|other| in_the_way(other, &case.function, with_group))
        .map(|other| {
            let (address, driver) = (other.function.address, other.driver);
            let evidence = format!(
                "{address} ({}, driver {driver}) is in group {number} too, by {}",
                name(other.function),
                dir.display()
            );
            let path = case.host.sys.join("bus/pci/drivers").join(driver).join("unbind");
            let unbind = Spare::functions(case, [other.function]).map(|spare| spare.unbind(&path));
            let give = whole_group.as_ref().ok().filter(|_| other.with_group_helps).map(Spare::give_group);
            let remedy = match (give, unbind) {
                // While a guest has the bridge's group, the driver is unused.
                (Some(give), Ok(unbind)) if other.function.is_bridge() => format!(
                    "{give}, which takes the bridge from {driver} until it is given back, or {unbind} (the slots behind it can't \
                     be hot-plugged meanwhile)"
                ),
                (Some(give), Ok(unbind)) => format!("{give}, or {unbind}"),
                (Some(give), Err(_)) => give.into(),
                (None, Ok(unbind)) => unbind,
                (None, Err(why)) => format!("{why}; {elsewhere}"),
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
            match &whole_group {
                Ok(spare) => format!("{elsewhere}; else {}", spare.give_group()),
                Err(why) => format!("{elsewhere}; {why}"),
            },
        );
    }
}

/// What to do with a function whose place is at fault.
fn elsewhere_or(case: &Case<'_>) -> &'static str {
    match case.seat() {
        Seat::BuiltIn => "pass another device",
        Seat::Slot => "use another slot",
        Seat::Enclosure => "connect the enclosure to another port of the host",
    }
}

/// How to get a group without the neighbours.
fn elsewhere(case: &Case<'_>) -> &'static str {
    let physical = match case.seat() {
        Seat::BuiltIn => {
            "enable ACS in the firmware setup, if it offers that, or pass a device of another group"
        }
        Seat::Slot => {
            "enable ACS for the port in the firmware setup, or move the card to a slot of another root port"
        }
        Seat::Enclosure => {
            "enable ACS for the port in the firmware setup, or connect the enclosure to another port of the host"
        }
    };
    case.remedy(
        physical,
        "put it behind a port of its own in the virtual machine that this host is (QEMU: -device pcie-root-port)",
    )
}

fn interrupts(case: &mut Case<'_>) {
    let InterruptRemapping::Off { evidence } = iommu::interrupt_remapping(case.host) else { return };
    let allowed = ["vfio_iommu_type1", "iommufd"].into_iter().find(|module| {
        let parameter = format!("module/{module}/parameters/allow_unsafe_interrupts");
        files::read_trimmed(&case.host.sys.join(parameter)).is_some_and(|value| value == "Y")
    });
    let (why, firmware) = if case.facts.is_virtual {
        let fix = "have the IOMMU of the virtual machine that this host is remap interrupts (QEMU: -machine \
                   kernel-irqchip=split -device intel-iommu,intremap=on) and boot without intremap=off";
        (String::new(), fix.to_owned())
    } else {
        iommu_setup::unremapped(case)
    };
    let evidence = if why.is_empty() { evidence } else { format!("{evidence}; {why}") };
    let address = case.function.address;
    match allowed {
        // The administrator accepted it.
        Some(module) => case.add(
            BlockerCode::InterruptRemappingOff,
            Severity::Warning,
            address,
            format!("{evidence}; allow_unsafe_interrupts of {module} overrides that"),
            format!("{firmware}; before that, give it to trusted guests only"),
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
        format!(
            "{} has {} as direct (RMRR or IVMD): the firmware needs these addresses mapped 1:1, so VFIO cannot attach the device \
             (dmesg: \"platform RMRR requirement\", since Linux 6.6 \"1:1 IOMMU mapping\")",
            path.display(),
            direct.join(", ")
        ),
        case.remedy(
            &format!(
                "switch off what uses it in the firmware setup (shared memory of HP and Dell management controllers, RMRR, \
                 legacy USB), or {}",
                elsewhere_or(case)
            ),
            "give the virtual machine that this host is the device without memory reserved for it, or pass another device",
        )
        .to_owned(),
    );
}
