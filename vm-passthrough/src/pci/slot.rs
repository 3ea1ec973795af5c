//! The slot below a port.

use super::{config, regs};
use crate::{Host, PciAddress, deadlines};

/// Offset of Slot Capabilities in the PCI Express capability (PCI Express Base 6.0, 7.5.3.9).
const SLOT_CAPABILITIES: usize = 0x14;

/// The power in watts that the slot below a port can give, rounded down; `None` where the port has no slot, does not say, or does
/// not answer within [`deadlines::HEARTBEAT`].
pub fn slot_power(host: &Host, port: PciAddress) -> Option<u32> {
    let path = host.pci_device(port).join("config");
    let bytes = host.writer().read_bytes(&path, deadlines::HEARTBEAT).ok()?;
    let capabilities = config::capabilities(&bytes);
    let express = capabilities.iter().find(|capability| capability.id == regs::CAP_ID_EXP)?;
    let at = usize::from(express.offset) + SLOT_CAPABILITIES;
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    limit(u32::from_le_bytes(bytes)).filter(|&watts| watts > 0)
}

/// Slot Power Limit Value and Scale, in watts.
fn limit(slot: u32) -> Option<u32> {
    let (value, scale) = (slot >> 7 & 0xff, slot >> 15 & 3);
    match (value, scale) {
        // Beyond 239 W in steps of 25; the last code is reserved.
        (0xf0..=0xfe, 0) => Some(250 + 25 * (value - 0xf0)),
        (0xff, 0) => None,
        _ => Some(value / 10u32.pow(scale)),
    }
}

#[cfg(test)]
mod tests {
    use super::limit;

    #[test]
    fn power_limits_are_scaled() {
        for (value, scale, watts) in [
            (75, 0, Some(75)),
            (250, 1, Some(25)),
            (0, 0, Some(0)),
            (0xef, 0, Some(239)),
            (0xf0, 0, Some(250)),
            (0xf2, 0, Some(300)),
            (0xf3, 0, Some(325)),
            (0xfe, 0, Some(600)),
            (0xff, 0, None),
            (0xf0, 1, Some(24)),
            (255, 3, Some(0)),
        ] {
            assert_eq!(limit(value << 7 | scale << 15 | 1 << 6 | 0x7f << 19), watts, "{value} {scale}");
        }
    }
}
