//! The type 0 header (PCI Express Base 6.0, 7.5.1.1 and 7.5.1.2).

use super::{Builder, Register};
use crate::pci::regs;

/// Ports, memory, bus master, parity error response, SERR.
const COMMAND_THROUGH: u16 = regs::COMMAND_IO
    | regs::COMMAND_MEMORY
    | regs::COMMAND_MASTER
    | regs::COMMAND_PARITY
    | regs::COMMAND_SERR;
/// Master data parity error, and the five error bits at the top.
const STATUS_CLEAR: u32 = 0xf900;
/// The capability bit is ours, the rest is the device's.
const STATUS_LIVE: u32 = 0xffef;

/// All but the BARs, the capability pointer, and the interrupt pin, which is shown once it leads somewhere. Without a row: header
/// type (0; whoever shows several functions in a slot sets the multifunction bit), built-in self test, CardBus pointer.
pub(super) const REGISTERS: &[Register] = &[
    // Vendor and device ID.
    Register { offset: 0x00, width: 4, keep: u32::MAX, ..Register::NONE },
    Register {
        offset: regs::COMMAND,
        width: 2,
        // INTx Disable is written by whoever connects the pin.
        writable: (COMMAND_THROUGH | regs::COMMAND_INTX_DISABLE) as u32,
        through: COMMAND_THROUGH as u32,
        ..Register::NONE
    },
    Register { offset: regs::STATUS, width: 2, live: STATUS_LIVE, clear: STATUS_CLEAR, ..Register::NONE },
    // Revision and class.
    Register { offset: regs::CLASS_REVISION, width: 4, keep: u32::MAX, ..Register::NONE },
    // Cache line size.
    Register { offset: regs::CACHE_LINE_SIZE, width: 1, writable: 0xff, ..Register::NONE },
    // Subsystem.
    Register { offset: regs::SUBSYSTEM_VENDOR_ID, width: 4, keep: u32::MAX, ..Register::NONE },
    // Interrupt line.
    Register { offset: regs::INTERRUPT_LINE, width: 1, writable: 0xff, ..Register::NONE },
];

/// Of the BARs' registers: bits that the guest may write, and bits that read as one.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::guest) struct BarRegisters {
    /// Each of the six.
    pub(in crate::guest) bars: [(u32, u32); 6],
    /// The expansion ROM's, of which none reads as one.
    pub(in crate::guest) rom: u32,
}

/// Shows the BARs, without addresses yet.
pub(super) fn add_bars(builder: &mut Builder<'_>, registers: &BarRegisters) {
    for (offset, &(writable, fixed)) in (regs::BASE_ADDRESS_0..).step_by(4).zip(&registers.bars) {
        builder.rows(0, &[Register { offset, writable, ..Register::NONE }]);
        builder.put(offset.into(), 4, fixed);
    }
    builder.rows(0, &[Register { offset: regs::ROM_ADDRESS, writable: registers.rom, ..Register::NONE }]);
}
