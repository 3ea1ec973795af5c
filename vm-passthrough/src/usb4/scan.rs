//! Reads `/sys/bus/thunderbolt`.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{Authorization, Domain, Lanes, LinkRates, Port, PortLink, Retimer, Route, Router, Security};
use crate::{Host, files};

/// Most characters of a name that a device gives itself.
const MAX_NAME: usize = 64;
/// Most entries of the bus that are looked at: 64 domains of as many routers, with ports and retimers.
const MAX_ENTRIES: usize = 16 << 10;

/// Every domain of the host, by number; none where Linux has no driver for USB4 and Thunderbolt, or the host no such controller.
///
/// What vanishes meanwhile is left out, and what makes no sense reads as absent.
///
/// # Errors
/// When the bus can't be read.
pub fn scan(host: &Host) -> io::Result<Vec<Domain>> {
    scan_by(host, Detail::All)
}

/// As [`scan`], without ports, retimers and firmware versions. Linux answers those once the domain's connection manager is at rest
/// (`nvm_version`, `link`), and a message to a router that does not answer may take it long.
///
/// # Errors
/// As for [`scan`].
pub fn scan_routers(host: &Host) -> io::Result<Vec<Domain>> {
    scan_by(host, Detail::Routers)
}

/// What of a domain is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detail {
    /// Everything.
    All,
    /// What Linux answers without asking.
    Routers,
}

fn scan_by(host: &Host, detail: Detail) -> io::Result<Vec<Domain>> {
    let bus = host.thunderbolt.join("devices");
    let mut domains = BTreeMap::new();
    let (mut routers, mut retimers) = (Vec::new(), Vec::new());
    for name in files::names(&bus)?.into_iter().take(MAX_ENTRIES) {
        let path = bus.join(&name);
        if let Some(number) = name.strip_prefix("domain").and_then(|number| number.parse().ok()) {
            domains.insert(number, domain(number, &path));
        } else if let Ok(route) = name.parse::<Route>() {
            routers.extend(router(route, &path, detail));
        } else if detail == Detail::All
            && let Some((route, retimer)) = retimer(&name, &path)
        {
            retimers.push((route, retimer));
        }
    }
    // A route is longer than that of the router above it, and so comes after it.
    routers.sort_unstable_by_key(|router: &Router| (router.route.depth(), router.route));
    for mut router in routers {
        let own = retimers.iter().filter(|(route, _)| *route == router.route);
        router.retimers = own.map(|(_, retimer)| retimer.clone()).collect();
        router.retimers.sort_unstable_by_key(|retimer| (retimer.port, retimer.index));
        // Without its domain it has just gone with it.
        if let Some(domain) = domains.get_mut(&router.route.domain) {
            domain.routers.push(router);
        }
    }
    Ok(domains.into_values().collect())
}

fn domain(number: u32, path: &Path) -> Domain {
    let flag = |name| text(path, name).and_then(|text| flag(&text));
    Domain {
        number,
        host_interface: host_interface(path),
        security: security(text(path, "security")),
        iommu_dma_protection: flag("iommu_dma_protection"),
        deauthorization: flag("deauthorization") == Some(true),
        routers: Vec::new(),
    }
}

/// The function that a domain's directory lies in: `…/0000:00:0d.2/domain0`.
fn host_interface(path: &Path) -> Option<crate::PciAddress> {
    let target: PathBuf = std::fs::read_link(path).ok()?;
    target.parent()?.file_name()?.to_str()?.parse().ok()
}

fn security(text: Option<String>) -> Security {
    match text.as_deref() {
        Some("none") => Security::None,
        Some("user") => Security::User,
        Some("secure") => Security::Secure,
        Some("dponly") => Security::DpOnly,
        Some("usbonly") => Security::UsbOnly,
        Some("nopcie") => Security::NoPcie,
        _ => Security::Other(text.unwrap_or_else(|| "unknown".into())),
    }
}

/// One router as it is now, without what [`scan_routers`] leaves out; `None` when it is not there.
pub(crate) fn router_at(host: &Host, route: Route) -> Option<Router> {
    router(route, &host.thunderbolt.join("devices").join(route.to_string()), Detail::Routers)
}

/// [`Router::instance`] of the one that is there; `None` when none is.
pub(crate) fn instance(host: &Host, route: Route) -> Option<u64> {
    inode(&host.thunderbolt.join("devices").join(route.to_string()))
}

fn inode(path: &Path) -> Option<u64> {
    path.metadata().ok().map(|file| file.ino())
}

/// A router; `None` for another host (XDomain), which has names like one but no `authorized` and no `nvm_version`.
fn router(route: Route, path: &Path, detail: Detail) -> Option<Router> {
    let is_below = route.depth() > 0;
    let authorized = text(path, "authorized").filter(|_| is_below);
    if is_below && authorized.is_none() {
        return None;
    }
    let number = |name| text(path, name).and_then(|text| hexadecimal(&text));
    let authorization = authorized.and_then(|text| match &*text {
        "0" => Some(Authorization::No),
        "1" => Some(Authorization::Yes),
        "2" => Some(Authorization::Challenged),
        _ => None,
    });
    let lanes = |direction: &str| {
        let speed = text(path, &format!("{direction}_speed")).and_then(|text| megabits(&text))?;
        let count = text(path, &format!("{direction}_lanes"))?.parse().ok()?;
        Some(Lanes { speed, count })
    };
    Some(Router {
        route,
        instance: inode(path),
        unique_id: text(path, "unique_id").and_then(|text| text.parse().ok()),
        vendor: number("vendor"),
        device: number("device"),
        vendor_name: text(path, "vendor_name"),
        device_name: text(path, "device_name"),
        generation: text(path, "generation").and_then(|text| text.parse().ok()),
        authorization,
        boot: text(path, "boot").and_then(|text| flag(&text)) == Some(true),
        link: lanes("rx")
            .zip(lanes("tx"))
            .filter(|_| is_below)
            .map(|(receive, transmit)| LinkRates { receive, transmit }),
        nvm_version: if detail == Detail::All { text(path, "nvm_version") } else { None },
        ports: if detail == Detail::All { ports(path) } else { Vec::new() },
        retimers: Vec::new(),
    })
}

fn ports(router: &Path) -> Vec<Port> {
    let names = files::names(router).unwrap_or_default();
    let mut ports: Vec<Port> = names
        .iter()
        .filter_map(|name| {
            let number = name.strip_prefix("usb4_port")?.parse().ok()?;
            let path = router.join(name);
            let link = match text(&path, "link").as_deref() {
                Some("none") => PortLink::None,
                Some("usb4") => PortLink::Usb4,
                Some("tbt") => PortLink::Tbt,
                _ => PortLink::Unknown,
            };
            Some(Port { number, link, connector: files::link_name(&path.join("connector")) })
        })
        .collect();
    ports.sort_unstable_by_key(|port| port.number);
    ports
}

/// `<router>:<port>.<index>`.
fn retimer(name: &str, path: &Path) -> Option<(Route, Retimer)> {
    let (route, place) = name.split_once(':')?;
    let (port, index) = place.split_once('.')?;
    let number = |name| text(path, name).and_then(|text| hexadecimal(&text));
    let retimer = Retimer {
        port: port.parse().ok()?,
        index: index.parse().ok()?,
        vendor: number("vendor"),
        device: number("device"),
        nvm_version: text(path, "nvm_version"),
    };
    Some((route.parse().ok()?, retimer))
}

/// An attribute, without what could write to a terminal; `None` where it is not there, empty, or can't be read.
fn text(path: &Path, name: &str) -> Option<String> {
    let text = files::read_trimmed(&path.join(name))?;
    // As do the characters that change the direction of what follows (Unicode Standard Annex 9, 2).
    let is_shown = |char: &char| {
        !char.is_control()
            && !matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let shown: String = text.chars().filter(is_shown).take(MAX_NAME).collect();
    (!shown.is_empty()).then_some(shown)
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// As Linux prints it, `0x8086`; before 5.0 without the prefix.
fn hexadecimal(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}

/// Mbit/s of `20.0 Gb/s`.
fn megabits(text: &str) -> Option<u32> {
    let (whole, part) = text.strip_suffix(" Gb/s")?.split_once('.')?;
    let (whole, tenths): (u32, u32) = (whole.parse().ok()?, part.parse().ok()?);
    (part.len() == 1).then_some(())?;
    whole.checked_mul(1000)?.checked_add(tenths * 100)
}
