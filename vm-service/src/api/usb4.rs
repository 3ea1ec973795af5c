//! USB4 and Thunderbolt: what is connected, and which functions reach the host through a tunnel.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::usb4;

/// How it is known which router a function is behind.
pub(crate) const INFERRED: &str = "inferred";

/// A domain: one connection manager, and what is connected to it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Usb4Domain {
    /// Its name, as in `domain0`.
    pub name: String,
    /// Address of the PCI function that it is of, its native host interface.
    pub host_interface: Option<String>,
    /// Security level: `none`, `user`, `secure`, `dponly`, `usbonly`, `nopcie`, or what else Linux says.
    pub security: String,
    /// Whether the firmware vouches that the IOMMU keeps what is connected from the host's memory; null where it is not said.
    pub iommu_dma_protection: Option<bool>,
    /// Whether a device can be deauthorised.
    pub deauthorization: bool,
    /// The routers, the host's first.
    pub routers: Vec<Usb4Router>,
}

/// A router: a host, dock, enclosure or device.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Usb4Router {
    /// Its name, as in `0-301`: its domain, and in hexadecimal a byte for the port to take at each router, the first lowest.
    pub name: String,
    /// UUID, which it keeps wherever it is connected.
    pub unique_id: Option<String>,
    /// Vendor ID, four hexadecimal digits.
    pub vendor_id: Option<String>,
    /// Device ID, four hexadecimal digits.
    pub device_id: Option<String>,
    /// Vendor's name, as the device says it.
    pub vendor: Option<String>,
    /// Device's name, as the device says it.
    pub device: Option<String>,
    /// 1 to 3 for Thunderbolt, 4 for USB4.
    pub generation: Option<u8>,
    /// Whether PCIe is tunnelled to it: `no`, `yes`, or `challenged`, when it proved by its key that it is the one; null for the host's own.
    pub authorized: Option<String>,
    /// Whether the firmware authorised it before Linux started.
    pub boot: bool,
    /// Mbit/s from the device to the host, of all lanes; null for the host's own.
    pub receive_megabits: Option<u32>,
    /// Mbit/s from the host to the device, of all lanes; null for the host's own.
    pub transmit_megabits: Option<u32>,
    /// Lanes from the device to the host; null for the host's own.
    pub receive_lanes: Option<Usb4Lanes>,
    /// Lanes from the host to the device; null for the host's own.
    pub transmit_lanes: Option<Usb4Lanes>,
    /// Version of its firmware.
    pub nvm_version: Option<String>,
    /// Its USB4 ports.
    pub ports: Vec<Usb4Port>,
    /// Retimers of its links.
    pub retimers: Vec<Usb4Retimer>,
}

/// The lanes of one direction of a link.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Usb4Lanes {
    /// How many.
    pub count: u8,
    /// Mbit/s of each.
    pub megabits: u32,
}

/// A port of a router.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Usb4Port {
    /// Its number.
    pub number: u8,
    /// What its link runs as: `none`, `usb4`, `tbt` or `unknown`.
    pub link: String,
    /// The USB Type-C connector that it is behind.
    pub connector: Option<String>,
}

/// A retimer.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Usb4Retimer {
    /// The port whose link it is in.
    pub port: u8,
    /// Which one from there on, from 1.
    pub index: u8,
    /// Vendor ID, four hexadecimal digits.
    pub vendor_id: Option<String>,
    /// Device ID, four hexadecimal digits.
    pub device_id: Option<String>,
    /// Version of its firmware.
    pub nvm_version: Option<String>,
}

/// A PCI function behind a tunnel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TunnelledFunction {
    /// Its address.
    pub address: String,
    /// How that is known: `linux`, which says so, or `inferred`.
    pub basis: String,
    /// Address of the root port above it.
    pub root_port: String,
    /// The router that it is in; null where it may be one of several, or of none that Linux shows.
    pub router: Option<String>,
    /// How the router, or that it is one of the candidates, is known: `inferred`, as Linux does not say it; null where none is known.
    pub router_basis: Option<String>,
    /// The routers that it may be in, where there are several.
    pub candidates: Vec<String>,
}

impl From<&usb4::Domain> for Usb4Domain {
    fn from(domain: &usb4::Domain) -> Self {
        Self {
            name: format!("domain{}", domain.number),
            host_interface: domain.host_interface.map(|address| address.to_string()),
            security: domain.security.to_string(),
            iommu_dma_protection: domain.iommu_dma_protection,
            deauthorization: domain.deauthorization,
            routers: domain.routers.iter().map(Usb4Router::from).collect(),
        }
    }
}

impl From<&usb4::Router> for Usb4Router {
    fn from(router: &usb4::Router) -> Self {
        let port = |port: &usb4::Port| Usb4Port {
            number: port.number,
            link: port.link.to_string(),
            connector: port.connector.clone(),
        };
        let retimer = |retimer: &usb4::Retimer| Usb4Retimer {
            port: retimer.port,
            index: retimer.index,
            vendor_id: retimer.vendor.map(id),
            device_id: retimer.device.map(id),
            nvm_version: retimer.nvm_version.clone(),
        };
        Self {
            name: router.route.to_string(),
            unique_id: router.unique_id.map(|id| id.to_string()),
            vendor_id: router.vendor.map(id),
            device_id: router.device.map(id),
            vendor: router.vendor_name.clone(),
            device: router.device_name.clone(),
            generation: router.generation,
            authorized: router.authorization.map(|authorization| authorization.to_string()),
            boot: router.boot,
            receive_megabits: router.link.map(|link| link.receive.rate()),
            transmit_megabits: router.link.map(|link| link.transmit.rate()),
            receive_lanes: router.link.map(|link| link.receive.into()),
            transmit_lanes: router.link.map(|link| link.transmit.into()),
            nvm_version: router.nvm_version.clone(),
            ports: router.ports.iter().map(port).collect(),
            retimers: router.retimers.iter().map(retimer).collect(),
        }
    }
}

impl From<usb4::Lanes> for Usb4Lanes {
    fn from(lanes: usb4::Lanes) -> Self {
        Self { count: lanes.count, megabits: lanes.speed }
    }
}

impl From<&usb4::Tunnel> for TunnelledFunction {
    fn from(tunnel: &usb4::Tunnel) -> Self {
        let candidates = match &tunnel.via {
            usb4::Via::OneOf(routes) => routes.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        };
        Self {
            address: tunnel.function.to_string(),
            basis: tunnel.basis.to_string(),
            root_port: tunnel.root_port.to_string(),
            router_basis: (tunnel.via != usb4::Via::Unknown).then(|| INFERRED.into()),
            router: tunnel.via.router().map(|route| route.to_string()),
            candidates,
        }
    }
}

fn id(id: u16) -> String {
    format!("{id:04x}")
}
