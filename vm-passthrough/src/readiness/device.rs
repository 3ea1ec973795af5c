//! The state of the functions themselves: what they are, power, reset, virtual functions, BARs.

use super::removal::Spare;
use super::windows::{self, UnassignedBars};
use super::{BlockerCode, Case, Seat, Severity};
use crate::iommu::is_vfio_driver;
use crate::pci::config::{ConfigSource as _, ConfigState};
use crate::pci::{self, PciFunction, PowerState, ResetMethod, Sriov, regs};
use crate::{PciAddress, files};

pub(super) fn bridge(case: &mut Case<'_>) {
    let function = &case.function;
    let evidence =
        format!("class {:06x}, header type {} in its config space", function.class.0, function.header_type);
    let mut below = below(case);
    below.retain(|&address| Spare::addresses(case, &[address]).is_ok());
    let remedy = match Spare::addresses(case, &below) {
        Ok(spare) if !below.is_empty() => format!("{}, which the bridge leads to", spare.pass()),
        _ => "pass a function that is not a bridge".into(),
    };
    case.blocker(BlockerCode::NotAnEndpoint, evidence, remedy);
}

/// The functions right below a bridge.
fn below(case: &Case<'_>) -> Vec<PciAddress> {
    let names = files::names(&case.host.pci_device(case.function.address)).unwrap_or_default();
    names.into_iter().filter_map(|name| name.parse().ok()).collect()
}

pub(super) fn judge(case: &mut Case<'_>) {
    for function in case.taken() {
        responding(case, &function);
        power(case, &function);
        virtual_functions(case, &function);
        bars_assigned(case, &function);
        cxl(case, &function);
    }
    // Companions are reset with the function, or not at all.
    reset(case);
}

fn responding(case: &mut Case<'_>, function: &PciFunction) {
    if function.power_state == PowerState::D3Cold {
        return;
    }
    let state = match pci::config_state(case.host, function.address) {
        None | Some(ConfigState::Alive) => return,
        Some(state) => state,
    };
    let dir = case.host.pci_device(function.address);
    let find = match Spare::functions(case, [function]) {
        Ok(spare) => format!(", then {}; if it stays so,", spare.find_again(case)),
        Err(why) => format!("; {why};"),
    };
    case.add(
        BlockerCode::NotResponding,
        Severity::Blocker,
        function.address,
        format!("{} {state}", dir.join("config").display()),
        format!(
            "{}{find} {}",
            match state {
                ConfigState::Retry => "wait for the end of its reset",
                _ => case.remedy(
                    "check the cable and the slot's power",
                    "see whether the machine below this virtual one still has it",
                ),
            },
            case.remedy("switch the host off and on", "take it from this virtual machine and add it again")
        ),
    );
}

fn power(case: &mut Case<'_>, function: &PciFunction) {
    if function.power_state != PowerState::D3Cold {
        return;
    }
    let dir = case.host.pci_device(function.address);
    let status = files::read_trimmed(&dir.join("power/runtime_status")).unwrap_or_else(|| "unknown".into());
    // What runtime power management suspended it resumes, when VFIO opens the function.
    let wakes = status == "suspended";
    let evidence = format!(
        "{} is D3cold and power/runtime_status is {status}; config space reads all ones until it wakes",
        dir.join("power_state").display()
    );
    let on = format!("echo on > {}", dir.join("power/control").display());
    let (severity, remedy) = if wakes {
        (Severity::Warning, format!("nothing, Linux wakes it when it is used; to wake it now: {on}"))
    } else {
        // vfio-pci suspends functions that no guest has, and some do not wake again.
        let parameter = case.host.sys.join("module/vfio_pci/parameters/disable_idle_d3");
        let suspends = function.driver.as_deref().is_some_and(is_vfio_driver)
            && files::read_trimmed(&parameter).as_deref() != Some("Y");
        let keep = match suspends {
            true => {
                "boot Linux with vfio-pci.disable_idle_d3=1, so that vfio-pci does not suspend it between guests; "
            }
            false => "",
        };
        (
            Severity::Blocker,
            format!(
                "wake it: {on}; {keep}if it stays off, {}",
                case.remedy(
                    "power its slot on (or what switched it off, such as bbswitch)",
                    "take it from this virtual machine and add it again"
                )
            ),
        )
    };
    case.add(BlockerCode::D3cold, severity, function.address, evidence, remedy);
}

fn virtual_functions(case: &mut Case<'_>, function: &PciFunction) {
    let Some(Sriov::Physical { num_vfs: enabled @ 1.., .. }) = function.sriov else { return };
    let dir = case.host.pci_device(function.address);
    let mut bound = Vec::new();
    let virtual_functions = pci::virtual_functions(case.host, function.address);
    for &address in &virtual_functions {
        if let Some(driver) = files::link_name(&case.host.pci_device(address).join("driver")) {
            bound.push(format!("{address} ({driver})"));
        }
    }
    let users = match &bound[..] {
        [] => "none has a driver".into(),
        [some @ .., last] if some.len() >= 4 => {
            format!("{} and {} more up to {last} have drivers", some[..3].join(", "), some.len() - 2)
        }
        all => format!("with drivers: {}", all.join(", ")),
    };
    let path = dir.join("sriov_numvfs");
    case.add(
        BlockerCode::VfsInUse,
        Severity::Blocker,
        function.address,
        format!("{} is {enabled}; {users}", path.display()),
        match Spare::addresses(case, &virtual_functions) {
            Ok(spare) => format!(
                "pass one of the virtual functions instead, or stop what uses them and {}",
                spare.remove_vfs(&path)
            ),
            Err(why) => format!("pass a virtual function that nothing uses instead; {why}"),
        },
    );
}

fn bars_assigned(case: &mut Case<'_>, function: &PciFunction) {
    let found = windows::judge(case.host, case.facts, function.address, &function.bars);
    if let Some(UnassignedBars { evidence, fix }) = found {
        case.add(BlockerCode::BarUnassigned, Severity::Blocker, function.address, evidence, fix);
    }
}

/// Tells of a CXL device: one with a designated vendor-specific capability of CXL's for devices (CXL 3.1, 8.1.3), or of the
/// class of CXL memory.
fn cxl(case: &mut Case<'_>, function: &PciFunction) {
    const CXL: u16 = 0x1e98;
    const MEMORY: u32 = 0x05_02;
    // A function in D3cold, which reading would wake, has none.
    let all =
        function.extended_capabilities.iter().filter(|capability| capability.id == regs::EXT_CAP_ID_DVSEC);
    let offsets: Vec<_> = all.map(|capability| usize::from(capability.offset)).collect();
    let config = match offsets[..] {
        [] => Vec::new(),
        _ => pci::read_config(case.host, function.address).unwrap_or_default(),
    };
    let is_cxl =
        |offset: &usize| (config.read_u16(offset + 4), config.read_u16(offset + 8)) == (Some(CXL), Some(0));
    let found = offsets.into_iter().find(is_cxl);
    let path = case.host.pci_device(function.address);
    let evidence = match found {
        Some(offset) => format!(
            "{} has CXL's designated vendor-specific capability for devices at {offset:#x}",
            path.join("config").display()
        ),
        None if function.class.0 >> 8 == MEMORY => {
            format!("{} is {:06x}, CXL memory", path.join("class").display(), function.class.0)
        }
        None => return,
    };
    let remedy = "nothing, if its driver in the guest does without CXL: memory and caches that CXL keeps coherent stay the \
                  host's, and the guest sees none of CXL's capabilities";
    case.add(BlockerCode::Cxl, Severity::Warning, function.address, evidence, remedy);
}

/// Judges a function that Linux can't reset by itself. A reset of the bus reaches all that is on it, PCI Express or not, and VFIO
/// makes it where all of that belongs to the same guest.
fn reset(case: &mut Case<'_>) {
    let function = &case.function;
    let address = function.address;
    let on_bus = files::names(&case.host.sys.join("bus/pci/devices")).unwrap_or_default();
    let on_bus = on_bus.iter().filter_map(|name| name.parse::<PciAddress>().ok()).filter(|other| {
        *other != address && (other.domain(), other.bus()) == (address.domain(), address.bus())
    });
    let on_bus: Vec<_> = on_bus.collect();
    // Linux looks for methods when it finds a function, and the first one of a bus is alone there at that time. It refuses later.
    let works =
        |method: &ResetMethod| on_bus.is_empty() || !matches!(method, ResetMethod::Bus | ResetMethod::CxlBus);
    if function.resets.iter().any(works) || function.power_state == PowerState::D3Cold {
        return;
    }
    let path = case.host.pci_device(address).join("reset_method");
    let nothing = match &function.resets[..] {
        [] => format!("{} is missing or empty: Linux knows no reset of it alone", path.display()),
        _ => format!("{} has only its bus, which is not its own", path.display()),
    };
    let mut given: Vec<_> = case.taken().iter().map(|function| function.address).collect();
    given.extend(case.guest.iter().map(|function| function.address));
    given.extend(&case.options.beside);
    let (along, strangers): (Vec<_>, Vec<_>) = on_bus.into_iter().partition(|other| given.contains(other));
    let is_in_group = |other: &PciAddress| case.others.iter().any(|member| member.address == *other);
    let Some(port) = function.upstream else {
        // What is on a root bus is part of the board.
        case.blocker(
            BlockerCode::NoReset,
            format!("{nothing}; there is no port above it that could"),
            accept(""),
        );
        return;
    };
    if strangers.is_empty() {
        let (with, remedy) = match &along[..] {
            [] => (String::new(), "nothing".into()),
            along => {
                let along = list(along);
                let remedy = format!("nothing, as long as {along} goes to the same guest");
                (format!(", along with {along}"), remedy)
            }
        };
        let evidence = format!("{nothing}; it is reset by its port {port}{with}");
        case.add(BlockerCode::NoReset, Severity::Warning, address, evidence, remedy);
        return;
    }
    // A bridge can't be given to a guest.
    let is_bridge =
        |other: &PciAddress| pci::read_function(case.host, *other).is_ok_and(|other| other.is_bridge());
    let all = list(&strangers);
    let spare = if strangers.iter().any(is_bridge) { None } else { Some(Spare::addresses(case, &strangers)) };
    let give = match spare {
        None => String::new(),
        Some(Ok(spare)) => format!("{}, ", spare.give_along(strangers.iter().all(is_in_group))),
        Some(Err(why)) => format!("{why}, "),
    };
    let card = match case.seat() {
        Seat::BuiltIn => "",
        Seat::Slot => "move the card to a slot of its own root port, ",
        Seat::Enclosure => "connect the enclosure to another port of the host, ",
    };
    let elsewhere = case.remedy(card, "give it a root port of its own in this virtual machine, ");
    case.blocker(
        BlockerCode::NoReset,
        format!("{nothing}; resetting its port {port} would also reset {all}, which the guest does not get"),
        accept(&format!("{give}{elsewhere}")),
    );
}

fn list(functions: &[PciAddress]) -> String {
    functions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// What is left to do about a function that nothing resets.
fn accept(before: &str) -> String {
    format!(
        "{before}update its firmware, or use a newer Linux kernel, which may have a reset for it; if its users before and after \
         trust each other, or it has one user only, accept no-reset (option accept)"
    )
}
