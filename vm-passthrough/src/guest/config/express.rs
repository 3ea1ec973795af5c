//! The PCI Express capability (PCI Express Base 6.0, 7.5.3) of an endpoint behind a root port of the guest.
//!
//! Payload and read request sizes, tags, completion timeouts and link settings belong to the host, which knows the
//! real path to memory: the guest's writes stay in the shadow, apart from relaxed ordering, no-snoop and the read
//! request size, which concern the device alone.

use super::{Builder, CONFIG_SIZE, Facts, Register};
use crate::pci::regs;

/// 2.5 GT/s, one lane.
const SLOWEST_LINK: u32 = 0x11;

/// Registers of every version.
const REGISTERS: &[Register] = &[
    // Role-based error reporting, extended tags, payload size, latencies.
    Register { offset: regs::EXP_DEVCAP, keep: 0x0000_8fff, ..Register::NONE },
    // What the guest sets of error reporting, payload size, tags and auxiliary power stays here.
    Register {
        offset: regs::EXP_DEVCTL,
        width: 2,
        keep: 0x7fff,
        writable: 0x7fff,
        through: 0x7810,
        ..Register::NONE
    },
    // Device Status: four error bits to clear, auxiliary power, transactions pending.
    Register { offset: regs::EXP_DEVSTA, width: 2, live: 0x003f, clear: 0x000f, ..Register::NONE },
];

/// Registers of the link, from which active state power management (bits 10 and 11) is left out: the link is the
/// host's.
const LINK: &[Register] = &[
    Register { offset: regs::EXP_LNKCAP, keep: 0xff3f_f3ff, ..Register::NONE },
    // Common clock configuration.
    Register { offset: regs::EXP_LNKCTL, width: 2, writable: 0x0040, ..Register::NONE },
    Register { offset: regs::EXP_LNKSTA, width: 2, keep: 0x1fff, live: 0x03ff, ..Register::NONE },
];

/// Registers of version 2: no atomic operations, LTR, OBFF, 10-bit tags or prefixes, which all need the path above.
const VERSION_2: &[Register] = &[
    // Completion timeout ranges and disable.
    Register { offset: regs::EXP_DEVCAP2, keep: 0x0000_001f, ..Register::NONE },
    Register { offset: regs::EXP_DEVCTL2, width: 2, writable: 0x001f, ..Register::NONE },
];

/// Registers of the link, of version 2.
const LINK_2: &[Register] = &[
    Register { offset: regs::EXP_LNKCAP2, keep: 0x0000_00fe, ..Register::NONE },
    Register { offset: regs::EXP_LNKCTL2, width: 2, keep: 0x000f, ..Register::NONE },
];

pub(super) fn add(builder: &mut Builder<'_>, offset: usize, facts: &Facts) -> bool {
    if builder.space.express.is_some() {
        return false;
    }
    let at = |register: u16| offset + usize::from(register);
    let flags = builder.word(at(regs::EXP_FLAGS));
    let version = flags & regs::EXP_FLAGS_VERS;
    let kind = (flags & regs::EXP_FLAGS_TYPE) >> 4;
    let integrated = kind == regs::EXP_TYPE_RC_END;
    if !integrated && kind != regs::EXP_TYPE_ENDPOINT && kind != regs::EXP_TYPE_LEG_END {
        return false;
    }
    let len = if version >= 2 { 0x3c } else { 0x14 };
    if !builder.take(offset, len, CONFIG_SIZE) {
        return false;
    }
    builder.rows(offset, REGISTERS);
    if version >= 2 {
        builder.rows(offset, VERSION_2);
    }
    if integrated {
        // Behind a port it is an endpoint with a link, the least one.
        builder.put(at(regs::EXP_LNKCAP), 4, SLOWEST_LINK);
        builder.put(at(regs::EXP_LNKSTA), 2, SLOWEST_LINK);
    } else {
        builder.rows(offset, LINK);
        if version >= 2 {
            builder.rows(offset, LINK_2);
        }
    }
    let kind = if integrated { regs::EXP_TYPE_ENDPOINT } else { kind };
    builder.put(at(regs::EXP_FLAGS), 2, u32::from(kind << 4 | version.min(2)));
    if facts.reset {
        let capabilities = builder.space.get32(at(regs::EXP_DEVCAP) as u16);
        builder.put(at(regs::EXP_DEVCAP), 4, capabilities | regs::EXP_DEVCAP_FLR);
    }
    builder.space.express = Some(offset as u16);
    true
}
