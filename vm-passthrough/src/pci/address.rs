//! The address of a PCI function.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Domain, bus, device and function number of a PCI function, as in `0000:65:00.0`.
///
/// The domain has 32 bits because Linux numbers the domains behind Intel VMD from 0x10000 up. Addresses sort
/// the way the hardware numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "String", into = "String")
)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    devfn: u8,
}

impl PciAddress {
    /// An address from its parts; `None` if `device` is over 31 or `function` over 7.
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self { domain, bus, devfn: device << 3 | function })
    }

    /// The PCI domain (segment).
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus number within the domain.
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The device (slot) number on the bus, 0 to 31.
    pub const fn device(self) -> u8 {
        self.devfn >> 3
    }

    /// The function number within the device, 0 to 7.
    pub const fn function(self) -> u8 {
        self.devfn & 7
    }

    /// Whether both are functions of one device (slot).
    pub const fn same_slot(self, other: Self) -> bool {
        self.domain == other.domain && self.bus == other.bus && self.device() == other.device()
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device(), self.function())
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a text is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "`{text}` is not a PCI address: {reason}; write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as in 0000:65:00.0"
)]
pub struct ParsePciAddressError {
    text: String,
    reason: &'static str,
    meaning: Option<Meaning>,
}

/// A vendor:device ID or a slot, given in place of the address of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Devices of one model, by vendor and device ID, as `lspci -n` prints them: `10de:2684`.
    Ids(u16, u16),
    /// A slot, by the address of its function 0: `01:00` or `0000:01:00`.
    Slot(PciAddress),
}

impl Meaning {
    fn of(text: &str) -> Option<Self> {
        let (left, right) = text.rsplit_once(':')?;
        match (left.len(), right.len()) {
            (4, 4) => Some(Self::Ids(hex(left, 4)? as u16, hex(right, 4)? as u16)),
            _ => Some(Self::Slot(parse(&format!("{text}.0")).ok()?)),
        }
    }

    const fn reason(self) -> &'static str {
        match self {
            Self::Ids(..) => "that is a vendor:device ID",
            Self::Slot(_) => "that is a slot, whose functions have a number after a `.`",
        }
    }

    /// Whether it means this function, among others.
    pub const fn includes(self, address: PciAddress, vendor: u16, device: u16) -> bool {
        match self {
            Self::Ids(of_vendor, of_device) => vendor == of_vendor && device == of_device,
            Self::Slot(slot) => address.same_slot(slot),
        }
    }
}

impl ParsePciAddressError {
    /// Returns the ID or slot that the text names, if any.
    pub const fn meaning(&self) -> Option<Meaning> {
        self.meaning
    }
}

impl TryFrom<String> for PciAddress {
    type Error = ParsePciAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl FromStr for PciAddress {
    type Err = ParsePciAddressError;

    /// Parses `DOMAIN:BUS:DEVICE.FUNCTION` or, in domain 0, `BUS:DEVICE.FUNCTION`, all hexadecimal; also the path of the
    /// function's directory in sysfs, and its name in libvirt (`pci_0000_01_00_0`).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.strip_prefix("pci_") {
            Some(name) => {
                libvirt(name).ok_or("it is not pci_DOMAIN_BUS_DEVICE_FUNCTION, as libvirt names functions")
            }
            None => parse(sysfs(text).unwrap_or(text)),
        };
        parsed.map_err(|reason| {
            let meaning = Meaning::of(text);
            ParsePciAddressError {
                // The text may be anything, so its copy is bounded.
                text: text.chars().take(64).collect(),
                reason: meaning.map_or(reason, Meaning::reason),
                meaning,
            }
        })
    }
}

/// The name of a device's directory in sysfs, by its path.
fn sysfs(text: &str) -> Option<&str> {
    let path = text.trim_end_matches('/');
    path.starts_with("/sys/").then(|| path.rsplit('/').next())?
}

/// The address in the name that libvirt gives a function, without its prefix.
fn libvirt(name: &str) -> Option<PciAddress> {
    let mut parts = name.split('_');
    let [domain, bus, device, function] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
    parts.next().is_none().then(|| parse(&format!("{domain}:{bus}:{device}.{function}")).ok())?
}

fn parse(text: &str) -> Result<PciAddress, &'static str> {
    let (bus_and_device, function) = text.rsplit_once('.').ok_or("it has no function number after a `.`")?;
    let mut parts = bus_and_device.rsplit(':');
    let device = parts.next().unwrap_or_default();
    let bus = parts.next().ok_or("it has no bus number before a `:`")?;
    let domain = parts.next().unwrap_or("0");
    if parts.next().is_some() {
        return Err("it has too many `:`");
    }
    let domain = hex(domain, 8).ok_or("the domain is not 1 to 8 hexadecimal digits")?;
    let bus = hex(bus, 2).ok_or("the bus is not 1 or 2 hexadecimal digits")?;
    let device = hex(device, 2).filter(|&d| d < 32).ok_or("the device is not between 00 and 1f")?;
    let function = hex(function, 1).filter(|&f| f < 8).ok_or("the function is not between 0 and 7")?;
    PciAddress::new(domain, bus as u8, device as u8, function as u8).ok_or("a part is out of range")
}

/// `text` as a hexadecimal number of 1 to `digits` digits.
fn hex(text: &str, digits: usize) -> Option<u32> {
    if text.is_empty() || text.len() > digits || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_and_prints() {
        fn check(text: &str, expect: Result<&str, &str>) {
            match (text.parse::<PciAddress>(), expect) {
                (Ok(address), Ok(expect)) => {
                    assert_eq!(address.to_string(), expect);
                    assert_eq!(format!("{address:?}"), expect);
                    assert_eq!(address.to_string().parse(), Ok(address));
                }
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{text}: {error}"),
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
        check("0000:65:00.0", Ok("0000:65:00.0"));
        check("65:00.0", Ok("0000:65:00.0"));
        check("0:0:1f.7", Ok("0000:00:1f.7"));
        check("10000:e1:00.0", Ok("10000:e1:00.0"));
        check("ffffffff:ff:1f.7", Ok("ffffffff:ff:1f.7"));
        check("", Err("no function number"));
        check("65:00", Err("that is a slot"));
        check("0000:65:00", Err("that is a slot"));
        check("10de:2684", Err("that is a vendor:device ID"));
        check("10de:zz84", Err("no function number"));
        check("/sys/bus/pci/devices/0000:65:00.0", Ok("0000:65:00.0"));
        check("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.1/", Ok("0000:01:00.1"));
        check("/sys/devices/pci0000:00", Err("no function number"));
        check("/home/0000:65:00.0", Err("the domain"));
        check("pci_0000_01_00_0", Ok("0000:01:00.0"));
        check("pci_10000_e1_00_0", Ok("10000:e1:00.0"));
        check("pci_0000_01_00", Err("as libvirt names functions"));
        check("pci_0000_01_00_0_0", Err("as libvirt names functions"));
        check("00.0", Err("no bus number"));
        check("0000:65:20.0", Err("the device"));
        check("0000:65:00.8", Err("the function"));
        check("0000:65:00.00", Err("the function"));
        check("0000:+5:00.0", Err("the bus"));
        check("0000:165:00.0", Err("the bus"));
        check("0:0000:65:00.0", Err("too many"));
        check(":65:00.0", Err("the domain"));
        check(" 65:00.0", Err("the bus"));
    }
}
