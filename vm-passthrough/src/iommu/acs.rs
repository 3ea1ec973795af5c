//! Access control services: whether the ports above a function keep it from reaching its neighbours directly.
//!
//! Where a port does not, two functions below it can do DMA into each other without passing the IOMMU, so Linux puts
//! them into one group. This says which port that is.

use std::fmt;

use crate::pci::config::ConfigSource as _;
use crate::pci::{self, PciFunction, regs};
use crate::{Host, PciAddress};

/// A port above a function that does not isolate what is below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolationBreak {
    /// The port.
    pub port: PciAddress,
    /// What is wrong with it.
    pub fault: IsolationFault,
}

/// Why a port does not isolate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsolationFault {
    /// It has no ACS capability.
    NoAcs,
    /// It has ACS, but these of its controls are off (bits of the ACS Control Register).
    Disabled {
        /// The controls.
        missing: u16,
    },
    /// It leads to a conventional PCI bus, on which nothing tells who is talking.
    Conventional,
}

impl fmt::Display for IsolationFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAcs => f.write_str("has no ACS capability"),
            Self::Disabled { missing } => {
                f.write_str("has ACS switched off:")?;
                for (bit, name) in CONTROLS {
                    if missing & bit != 0 {
                        write!(f, " {name}")?;
                    }
                }
                Ok(())
            }
            Self::Conventional => f.write_str("leads to a conventional PCI bus, which can't isolate"),
        }
    }
}

/// The controls that isolation takes (PCI Express 6.0, 7.7.11.2; Linux `REQ_ACS_FLAGS`).
const CONTROLS: [(u16, &str); 4] = [
    (regs::ACS_SV, "source validation"),
    (regs::ACS_RR, "request redirect"),
    (regs::ACS_CR, "completion redirect"),
    (regs::ACS_UF, "upstream forwarding"),
];
const REQUIRED: u16 = regs::ACS_SV | regs::ACS_RR | regs::ACS_CR | regs::ACS_UF;

/// More buses in a row than can be: bus numbers have 8 bits.
const MOST_PORTS: usize = 256;

/// The ports above `function` that don't isolate it, from the function up. Read it only for a function that Linux
/// grouped with others: the Linux kernel knows ports that isolate without saying so in an ACS capability.
pub fn isolation_breaks(host: &Host, function: &PciFunction) -> Vec<IsolationBreak> {
    let mut breaks = Vec::new();
    let mut above = function.upstream;
    for _ in 0..MOST_PORTS {
        let Some(port) = above.and_then(|port| pci::read_function(host, port).ok()) else { break };
        breaks.extend(fault(host, &port).map(|fault| IsolationBreak { port: port.address, fault }));
        above = port.upstream;
    }
    breaks
}

fn fault(host: &Host, port: &PciFunction) -> Option<IsolationFault> {
    let config = pci::read_config(host, port.address).ok()?;
    let config = &config[..];
    let Some(express) = port.capabilities.iter().find(|cap| cap.id == regs::CAP_ID_EXP) else {
        // Config space that could not be read tells nothing.
        return (config.len() > pci::config::HEADER_SIZE).then_some(IsolationFault::Conventional);
    };
    let flags = config.read_u16(usize::from(express.offset) + usize::from(regs::EXP_FLAGS))?;
    match (flags & regs::EXP_FLAGS_TYPE) >> 4 {
        regs::EXP_TYPE_ROOT_PORT | regs::EXP_TYPE_DOWNSTREAM => {}
        regs::EXP_TYPE_PCI_BRIDGE => return Some(IsolationFault::Conventional),
        _ => return None,
    }
    let Some(acs) = port.extended_capabilities.iter().find(|cap| cap.id == regs::EXT_CAP_ID_ACS) else {
        return (config.len() > pci::config::CONFIG_SIZE).then_some(IsolationFault::NoAcs);
    };
    let capability = config.read_u16(usize::from(acs.offset + regs::ACS_CAP))?;
    let control = config.read_u16(usize::from(acs.offset + regs::ACS_CTRL))?;
    // A control that is not in the capability is always on.
    let missing = REQUIRED & capability & !control;
    (missing != 0).then_some(IsolationFault::Disabled { missing })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimFunction, SimHost};

    #[test]
    fn names_the_port() {
        let port: PciAddress = "0000:00:01.0".parse().unwrap();
        let nvme: PciAddress = "0000:01:00.0".parse().unwrap();
        let check = |bridge: SimFunction, expect: Option<IsolationFault>| {
            let sim = SimHost::new().unwrap();
            sim.add(&bridge).unwrap();
            sim.add(&SimFunction::nvme(nvme).below(port)).unwrap();
            let host = sim.plain_host();
            let function = pci::read_function(&host, nvme).unwrap();
            let expect: Vec<_> = expect.map(|fault| IsolationBreak { port, fault }).into_iter().collect();
            assert_eq!(isolation_breaks(&host, &function), expect);
        };
        let good = || SimFunction::root_port(port);
        let acs = |capability, control| {
            let port = good().no_extended_capabilities();
            port.extended_capability(regs::EXT_CAP_ID_ACS, 1, &[capability, 0, control, 0])
        };
        let conventional = SimFunction::new(port, 0x1b36, 0x0001, 0x06_0400).header_type(1);
        check(good(), None);
        check(good().no_extended_capabilities(), Some(IsolationFault::NoAcs));
        check(acs(0x1f, 0x05), Some(IsolationFault::Disabled { missing: 0x18 }));
        check(acs(0x05, 0x05), None);
        check(conventional.clone(), Some(IsolationFault::Conventional));
        check(conventional.clone().express(7), Some(IsolationFault::Conventional));
        // The upstream port of a switch needs none.
        check(conventional.clone().express(5), None);
        // Nothing is claimed of what can't be read.
        check(good().config(good().config_space()[..64].to_vec()), None);
        check(good().config(good().config_space()[..256].to_vec()), None);
        let switched_off = IsolationFault::Disabled { missing: 0x18 };
        assert_eq!(switched_off.to_string(), "has ACS switched off: completion redirect upstream forwarding");
    }
}
