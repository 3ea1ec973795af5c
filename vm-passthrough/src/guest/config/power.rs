//! The power management capability (PCI Bus Power Management Interface 1.2, 3.2): D0 and D3hot, no PME.

use super::{Builder, CONFIG_SIZE, Register};
use crate::pci::regs;

const REGISTERS: &[Register] = &[
    // Version and what concerns D0; no PME from any state, no D1, no D2, no auxiliary current.
    Register { offset: regs::PM_PMC, width: 2, keep: 0x003f, ..Register::NONE },
    // No Soft Reset is the device's; the power state starts as D0.
    Register {
        offset: regs::PM_CTRL,
        width: 2,
        keep: 0x0008,
        writable: regs::PM_CTRL_STATE_MASK as u32,
        through: regs::PM_CTRL_STATE_MASK as u32,
        clear: 0x8000,
        ..Register::NONE
    },
];

pub(super) fn add(builder: &mut Builder<'_>, offset: usize) -> bool {
    if builder.space.power.is_some() || !builder.take(offset, 8, CONFIG_SIZE) {
        return false;
    }
    builder.rows(offset, REGISTERS);
    builder.space.power = Some(offset as u16);
    true
}
