//! PCI functions, through memory-mapped config space.

use core::fmt;

use crate::acpi::Ecam;
use crate::sys;

const MAX_DEPTH: u8 = 8;
const MAX_CAPABILITIES: u8 = 48;

/// One function that answered.
#[derive(Clone, Copy)]
pub struct Function {
    config: u64,
    bus: u8,
    devfn: u8,
}

impl Function {
    /// Reads 32 bits of config space.
    pub fn read(&self, offset: u16) -> u32 {
        sys::read32(self.config + u64::from(offset))
    }

    /// Writes 32 bits of config space.
    pub fn write(&self, offset: u16, value: u32) {
        sys::write32(self.config + u64::from(offset), value);
    }

    /// Reads 16 bits of config space.
    pub fn read16(&self, offset: u16) -> u16 {
        sys::read16(self.config + u64::from(offset))
    }

    /// Writes 16 bits of config space.
    pub fn write16(&self, offset: u16, value: u16) {
        sys::write16(self.config + u64::from(offset), value);
    }

    /// Vendor in the low, device in the high half.
    pub fn id(&self) -> u32 {
        self.read(0)
    }

    /// Offset of the first capability `id`.
    pub fn capability(&self, id: u8) -> Option<u16> {
        let mut offset = self.read(0x34) as u8 & !3;
        for _ in 0..MAX_CAPABILITIES {
            if offset < 0x40 {
                return None;
            }
            let header = self.read16(u16::from(offset));
            if header as u8 == id {
                return Some(u16::from(offset));
            }
            offset = (header >> 8) as u8 & !3;
        }
        None
    }

    /// Address of the memory BAR at `index`; `None` for an I/O BAR or none.
    pub fn memory_bar(&self, index: u16) -> Option<u64> {
        let low = self.read(0x10 + 4 * index);
        if low & 1 != 0 {
            return None;
        }
        let high = if low & 6 == 4 { self.read(0x14 + 4 * index) } else { 0 };
        let address = u64::from(high) << 32 | u64::from(low & !0xf);
        (address != 0).then_some(address)
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, class) = (self.id(), self.read(8) >> 8);
        write!(
            f,
            "function {:02x}:{:02x}.{} {:04x}:{:04x} class {class:#08x}",
            self.bus,
            self.devfn >> 3,
            self.devfn & 7,
            id & 0xffff,
            id >> 16
        )
    }
}

/// Calls `found` for every function, bus 0 first and each bridge's bus right after the bridge.
pub fn scan(ecam: Ecam, mut found: impl FnMut(&Function)) {
    scan_bus(ecam, 0, 0, &mut found);
}

/// The first function with this vendor (low half) and device (high half).
pub fn find(ecam: Ecam, id: u32) -> Option<Function> {
    let mut hit = None;
    scan(ecam, |function| {
        if hit.is_none() && function.id() == id {
            hit = Some(*function);
        }
    });
    hit
}

fn scan_bus(ecam: Ecam, bus: u8, depth: u8, found: &mut dyn FnMut(&Function)) {
    let mut devfn = 0u16;
    while devfn < 256 {
        let config = ecam.base + (u64::from(bus) << 20) + (u64::from(devfn) << 12);
        let function = Function { config, bus, devfn: devfn as u8 };
        let multifunction = sys::read8(config + 0xe) & 0x80 != 0;
        if function.read16(0) == 0xffff {
            // Without function 0 there is no device.
            devfn = if devfn & 7 == 0 { devfn + 8 } else { devfn + 1 };
            continue;
        }
        found(&function);
        if sys::read8(config + 0xe) & 0x7f == 1 {
            let secondary = sys::read8(config + 0x19);
            if secondary > bus && secondary <= ecam.last_bus && depth < MAX_DEPTH {
                scan_bus(ecam, secondary, depth + 1, found);
            }
        }
        devfn = if devfn & 7 == 0 && !multifunction { devfn + 8 } else { devfn + 1 };
    }
}
