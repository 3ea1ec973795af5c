//! The PCI Express capability (PCI Express Base 6.0, 7.5.3) of an endpoint behind a root port of the guest.
//!
//! Payload and read request sizes, tags, completion timeouts and link settings belong to the host, which knows the
//! real path to memory: the guest's writes stay in the shadow, apart from relaxed ordering, no-snoop and the read
//! request size, which concern the device alone.

use super::{Builder, EXTENDED, Facts, Register};

/// Device Control, from the start of the capability.
pub(in crate::guest) const DEVICE_CONTROL: u16 = 0x08;
/// Initiate function level reset; reads zero.
pub(in crate::guest) const DEVICE_CONTROL_RESET: u16 = 1 << 15;

const FLAGS: usize = 0x02;
const DEVICE_CAPABILITIES: usize = 0x04;
/// Function level reset capability.
const DEVICE_CAPABILITIES_RESET: u32 = 1 << 28;
/// Endpoint integrated into the root complex.
const TYPE_INTEGRATED: u16 = 9;
const TYPE_ENDPOINT: u16 = 0;
const TYPE_LEGACY_ENDPOINT: u16 = 1;
/// 2.5 GT/s, one lane.
const SLOWEST_LINK: u32 = 0x11;

/// Registers of every version.
const REGISTERS: &[Register] = &[
    // Role-based error reporting, extended tags, payload size, latencies.
    Register { offset: 0x04, keep: 0x0000_8fff, ..Register::NONE },
    // What the guest sets of error reporting, payload size, tags and auxiliary power stays here.
    Register {
        offset: DEVICE_CONTROL,
        width: 2,
        keep: 0x7fff,
        writable: 0x7fff,
        through: 0x7810,
        ..Register::NONE
    },
    // Device Status: four error bits to clear, auxiliary power, transactions pending.
    Register { offset: 0x0a, width: 2, live: 0x003f, through: 0x000f, clear: 0x000f, ..Register::NONE },
];

/// Registers of the link, from which active state power management (bits 10 and 11) is left out: the link is the
/// host's.
const LINK: &[Register] = &[
    Register { offset: 0x0c, keep: 0xff3f_f3ff, ..Register::NONE },
    // Common clock configuration.
    Register { offset: 0x10, width: 2, writable: 0x0040, ..Register::NONE },
    Register { offset: 0x12, width: 2, keep: 0x1fff, live: 0x03ff, ..Register::NONE },
];

/// Registers of version 2: no atomic operations, LTR, OBFF, 10-bit tags or prefixes, which all need the path above.
const VERSION_2: &[Register] = &[
    // Completion timeout ranges and disable.
    Register { offset: 0x24, keep: 0x0000_001f, ..Register::NONE },
    Register { offset: 0x28, width: 2, writable: 0x001f, ..Register::NONE },
];

/// Registers of the link, of version 2.
const LINK_2: &[Register] = &[
    Register { offset: 0x2c, keep: 0x0000_00fe, ..Register::NONE },
    Register { offset: 0x30, width: 2, keep: 0x000f, ..Register::NONE },
];

pub(super) fn add(builder: &mut Builder<'_>, offset: usize, facts: &Facts) -> bool {
    if builder.space.express.is_some() {
        return false;
    }
    let flags = builder.word(offset + FLAGS);
    let version = flags & 0xf;
    let kind = flags >> 4 & 0xf;
    let integrated = kind == TYPE_INTEGRATED;
    if !integrated && kind != TYPE_ENDPOINT && kind != TYPE_LEGACY_ENDPOINT {
        return false;
    }
    let len = if version >= 2 { 0x3c } else { 0x14 };
    if !builder.take(offset, len, EXTENDED) {
        return false;
    }
    builder.rows(offset, REGISTERS);
    if version >= 2 {
        builder.rows(offset, VERSION_2);
    }
    if integrated {
        // Behind a port it is an endpoint with a link, the least one.
        builder.put(offset + 0x0c, 4, SLOWEST_LINK);
        builder.put(offset + 0x12, 2, SLOWEST_LINK);
    } else {
        builder.rows(offset, LINK);
        if version >= 2 {
            builder.rows(offset, LINK_2);
        }
    }
    let kind = if integrated { TYPE_ENDPOINT } else { kind };
    builder.put(offset + FLAGS, 2, u32::from(kind << 4 | version.min(2)));
    if facts.reset {
        let capabilities = builder.space.get32((offset + DEVICE_CAPABILITIES) as u16);
        builder.put(offset + DEVICE_CAPABILITIES, 4, capabilities | DEVICE_CAPABILITIES_RESET);
    }
    builder.space.express = Some(offset as u16);
    true
}
