//! Which PCI functions reach the host through a tunnel, and through which router.

use std::collections::BTreeMap;

use super::{Domain, Route};
use crate::pci::config::ConfigSource as _;
use crate::pci::{self, PciFunction, regs};
use crate::{Host, PciAddress, files};

/// More bridges than are ever above a function: there are 256 buses.
const MAX_BRIDGES: usize = 256;

/// A PCI function that reaches the host through a PCIe tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// The function.
    pub function: PciAddress,
    /// How that is known.
    pub basis: Basis,
    /// The root port above it.
    pub root_port: PciAddress,
    /// The router that it is in.
    pub via: Via,
}

/// How it is known that a function is behind a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Basis {
    /// Linux says so (`removable`): from 6.13 on it tells a controller's own functions from what is behind a tunnel.
    Linux,
    /// An older Linux calls removable all that is below a port which the firmware calls external. Of that, what the rule of 6.13
    /// takes for a controller's own functions is left out, as far as the rule can be followed from outside.
    Inferred,
}

/// The router that a function is in. Linux does not say which one: it is inferred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Via {
    /// The only one to which PCIe is tunnelled.
    Only(Route),
    /// Of those to which PCIe is tunnelled the only one as many links away as there are switches above the function.
    Depth(Route),
    /// One of these.
    OneOf(Vec<Route>),
    /// To none, as Linux shows it: its module thunderbolt may not be loaded.
    Unknown,
}

impl Via {
    /// The router, where one alone can be it.
    pub fn router(&self) -> Option<Route> {
        match self {
            Self::Only(route) | Self::Depth(route) => Some(*route),
            Self::OneOf(_) | Self::Unknown => None,
        }
    }
}

/// The functions that reach the host through a tunnel, in the order of `functions`, which are all of the host's.
pub fn tunnels(host: &Host, functions: &[PciFunction], domains: &[Domain]) -> Vec<Tunnel> {
    let all = functions.iter().map(|function| (function.address, function)).collect();
    let basis = if knows_tunnels(host) { Basis::Linux } else { Basis::Inferred };
    let tree = Tree { host, all, domains, basis };
    functions.iter().filter_map(|function| tree.tunnel(function)).collect()
}

/// Whether Linux calls a function removable, as all are that are behind a tunnel.
pub(crate) fn is_removable(host: &Host, function: PciAddress) -> bool {
    files::read_trimmed(&host.pci_device(function).join("removable")).as_deref() == Some("removable")
}

/// Whether a function is behind a tunnel, as far as that can be known without the other functions of the host.
///
/// Linux has the attribute `removable` since 5.14. Where it does not, a port above the function has Intel's vendor-specific capability of
/// Thunderbolt (`set_pcie_thunderbolt` in Linux `drivers/pci/probe.c`), or belongs to a host interface. The controllers of Thunderbolt
/// and of USB are a Thunderbolt controller's own.
pub(crate) fn may_be_tunnelled(host: &Host, function: &PciFunction) -> bool {
    const NHI: u8 = 0x08;
    const SERIAL_BUS: u8 = 0x0c;
    if let Some(removable) = files::read_trimmed(&host.pci_device(function.address).join("removable")) {
        return removable == "removable";
    }
    if matches!(function.class.base(), NHI | SERIAL_BUS) || function.is_bridge() {
        return false;
    }
    let above = |function: &PciFunction| pci::read_function(host, function.upstream?).ok();
    let mut ports = std::iter::successors(above(function), above).take(MAX_BRIDGES);
    ports.any(|port| has_thunderbolt(host, &port) || !host_interfaces(host, port.address).is_empty())
}

/// Whether a port is a Thunderbolt controller's.
fn has_thunderbolt(host: &Host, port: &PciFunction) -> bool {
    const INTEL: u16 = 0x8086;
    const THUNDERBOLT: u16 = 0x1234;
    let mut offsets = port
        .extended_capabilities
        .iter()
        .filter(|known| known.id == regs::EXT_CAP_ID_VNDR)
        .map(|known| known.offset);
    let is_thunderbolt = |offset: u16| {
        let config = pci::read_config(host, port.address).ok()?;
        Some(config.read_u16(usize::from(offset) + 4)? == THUNDERBOLT)
    };
    port.ids.vendor == INTEL && offsets.any(|offset| is_thunderbolt(offset) == Some(true))
}

/// The host interfaces that Linux has linked a port to, as the firmware says that their tunnels begin there
/// (`usb4-host-interface`).
fn host_interfaces(host: &Host, port: PciAddress) -> Vec<PciAddress> {
    let names = files::names(&host.pci_device(port)).unwrap_or_default();
    names.iter().filter_map(|name| name.strip_prefix("supplier:pci:")?.parse().ok()).collect()
}

/// Whether this Linux calls removable only what is behind a tunnel.
fn knows_tunnels(host: &Host) -> bool {
    let release = files::read_trimmed(&host.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    numbers.next().zip(numbers.next()) >= Some((6, 13))
}

/// The host's functions.
struct Tree<'a> {
    host: &'a Host,
    all: BTreeMap<PciAddress, &'a PciFunction>,
    domains: &'a [Domain],
    basis: Basis,
}

impl Tree<'_> {
    fn tunnel(&self, function: &PciFunction) -> Option<Tunnel> {
        let way = self.way(function);
        let (root, below) = way.split_first()?;
        // What is behind a tunnelled function is behind the tunnel, too.
        let first = below.iter().enumerate().find(|(at, first)| match self.basis {
            Basis::Linux => self.is_removable(first),
            Basis::Inferred => self.is_removable(first) && !self.is_controllers(&way[..at + 2]),
        });
        let tunnelled = &below[first?.0..];
        if !self.is_removable(function) {
            return None;
        }
        // A switch has an upstream port and a downstream one.
        let bridges = tunnelled.iter().filter(|function| function.header_type != 0).count();
        let via = self.via(root, bridges.div_ceil(2).max(1) as u32);
        Some(Tunnel { function: function.address, basis: self.basis, root_port: root.address, via })
    }

    /// A function and the bridges above it, from the root bus on.
    fn way<'b>(&'b self, function: &'b PciFunction) -> Vec<&'b PciFunction> {
        let above = |function: &&PciFunction| self.all.get(&function.upstream?).copied();
        let mut way: Vec<_> = std::iter::successors(Some(function), above).take(MAX_BRIDGES).collect();
        way.reverse();
        way
    }

    fn is_removable(&self, function: &PciFunction) -> bool {
        is_removable(self.host, function.address)
    }

    /// Whether the last function of a way from a root port on is of a controller in that port: its switch, or an endpoint
    /// right below (`pcie_switch_directly_under` in Linux `arch/x86/pci/acpi.c`). What is below a port that belongs to a host
    /// interface is not.
    fn is_controllers(&self, way: &[&PciFunction]) -> bool {
        let [above @ .., function] = way else { return false };
        let is_linked =
            above.last().is_some_and(|parent| !host_interfaces(self.host, parent.address).is_empty());
        let is_bridge = function.header_type != 0;
        !is_linked && if is_bridge { matches!(above.len(), 1 | 2) } else { above.len() == 3 }
    }

    /// The router of a function `links` links away below a root port.
    fn via(&self, root: &PciFunction, links: u32) -> Via {
        let linked = host_interfaces(self.host, root.address);
        let is_below = |interface: PciAddress| {
            let interface = self.all.get(&interface);
            interface.is_some_and(|interface| {
                self.way(interface).first().map(|first| first.address) == Some(root.address)
            })
        };
        let is_of = |domain: &&Domain| {
            domain.host_interface.is_some_and(|interface| linked.contains(&interface) || is_below(interface))
        };
        let mut domains: Vec<&Domain> = self.domains.iter().filter(is_of).collect();
        if domains.is_empty() {
            domains = self.domains.iter().collect();
        }
        let routers = domains.iter().flat_map(|domain| &domain.routers);
        let candidates: Vec<Route> =
            routers.filter(|router| router.is_authorised()).map(|router| router.route).collect();
        let mut as_far = candidates.iter().filter(|route| route.depth() == links);
        match (&*candidates, as_far.next(), as_far.next()) {
            ([], _, _) => Via::Unknown,
            ([only], _, _) => Via::Only(*only),
            (_, Some(route), None) => Via::Depth(*route),
            _ => Via::OneOf(candidates),
        }
    }
}
