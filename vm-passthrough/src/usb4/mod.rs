//! USB4 and Thunderbolt: domains, routers, ports and retimers as the Linux kernel shows them in
//! `/sys/bus/thunderbolt` (Linux `Documentation/ABI/testing/sysfs-bus-thunderbolt`), and which PCI functions reach the host
//! through a tunnel.
//!
//! ```text
//! domain ─▶ host router ─▶ port ═(cable, retimers)═▶ router ─▶ port ═▶ router …
//!   │                        └────────── PCIe tunnel ──────────▶ PCI functions
//!   └─▶ its PCI function (the native host interface, NHI)
//! ```
//!
//! What is connected writes most of this: names come from a device's own ROM, and are bounded and freed of control characters.

mod events;
mod packet;
mod scan;
mod seen;
mod tunnel;

use std::fmt;
use std::str::FromStr;

pub use events::HotplugEvents;
pub use packet::tunnelled_bytes;
pub(crate) use scan::{instance, router_at};
pub use scan::{scan, scan_routers};
pub use seen::SeenRouters;
pub use tunnel::{Basis, Tunnel, Via, tunnels};
pub(crate) use tunnel::{is_removable, may_be_tunnelled};

use crate::PciAddress;

/// One connection manager and everything that is connected to it (`domainX`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its number, X of `domainX`.
    pub number: u32,
    /// The function of its native host interface.
    pub host_interface: Option<PciAddress>,
    /// What may be tunnelled before somebody says so.
    pub security: Security,
    /// Whether the firmware vouches that the IOMMU keeps what is connected from the host's memory; `None` where it is not said.
    pub iommu_dma_protection: Option<bool>,
    /// Whether PCIe tunnels can be taken down again by writing 0 to `authorized`.
    pub deauthorization: bool,
    /// Its routers, the host's first, each after the one that it is connected to.
    pub routers: Vec<Router>,
}

/// The security level that the firmware has set (`security`).
#[derive(Clone, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Security {
    /// Every device gets its tunnels at once.
    None,
    /// A user authorises each device.
    User,
    /// A user authorises each device, which proves by a key that it is the one.
    Secure,
    /// DisplayPort and USB alone are tunnelled.
    DpOnly,
    /// The USB controller of a dock and DisplayPort alone are tunnelled.
    UsbOnly,
    /// The firmware forbids PCIe tunnels.
    NoPcie,
    /// Another word, or none.
    #[strum(to_string = "{0}")]
    Other(String),
}

/// A host, dock, enclosure or device of USB4 or Thunderbolt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Router {
    /// Where it is.
    pub route: Route,
    /// A number that it has until it is unplugged: the inode of its directory in sysfs.
    pub instance: Option<u64>,
    /// What it keeps wherever it is connected. An eGPU is known by it, not by its PCI address.
    pub unique_id: Option<UniqueId>,
    /// Vendor ID, of its ROM.
    pub vendor: Option<u16>,
    /// Device ID, of its ROM.
    pub device: Option<u16>,
    /// Vendor's name, of its ROM.
    pub vendor_name: Option<String>,
    /// Device's name, of its ROM.
    pub device_name: Option<String>,
    /// 1 to 3 for Thunderbolt, 4 for USB4.
    pub generation: Option<u8>,
    /// Whether PCIe is tunnelled to it; `None` for the host's own.
    pub authorization: Option<Authorization>,
    /// Whether the firmware authorised it before Linux started.
    pub boot: bool,
    /// Its link to the router above it; `None` for the host's own.
    pub link: Option<LinkRates>,
    /// Version of its firmware, as in `27.1`.
    pub nvm_version: Option<String>,
    /// Its ports that USB4 names, by number.
    pub ports: Vec<Port>,
    /// Retimers on the way to it and beyond.
    pub retimers: Vec<Retimer>,
}

impl Router {
    /// The names of its vendor and device, by its ROM; `None` where it has none.
    pub fn name(&self) -> Option<String> {
        let names: Vec<&str> =
            [self.vendor_name.as_deref(), self.device_name.as_deref()].into_iter().flatten().collect();
        (!names.is_empty()).then(|| names.join(" "))
    }

    /// Whether PCIe is tunnelled to it.
    pub fn is_authorised(&self) -> bool {
        matches!(self.authorization, Some(Authorization::Yes | Authorization::Challenged))
    }
}

/// Whether PCIe is tunnelled to a router (`authorized`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Authorization {
    /// No.
    No,
    /// Yes.
    Yes,
    /// Yes, and it has proved by its key that it is the one that was authorised before.
    Challenged,
}

/// The rates of a link between two routers, of all its lanes together in Mbit/s.
///
/// What PCIe reports for functions behind it is the virtual link of the tunnel's adapters (2.5 GT/s, one lane; USB4 2.0,
/// 11.1), and says nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRates {
    /// From the device to the host.
    pub receive: Lanes,
    /// From the host to the device.
    pub transmit: Lanes,
}

impl LinkRates {
    /// The rate of the slower direction, which is what a link can be relied on for.
    pub const fn slower(self) -> Rate {
        let (receive, transmit) = (self.receive.rate(), self.transmit.rate());
        Rate(if receive < transmit { receive } else { transmit })
    }

    /// Whether a direction runs on one lane, as with a cable that is too long for two.
    pub const fn is_single_lane(self) -> bool {
        self.receive.count < 2 || self.transmit.count < 2
    }
}

/// A rate in Mbit/s, written in Gb/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u32);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Gb/s", f64::from(self.0) / 1000.0)
    }
}

/// The lanes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Mbit/s of each.
    pub speed: u32,
    /// How many.
    pub count: u8,
}

impl Lanes {
    /// Mbit/s of all.
    pub const fn rate(self) -> u32 {
        self.speed.saturating_mul(self.count as u32)
    }
}

/// A port of a router (`usb4_portN`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number.
    pub number: u8,
    /// What its link runs as.
    pub link: PortLink,
    /// The USB Type-C connector that it is behind, as in `port0`.
    pub connector: Option<String>,
}

/// What a port's link runs as (`link`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum PortLink {
    /// Nothing is connected.
    None,
    /// USB4.
    Usb4,
    /// Thunderbolt 3.
    Tbt,
    /// Linux does not say, or says another word.
    Unknown,
}

/// A chip that refreshes the signal, in a cable or on a board (`<router>:<port>.<index>`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retimer {
    /// The port whose link it is in.
    pub port: u8,
    /// Which one from there on, from 1.
    pub index: u8,
    /// Vendor ID.
    pub vendor: Option<u16>,
    /// Device ID.
    pub device: Option<u16>,
    /// Version of its firmware.
    pub nvm_version: Option<String>,
}

/// Where a router is: its domain, and the port to take at each router from the host's on (USB4 2.0, 2.2.10.2).
///
/// Linux writes the route in hexadecimal, a byte for each router, the first one lowest: `0-301` is at port 3 of what is at port
/// 1 of the host router `0-0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Number of the domain.
    pub domain: u32,
    /// The ports, a byte each.
    pub path: u64,
}

impl Route {
    /// How many links it is away from the host's router, at most 7.
    pub const fn depth(self) -> u32 {
        (u64::BITS - self.path.leading_zeros()).div_ceil(8)
    }

    /// The router that it is connected to; `None` for the host's.
    pub fn parent(self) -> Option<Self> {
        let last = self.depth().checked_sub(1)?;
        Some(Self { path: self.path & !(0xff << (8 * last)), ..self })
    }

    /// The port of [`parent`](Self::parent) that it is connected to; `None` for the host's router.
    pub fn port(self) -> Option<u8> {
        let last = self.depth().checked_sub(1)?;
        Some((self.path >> (8 * last)) as u8)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:x}", self.domain, self.path)
    }
}

/// Why a text is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is not of the form DOMAIN-ROUTE, as in 0-301 (a decimal and a hexadecimal number, no byte between others 0)"
)]
pub struct InvalidRoute;

impl FromStr for Route {
    type Err = InvalidRoute;

    fn from_str(text: &str) -> Result<Self, InvalidRoute> {
        let (domain, path) = text.split_once('-').ok_or(InvalidRoute)?;
        let digits = |text: &str, is: fn(&u8) -> bool| !text.is_empty() && text.bytes().all(|byte| is(&byte));
        if !digits(domain, u8::is_ascii_digit) || !digits(path, u8::is_ascii_hexdigit) {
            return Err(InvalidRoute);
        }
        let domain = domain.parse().map_err(|_| InvalidRoute)?;
        let route = Self { domain, path: u64::from_str_radix(path, 16).map_err(|_| InvalidRoute)? };
        // Seven links at most, and each by a port.
        let bytes = route.path.to_le_bytes();
        let ports = bytes.get(..route.depth() as usize).unwrap_or_default();
        if route.depth() > 7 || ports.contains(&0) { Err(InvalidRoute) } else { Ok(route) }
    }
}

/// The UUID that a router has wherever it is connected (`unique_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UniqueId(u128);

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(id) = self;
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            id >> 96,
            id >> 80 & 0xffff,
            id >> 64 & 0xffff,
            id >> 48 & 0xffff,
            id & 0xffff_ffff_ffff
        )
    }
}

/// Why a text is no UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no UUID, as in d2030000-00a0-751e-a3f4-c0e5ae7b0d30")]
pub struct InvalidUniqueId;

impl FromStr for UniqueId {
    type Err = InvalidUniqueId;

    fn from_str(text: &str) -> Result<Self, InvalidUniqueId> {
        let groups: Vec<&str> = text.split('-').collect();
        let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
        let digits = groups.concat();
        if lengths != [8, 4, 4, 4, 12] || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(InvalidUniqueId);
        }
        u128::from_str_radix(&digits, 16).map(Self).map_err(|_| InvalidUniqueId)
    }
}

#[cfg(test)]
mod tests;
