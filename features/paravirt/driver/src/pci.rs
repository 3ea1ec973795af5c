//! Where a virtio device has its registers (section 4.1.4), and its MSI-X table.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::platform::{Message, Platform};
use crate::sys::Registers;

const COMMAND: u16 = 0x04;
const CAPABILITIES: u16 = 0x34;
/// Memory decoding, bus mastering, and no INTx.
const COMMAND_BITS: u32 = 2 | 4 | 1 << 10;
/// As many capabilities as config space has room for.
const MAX_CAPABILITIES: usize = 48;
pub(crate) const VENDOR_SPECIFIC: u8 = 0x09;
const MSIX: u8 = 0x11;
const MSIX_ENABLE: u32 = 1 << 31;
const MSIX_MASK_ALL: u32 = 1 << 30;

const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
pub(crate) const DEVICE: u8 = 4;

/// The parts of a device's registers.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) common: Registers,
    pub(crate) device: Registers,
    pub(crate) notify: Registers,
    /// Bytes between the notification registers of two queues.
    pub(crate) notify_multiplier: u32,
}

impl Layout {
    /// Finds the parts and switches the function on.
    pub(crate) fn find(platform: &impl Platform) -> Result<Self, Error> {
        let (mut common, mut device, mut notify) = (None, None, None);
        let command = platform.config_read(COMMAND) & 0xffff;
        platform.config_write(COMMAND, command | COMMAND_BITS);
        for (offset, head) in capabilities(|offset| platform.config_read(offset)) {
            if head as u8 != VENDOR_SPECIFIC {
                continue;
            }
            let word = platform.config_read(offset + 4);
            let place = Place {
                bar: word as u8,
                offset: platform.config_read(offset + 8),
                bytes: platform.config_read(offset + 12),
            };
            // The first of each kind is the one to use.
            match (head >> 24) as u8 {
                COMMON if common.is_none() => common = place.map(platform),
                DEVICE if device.is_none() => device = place.map(platform),
                NOTIFY if notify.is_none() => {
                    notify = place.map(platform).map(|part| (part, platform.config_read(offset + 16)));
                }
                _ => {}
            }
        }
        match (common, device, notify) {
            (Some(common), Some(device), Some((notify, notify_multiplier))) => {
                Ok(Self { common, device, notify, notify_multiplier })
            }
            _ => Err(Error::Transport("it lacks a part of its registers")),
        }
    }
}

/// Sets the first entry of the MSI-X table and switches MSI-X on.
pub(crate) fn set_interrupt(platform: &impl Platform, message: Message) -> Result<(), Error> {
    let Some((offset, head)) =
        capabilities(|offset| platform.config_read(offset)).find(|(_, head)| *head as u8 == MSIX)
    else {
        return Err(Error::Transport("it has no MSI-X"));
    };
    let word = platform.config_read(offset + 4);
    let table = Place { bar: word as u8 & 7, offset: word & !7, bytes: 16 };
    let table = table.map(platform).ok_or(Error::Transport("its MSI-X table is nowhere"))?;
    platform.config_write(offset, head | MSIX_ENABLE | MSIX_MASK_ALL);
    table.write32(0, message.address as u32);
    table.write32(4, (message.address >> 32) as u32);
    table.write32(8, message.data);
    table.write32(12, 0);
    platform.config_write(offset, (head | MSIX_ENABLE) & !MSIX_MASK_ALL);
    Ok(())
}

/// The capabilities: the offset of each, and its first word.
pub(crate) fn capabilities(read: impl Fn(u16) -> u32) -> impl Iterator<Item = (u16, u32)> {
    let mut offset = read(CAPABILITIES) as u8 & !3;
    (0..MAX_CAPABILITIES).map_while(move |_| {
        if offset < 0x40 {
            return None;
        }
        let at = u16::from(offset);
        let head = read(at);
        offset = (head >> 8) as u8 & !3;
        Some((at, head))
    })
}

/// A part of a BAR.
struct Place {
    bar: u8,
    offset: u32,
    bytes: u32,
}

impl Place {
    fn map(&self, platform: &impl Platform) -> Option<Registers> {
        if self.bar > 5 {
            return None;
        }
        let register = 0x10 + 4 * u16::from(self.bar);
        let low = platform.config_read(register);
        if low & 1 != 0 {
            return None;
        }
        let high = if low & 6 == 4 && self.bar < 5 { platform.config_read(register + 4) } else { 0 };
        let base = u64::from(high) << 32 | u64::from(low & !0xf);
        let start = base.checked_add(self.offset.into()).filter(|_| base != 0)?;
        let mapped = platform.map(start, self.bytes.into())?;
        // SAFETY: the platform promised that these are the registers at that address.
        Some(unsafe { Registers::new(mapped, self.bytes as usize) })
    }
}
