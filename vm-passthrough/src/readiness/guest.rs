//! What a guest needs for all of its devices together: addresses for their BARs, open files for their interrupts.

use super::memory::size_text;
use super::{Blocker, BlockerCode, Case, FILES_PER_VECTOR, Severity};
use crate::pci::config::ConfigSource as _;
use crate::pci::placement::{self, FunctionRequest, PlacementError, WindowKind, Windows};
use crate::pci::{self, PciFunction, regs};
use crate::{Host, PciAddress, iommu};

pub(super) fn judge(case: &mut Case<'_>) {
    case.found.extend(bars(case));
    case.found.extend(peers(case));
    case.found.extend(open_files(case));
}

/// Whether what concerns the guest as a whole is reported of the function before the judge: of the first.
fn speaks_for_all(case: &Case<'_>) -> bool {
    case.guest.first().is_some_and(|first| first.address == case.function.address)
}

/// Whether a BAR of a function gets an address.
pub(super) fn places(case: &Case<'_>, address: PciAddress, bar: u8) -> bool {
    let (requests, windows) = requests(case);
    let name = address.to_string();
    let Ok(placed) = placement::plan(&requests, &windows) else { return true };
    let mut own = requests.iter().zip(&placed).filter(|(request, _)| request.name == name);
    own.any(|(_, placed)| placed.bars.iter().any(|placed| placed.request.index == bar))
}

/// What the BARs of the guest's functions need, and where they can be.
fn requests(case: &Case<'_>) -> (Vec<FunctionRequest>, Windows) {
    let windows = case.options.windows(case.options.physical_address_bits.or(case.facts.physical_bits));
    // What the VMM emulates has its place already where a slot has its windows.
    let emulated = case.options.emulated.iter().filter(|_| case.options.slot.is_none());
    let own = case.guest.iter().map(|function| FunctionRequest::of(function, case.options.behind_ports));
    (emulated.cloned().chain(own).collect(), windows)
}

/// Places the BARs as a VMM does, and tells what does not fit of the function that it is about.
fn bars(case: &Case<'_>) -> Option<Blocker> {
    let bits = case.options.physical_address_bits.or(case.facts.physical_bits);
    let (requests, windows) = requests(case);
    let error = placement::plan(&requests, &windows).err()?;
    let own = case.function.address.to_string();
    let blamed = match &error {
        PlacementError::NoRoom { function, .. } | PlacementError::BadSize { function, .. } => Some(function),
        PlacementError::BadWindow { .. } => None,
    };
    // A device of the VMM's own, or a window, is reported of the first.
    let is_a_device =
        |name: &&String| case.guest.iter().any(|function| function.address.to_string() == **name);
    let is_own = match blamed.filter(is_a_device) {
        Some(blamed) => *blamed == own,
        None => speaks_for_all(case),
    };
    if !is_own {
        return None;
    }
    let (evidence, remedy) = match &error {
        PlacementError::NoRoom { kind, .. } => (
            no_room(case, &error, &windows, bits),
            match kind {
                _ if case.options.slot.is_some() => {
                    "have the guest start with it, so that it gets windows of its size".into()
                }
                WindowKind::Low => {
                    "give the guest a larger window below 4 GiB, or pass fewer functions together; a BAR can \
                                be made smaller by its resourceN_resize in sysfs, if the function can do that"
                        .into()
                }
                WindowKind::High => more_bits(case, &requests, bits),
                WindowKind::Io => "pass fewer functions together".into(),
            },
        ),
        PlacementError::BadSize { .. } => (
            error.to_string(),
            "its BAR sizes in sysfs can't be; find it again with a PCI rescan, or replace it".into(),
        ),
        PlacementError::BadWindow { .. } => (error.to_string(), "give the guest another window".into()),
    };
    Some(blocker(BlockerCode::BarsTooLarge, case.function.address, evidence, remedy))
}

fn blocker(code: BlockerCode, function: PciAddress, evidence: String, remedy: String) -> Blocker {
    Blocker { code, severity: Severity::Blocker, function, evidence, remedy }
}

fn no_room(case: &Case<'_>, error: &PlacementError, windows: &Windows, bits: Option<u8>) -> String {
    let PlacementError::NoRoom { function, bars, kind, needed, alignment, missing } = error else {
        return error.to_string();
    };
    let window = match kind {
        WindowKind::Low => &windows.low,
        WindowKind::High => &windows.high,
        WindowKind::Io => &windows.io,
    };
    let others: Vec<_> =
        case.guest.iter().map(|other| other.address.to_string()).filter(|other| other != function).collect();
    let beside =
        if others.is_empty() { String::new() } else { format!(" beside those of {}", others.join(", ")) };
    let mut text = format!(
        "the BARs of {function} ({bars}) take {} at a multiple of {}{beside}, which the guest's {kind}, {:#x} to {:#x}, \
         lacks {} for",
        size_text(*needed),
        size_text(*alignment),
        window.start,
        window.end,
        size_text(*missing)
    );
    let is_wide = |function: &PciFunction| {
        function.bars.iter().any(|bar| bar.kind == pci::BarKind::Memory64 && !bar.prefetchable)
    };
    let own = case.guest.iter().find(|other| other.address.to_string() == *function);
    match (kind, case.options.physical_address_bits, bits) {
        (WindowKind::Low, ..) if case.options.behind_ports && own.is_some_and(|own| is_wide(own)) => {
            text += "; behind a port a 64-bit BAR that is not prefetchable must lie there too, as the port forwards nothing \
                     else above 4 GiB than what may be prefetched";
        }
        (WindowKind::High, Some(bits), _) => text += &format!("; the guest's CPU has {bits} address bits"),
        (WindowKind::High, None, Some(bits)) => {
            text += &format!(
                "; \"address sizes\" in {}/cpuinfo gives {bits} address bits",
                case.host.proc.display()
            );
        }
        _ => {}
    }
    text
}

/// How many address bits would do.
fn more_bits(case: &Case<'_>, requests: &[FunctionRequest], bits: Option<u8>) -> String {
    let fits = |bits: &u8| placement::plan(requests, &case.options.windows(Some(*bits))).is_ok();
    match (bits.unwrap_or(Windows::MOST_BITS)..=Windows::MOST_BITS).find(fits) {
        Some(needed) => format!(
            "give the guest {needed} address bits (phys-bits={needed}) on a CPU that has them, less memory, fewer \
             functions, or make the BAR smaller by its resourceN_resize in sysfs"
        ),
        None => "give the guest fewer functions, or make the BAR smaller by its resourceN_resize in sysfs: no CPU has \
                 as many address bits as this takes"
            .into(),
    }
}

/// Warns if the function's IOMMU cannot address BARs of the guest's other devices. A device that is alone needs none of that.
fn peers(case: &Case<'_>) -> Option<Blocker> {
    let bits = iommu::address_width(case.host, case.function.address).filter(|bits| *bits < 64)?;
    let slot = |address: PciAddress| (address.domain(), address.bus(), address.device());
    let is_peer = |name: &str| {
        let mut others = case.guest.iter().map(|other| other.address);
        others.any(|other| slot(other) != slot(case.function.address) && other.to_string() == name)
    };
    let (requests, windows) = requests(case);
    let placed = placement::plan(&requests, &windows).ok()?;
    let beyond: Vec<_> = requests
        .iter()
        .zip(&placed)
        .filter(|(request, _)| is_peer(&request.name))
        .flat_map(|(request, placed)| placed.bars.iter().map(move |bar| (&request.name, bar)))
        .filter(|(_, bar)| (bar.address + (bar.request.size - 1)) >> bits != 0)
        .map(|(name, bar)| format!("BAR {} of {name} (at {:#x})", bar.request.index, bar.address))
        .collect();
    if beyond.is_empty() {
        return None;
    }
    Some(Blocker {
        code: BlockerCode::IovaTooWide,
        severity: Severity::Warning,
        function: case.function.address,
        evidence: format!(
            "its IOMMU translates {bits} bits (capability registers in {}/class/iommu), so its DMA does not reach {}",
            case.host.sys.display(),
            beyond.join(", ")
        ),
        remedy: case
            .remedy(
                "nothing, unless their drivers use peer-to-peer DMA; then give the guest less memory or make the BARs smaller by \
                 resourceN_resize in sysfs, so that they fit below",
                "nothing, unless their drivers use peer-to-peer DMA; then give the IOMMU of the virtual machine that this host is \
                 more bits (QEMU: -device intel-iommu,aw-bits=48)",
            )
            .into(),
    })
}

/// Whether drivers in the guest can use all of its devices' interrupts.
fn open_files(case: &Case<'_>) -> Option<Blocker> {
    let limit = case.facts.open_files?;
    // A vector table has 2048 entries at most.
    let most = case.guest.len() as u64 * 2048;
    let needed =
        |vectors: u64| vectors.saturating_mul(FILES_PER_VECTOR).saturating_add(case.options.open_files);
    if !speaks_for_all(case) || limit >= needed(most) {
        return None;
    }
    let vectors = case.guest.iter().map(|function| vectors(case.host, function)).sum();
    let needed = needed(vectors);
    if limit >= needed {
        return None;
    }
    let evidence = format!(
        "the guest's devices have {vectors} interrupt vectors, which take up to {needed} open files, and {}/self/limits \
         allows {limit}",
        case.host.proc.display()
    );
    let remedy = format!(
        "raise the limit: \"* - nofile {needed}\" in /etc/security/limits.conf, or LimitNOFILE={needed} in the systemd unit"
    );
    Some(blocker(BlockerCode::OpenFilesTooLow, case.function.address, evidence, remedy))
}

/// Interrupt vectors that a function's driver may use; 0 where its capabilities may not be read.
fn vectors(host: &Host, function: &PciFunction) -> u64 {
    let Ok(config) = pci::read_config(host, function.address) else { return 0 };
    let counts = function.capabilities.iter().map(|capability| {
        let register =
            |offset: u16| config.read_u16(usize::from(capability.offset) + usize::from(offset)).unwrap_or(0);
        match capability.id {
            regs::CAP_ID_MSI => 1 << ((register(regs::MSI_FLAGS) & regs::MSI_FLAGS_QMASK) >> 1).min(5),
            regs::CAP_ID_MSIX => u64::from(register(regs::MSIX_FLAGS) & regs::MSIX_FLAGS_QSIZE) + 1,
            _ => 0,
        }
    });
    counts.max().unwrap_or(0)
}
