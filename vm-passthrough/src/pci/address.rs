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

    /// Parses `DOMAIN:BUS:DEVICE.FUNCTION` or, in domain 0, `BUS:DEVICE.FUNCTION`, all hexadecimal.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| ParsePciAddressError {
            // What is echoed is bounded: the text may be anything.
            text: text.chars().take(64).collect(),
            reason,
        })
    }
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
        check("65:00", Err("no function number"));
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
