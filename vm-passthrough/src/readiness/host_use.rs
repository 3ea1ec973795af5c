//! Uses of the functions by the host: console, network, open files. `disks` checks disks.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::holders::{Holder, users};
use super::{BlockerCode, Case, Severity, disks};
use crate::deadlines::LEDGER_READ;
use crate::iommu::is_vfio_driver;
use crate::ledger::{self, LedgerError};
use crate::pci::{BarKind, PciFunction, Sriov};
use crate::{PciAddress, files};

/// How many processes are named.
const MOST_SHOWN: usize = 5;

pub(super) fn judge(case: &mut Case<'_>) {
    // Companions share their group's node.
    let mut reported = BTreeSet::new();
    let mut records = BTreeSet::new();
    for function in case.taken() {
        boot_display(case, &function);
        serial_console(case, &function);
        disks::judge(case, &function);
        routes(case, &function);
        shared(case, &function);
        claimed(case, &function, &mut records);
        claim_record(case, &function, &mut records);
        if case.options.check_open_files {
            in_use(case, &function, &mut reported);
        }
    }
}

fn boot_display(case: &mut Case<'_>, function: &PciFunction) {
    let dir = case.host.pci_device(function.address);
    let holder = framebuffer(case, function);
    let evidence = match (&holder, function.driver.as_deref()) {
        (Some((evidence, _)), _) => evidence.clone(),
        // The boot display in name only: the host gave it up already.
        (None, Some(driver)) if is_vfio_driver(driver) => return,
        (None, _) if !function.boot_display => return,
        (None, _) => format!("{} is 1", dir.join("boot_vga").display()),
    };
    // By address: an ID is that of every card of the same model.
    let mut fix = "make another GPU the primary display in the firmware setup".to_owned();
    if let Some((_, device)) = holder {
        let drivers = case.host.sys.join("bus/platform/drivers");
        fix += "; on a host that needs no console, unbind the framebuffer's driver before each claim";
        fix += &match device {
            Some((device, driver)) => {
                format!(": echo {device} > {}", drivers.join(&driver).join("unbind").display())
            }
            None => format!(
                "; find the one that has a device: simple-framebuffer, efi-framebuffer, vesa-framebuffer or of-display in {}",
                drivers.display()
            ),
        };
        let blacklist = "initcall_blacklist=sysfb_init";
        let cmdline = files::read_trimmed(&case.host.proc.join("cmdline")).unwrap_or_default();
        if cmdline.contains(blacklist) {
            fix += &format!("; {blacklist} on the kernel command line does not keep this driver off");
        }
    } else {
        fix += "; on a host that needs no console, make its claim persistent (claim --persist), which sets driver_override at boot";
    }
    case.add(BlockerCode::BootDisplay, Severity::Blocker, function.address, evidence, fix);
}

/// Reports that a serial console of the host is a port of the function.
fn serial_console(case: &mut Case<'_>, function: &PciFunction) {
    let address = function.address.to_string();
    let is_its = |path: &Path| path.components().any(|part| is_at(part, &address));
    let consoles = case.facts.consoles.iter().filter(|(_, path, _)| is_its(path));
    let consoles: Vec<_> =
        consoles.map(|(name, _, source)| (name.clone(), source.display().to_string())).collect();
    for (name, source) in consoles {
        let evidence = format!("the host's console {name} is a serial port of it, by {source}");
        let fix = format!(
            "boot Linux without console={name} on the kernel command line, with its console elsewhere, and stop what logs in there \
             (systemctl disable --now serial-getty@{name}.service)"
        );
        case.add(BlockerCode::BootDisplay, Severity::Blocker, function.address, evidence, fix);
    }
}

/// Whether a part of a path in sysfs is a function's directory.
fn is_at(part: Component<'_>, address: &str) -> bool {
    part == Component::Normal(address.as_ref())
}

/// Finds the driver that holds the firmware's framebuffer in a function's BARs: the evidence, and its platform device with its driver.
///
/// Its resource lies in the BAR and has another name than the function's own driver gives it; or a DRM device or framebuffer
/// belongs to a device below the function. Without privilege `iomem` has no addresses.
fn framebuffer(case: &Case<'_>, function: &PciFunction) -> Option<(String, Option<(String, String)>)> {
    const DISPLAY: u8 = 0x03;
    if function.class.base() != DISPLAY {
        return None;
    }
    let address = function.address.to_string();
    let parents = below(&case.facts.displays, &address).into_iter().filter_map(|name| {
        let (_, path) = case.facts.displays.iter().find(|(other, _)| other == name)?;
        // CLASS/NAME is below the device, as in `0000:01:00.0/simple-framebuffer.0/drm/card0`.
        let parent = path.parent()?.parent()?;
        let parent = parent.file_name()?.to_str()?;
        let link = case.host.sys.join("bus/platform/devices").join(parent).join("driver");
        Some((name, parent.to_owned(), files::link_name(&link)?))
    });
    let device = parents.into_iter().next();
    let in_bar = |start: u64, end: u64| {
        function.bars.iter().any(|bar| {
            bar.kind != BarKind::Io
                && bar.address != 0
                && start >= bar.address
                && end - bar.address <= bar.size.saturating_sub(1)
        })
    };
    let plain = |name: &str| name.replace('-', "_").to_lowercase();
    let driver = function.driver.as_deref().map(plain);
    let is_native = has_native_display(case, &address);
    let is_own = |name: &str| match &driver {
        _ if name == address => true,
        Some(_) if is_native => true,
        Some(driver) if is_vfio_driver(function.driver.as_deref().unwrap_or_default()) => {
            plain(name) == *driver || plain(name).starts_with("vfio")
        }
        Some(driver) => plain(name).starts_with(driver.as_str()) || driver.starts_with(plain(name).as_str()),
        None => false,
    };
    let resources = &case.facts.resources;
    // The window of the port above is around the BAR, and may be as large.
    let is_around = |number: usize, (start, end, _): &(u64, u64, String)| {
        let mut later = resources.iter().skip(number + 1);
        later.any(|(inner, last, name)| *name == address && start <= inner && last <= end)
    };
    // The innermost is the driver's.
    let held = |(number, resource): &(usize, &(u64, u64, String))| {
        in_bar(resource.0, resource.1) && !is_own(&resource.2) && !is_around(*number, resource)
    };
    let resource = resources.iter().enumerate().rfind(held).map(|(_, resource)| resource);
    let evidence = match (resource, &device) {
        (Some((start, end, name)), _) => format!(
            "the firmware's framebuffer is in its BAR at {start:#x}-{end:#x}, and {name} holds it, by {}/iomem",
            case.host.proc.display()
        ),
        (None, Some((node, parent, driver))) => {
            format!("{node} belongs to {parent} below it, which has driver {driver}")
        }
        (None, None) => return None,
    };
    Some((evidence, device.map(|(_, parent, driver)| (parent, driver))))
}

/// Whether a function's own driver has a display of it, and none of the host's displays is the firmware's: a driver takes the
/// framebuffer from the firmware's before it maps its BARs (`aperture_remove_conflicting_pci_devices`), and names them as it likes:
/// mgag200 has `mgadrmfb_vram`.
fn has_native_display(case: &Case<'_>, address: &str) -> bool {
    let platform = case.host.sys.join("bus/platform/devices");
    let parent = |path: &Path| Some(path.parent()?.parent()?.file_name()?.to_str()?.to_owned());
    let mut native = false;
    for (_, path) in &case.facts.displays {
        let Some(parent) = parent(path) else { continue };
        native |= parent == address;
        let mut of =
            path.components().filter_map(|part| part.as_os_str().to_str()?.parse::<PciAddress>().ok());
        let is_elsewhere = of.next_back().is_some_and(|of| of.to_string() != address);
        if !is_elsewhere && files::link_name(&platform.join(&parent).join("driver")).is_some() {
            return false;
        }
    }
    native
}

/// Names of the class members below a device.
pub(super) fn below<'a>(all: &'a [(String, PathBuf)], device: &str) -> Vec<&'a str> {
    let is_below = |path: &Path| path.components().any(|part| is_at(part, device));
    all.iter().filter(|(_, path)| is_below(path)).map(|(name, _)| name.as_str()).collect()
}

/// The default routes through the network interfaces of a device.
pub(super) fn default_routes(case: &Case<'_>, device: &str) -> Vec<String> {
    let class = case.host.sys.join("class/net");
    let mut pending: Vec<(String, String)> =
        below(&case.facts.nets, device).into_iter().map(|name| (name.into(), name.into())).collect();
    let mut seen = BTreeSet::new();
    let mut uses = Vec::new();
    while let Some((name, way)) = pending.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        for (_, path) in case.facts.default_routes.iter().filter(|(route, _)| *route == name) {
            uses.push(format!("{way} has a default route, by {}", path.display()));
        }
        // Bonds, bridges, VLANs and the like on top: links upper_NAME.
        for entry in files::names(&class.join(&name)).unwrap_or_default() {
            if let Some(upper) = entry.strip_prefix("upper_") {
                pending.push((upper.to_owned(), format!("{upper} on {way}")));
            }
        }
    }
    uses.sort_unstable();
    uses
}

fn routes(case: &mut Case<'_>, function: &PciFunction) {
    let uses = default_routes(case, &function.address.to_string());
    if uses.is_empty() {
        return;
    }
    let virtual_function = match function.sriov {
        Some(Sriov::Physical { total_vfs: 1.., .. }) => "; a virtual function of the card may do as well",
        _ => "",
    };
    case.add(
        BlockerCode::DefaultRoute,
        Severity::Blocker,
        function.address,
        uses.join("; "),
        format!(
            "move the default route to another interface (ip route replace default via GATEWAY dev OTHER), or take the \
             interface out of the bond{virtual_function}"
        ),
    );
}

fn shared(case: &mut Case<'_>, function: &PciFunction) {
    let address = function.address;
    let sharers = match ledger::sharers(case.host, address) {
        Ok(sharers) => sharers,
        Err(error) => {
            let evidence = format!("cannot read the leases: {error}");
            return case.unchecked(address, evidence, "run this as root");
        }
    };
    if sharers.is_empty() {
        return;
    }
    let shown: Vec<_> = sharers
        .iter()
        .take(MOST_SHOWN)
        .map(|sharer| {
            let ended =
                if sharer.is_running(case.host) { "" } else { ", which has ended, but a child of it lives" };
            format!("{}{ended}, by {}", sharer.owner, sharer.path.display())
        })
        .collect();
    let more = sharers.len().saturating_sub(MOST_SHOWN);
    let more = if more > 0 { format!("; {more} more") } else { String::new() };
    let pids: BTreeSet<_> = sharers.iter().map(|sharer| sharer.owner.pid).collect();
    let pids: Vec<_> = pids.iter().take(MOST_SHOWN).map(ToString::to_string).collect();
    case.add(
        BlockerCode::InUseShared,
        Severity::Blocker,
        address,
        format!("{}{more}", shown.join("; ")),
        format!(
            "wait until they have ended, or stop them (systemctl stop their service, or kill {})",
            pids.join(" ")
        ),
    );
}

/// A claim of another process, which companions share.
fn claimed(case: &mut Case<'_>, function: &PciFunction, reported: &mut BTreeSet<PathBuf>) {
    let address = function.address;
    match ledger::held_elsewhere(case.host, address, LEDGER_READ) {
        Ok(Some((owner, path))) if reported.insert(path.clone()) => case.add(
            BlockerCode::Claimed,
            Severity::Blocker,
            address,
            format!("{owner} has it, by {}", path.display()),
            format!("wait until that process has ended, or stop it (end its guest, or kill {})", owner.pid),
        ),
        Err(error @ LedgerError::Busy { .. }) => {
            let evidence = format!("cannot check whether another process has claimed it: {error}");
            case.unchecked(address, evidence, "run this again");
        }
        // That the ledger itself can't be read is reported already.
        Ok(_) | Err(_) => {}
    }
}

/// A record of a claim that can't be read, which companions share.
fn claim_record(case: &mut Case<'_>, function: &PciFunction, reported: &mut BTreeSet<PathBuf>) {
    // That the ledger itself can't be read is reported already.
    let Ok(Some(record)) = ledger::unread(case.host, function.address) else { return };
    if reported.insert(record.path.clone()) {
        let code = BlockerCode::ClaimRecordUnreadable;
        let evidence = format!("{}: {}", record.path.display(), record.what);
        case.add(code, Severity::Blocker, function.address, evidence, record.remedy);
    }
}

fn in_use(case: &mut Case<'_>, function: &PciFunction, reported: &mut BTreeSet<(u32, PathBuf)>) {
    let mut pids = BTreeSet::new();
    let mut open = users(case.host, function.address);
    // A guest has its group's file open for the functions that it has already.
    let is_vmm = |pid: u32| case.options.vmm.is_some_and(|vmm| vmm.pid == pid);
    open.retain(|user| match user {
        Holder::Process { pid, file, .. } if !is_vmm(*pid) && reported.insert((*pid, file.clone())) => {
            pids.insert(*pid);
            true
        }
        _ => false,
    });
    if open.is_empty() {
        return;
    }
    let mut shown: Vec<_> = open.iter().take(MOST_SHOWN).map(ToString::to_string).collect();
    if open.len() > MOST_SHOWN {
        shown.push(format!("{} more", open.len() - MOST_SHOWN));
    }
    let pids: Vec<_> = pids.iter().take(MOST_SHOWN).map(ToString::to_string).collect();
    case.add(
        BlockerCode::InUse,
        Severity::Blocker,
        function.address,
        format!("{}, by {}/PID/fd", shown.join(", "), case.host.proc.display()),
        format!("stop what has it open (systemctl stop its service, or kill {})", pids.join(" ")),
    );
}
