//! The power management capability (PCI Bus Power Management Interface 1.2, 3.2): D0 and D3hot, no PME.

use super::{Builder, EXTENDED, Register};

/// Control and status register, from the start of the capability.
pub(in crate::guest) const CONTROL: u16 = 4;
/// Power state in the control register.
pub(in crate::guest) const STATE: u16 = 0b11;
/// The power state D3hot.
pub(in crate::guest) const D3HOT: u16 = 0b11;

const REGISTERS: &[Register] = &[
    // Version and what concerns D0; no PME from any state, no D1, no D2, no auxiliary current.
    Register { offset: 2, width: 2, keep: 0x003f, ..Register::NONE },
    // No Soft Reset is the device's; the power state starts as D0.
    Register {
        offset: CONTROL,
        width: 2,
        keep: 0x0008,
        writable: 0x0003,
        through: 0x0003,
        clear: 0x8000,
        ..Register::NONE
    },
];

pub(super) fn add(builder: &mut Builder<'_>, offset: usize) -> bool {
    if builder.space.power.is_some() || !builder.take(offset, 8, EXTENDED) {
        return false;
    }
    builder.rows(offset, REGISTERS);
    builder.space.power = Some(offset as u16);
    true
}
