//! Leaves a mark in USB controllers, and looks for one: in a register that nothing but a reset changes.

use crate::acpi::Acpi;
use crate::pci::{self, Function};
use crate::{Check, report, sys};

/// QEMU's.
const ID: u32 = 0x000d_1b36;
/// Of the operational registers (eXtensible Host Controller Interface 1.2, 5.4.7), behind the capability registers.
const CONFIG: u64 = 0x38;
/// How many device slots are enabled: 0 after a reset.
const MARK: u32 = 5;

/// Checks that each controller is as a reset leaves it, and leaves a mark in it. `reboot` does so again after a reset of the machine.
pub fn run<'a>(acpi: &Acpi, mut words: impl Iterator<Item = &'a [u8]>) -> bool {
    let (mut controllers, mut passed) = (0, true);
    pci::scan(acpi.ecam, |function| {
        if function.id() == ID {
            controllers += 1;
            passed &= report("clean", mark(function));
        }
    });
    passed &= report("controllers", if controllers > 0 { Ok(()) } else { Err("there is none") });
    if passed && words.any(|word| word == b"reboot") {
        acpi.reset();
    }
    passed
}

fn mark(function: &Function) -> Check {
    let bar = function.memory_bar(0).ok_or("BAR 0 has no address")?;
    function.write16(4, function.read16(4) | 2);
    let config = bar + u64::from(sys::read8(bar)) + CONFIG;
    if sys::read32(config) != 0 {
        return Err("its registers are not as a reset leaves them");
    }
    sys::write32(config, MARK);
    if sys::read32(config) == MARK { Ok(()) } else { Err("it does not keep what is written to it") }
}
