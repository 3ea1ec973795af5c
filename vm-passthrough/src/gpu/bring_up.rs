//! A GPU is reset and made usable, each step verified.

use std::time::Duration;

use super::clock::Clock;
use super::identify::{BootRegisters, Chip, identify};
use super::power::{PowerChange, set_power_state};
use super::registers::Registers;
use super::sequence::{Problem, SequenceError, Step, is_all_ones, read16, write16};
use crate::deadlines::GPU_BOOT;
use crate::pci::{PowerState, regs};
use crate::vfio::{DeviceFile, ResetReport};

/// Time between two looks at the boot register.
const BOOT_POLL: Duration = Duration::from_millis(10);

/// A GPU that was brought up.
#[derive(Clone, Debug)]
pub struct BroughtUp {
    /// Which chip it is.
    pub chip: Chip,
    /// How it was reset, and what shows that.
    pub reset: ResetReport,
    /// What became of its power state; `None` where it has no power management, and so is always in D0.
    pub power: Option<PowerChange>,
    /// How long its boot register did not tell.
    pub boot: Duration,
}

/// Resets an NVIDIA GPU and makes it usable:
///
/// 1. It is reset, by the first way that works ([`DeviceFile::reset_and_prove`]).
/// 2. It is in D0.
/// 3. It decodes memory: without that no register can be read.
/// 4. Its boot register names a chip, at the latest when the deadline passes ([`GPU_BOOT`]). All ones, zero and NVIDIA's pattern for
///    registers in reset may pass; a chip that is not known does not.
/// 5. It masters the bus.
///
/// `registers` are those of its BAR 0. When a step after the third fails, it is made to decode nothing and to do no DMA again.
///
/// # Errors
/// The step that failed, with what was read.
pub fn bring_up(
    device: &dyn DeviceFile,
    registers: &dyn Registers,
    clock: &dyn Clock,
) -> Result<BroughtUp, SequenceError> {
    let reset = device.reset_and_prove().map_err(|error| Problem::from(error).at(device, Step::Reset))?;
    let power = match set_power_state(device, clock, PowerState::D0) {
        Ok(change) => Some(change),
        Err(SequenceError { problem: Problem::NoPowerManagement, .. }) => None,
        Err(error) => return Err(error),
    };
    let on = || -> Result<_, SequenceError> {
        set_command(device, regs::COMMAND_MEMORY, true)
            .map_err(|problem| problem.at(device, Step::EnableMemory))?;
        let (chip, boot) =
            wait_for_chip(registers, clock).map_err(|problem| problem.at(device, Step::Boot))?;
        set_command(device, regs::COMMAND_MASTER, true)
            .map_err(|problem| problem.at(device, Step::EnableMaster))?;
        Ok((chip, boot))
    };
    match on() {
        Ok((chip, boot)) => Ok(BroughtUp { chip, reset, power, boot }),
        Err(error) => {
            let off = set_command(device, regs::COMMAND_MASTER | regs::COMMAND_MEMORY, false);
            let left = off.err().map(|problem| Box::new(problem.at(device, error.step)));
            Err(SequenceError { left, ..error })
        }
    }
}

/// Sets or clears bits of Command, and reads them back.
fn set_command(device: &dyn DeviceFile, bits: u16, on: bool) -> Result<(), Problem> {
    let before = read16(device, regs::COMMAND)?;
    if is_all_ones(before, regs::COMMAND_INTX_DISABLE) {
        return Err(Problem::AllOnes { register: "Command" });
    }
    let wrote = if on { before | bits } else { before & !bits };
    write16(device, regs::COMMAND, wrote)?;
    match read16(device, regs::COMMAND)? {
        read if is_all_ones(read, regs::COMMAND_INTX_DISABLE) => {
            Err(Problem::AllOnes { register: "Command" })
        }
        read if (read ^ wrote) & bits == 0 => Ok(()),
        read => Err(Problem::ReadBack { register: "Command", wrote, read, waited: Duration::ZERO }),
    }
}

/// Waits until the boot registers name a chip. How long that took.
fn wait_for_chip(registers: &dyn Registers, clock: &dyn Clock) -> Result<(Chip, Duration), Problem> {
    let begun = clock.now();
    loop {
        let found = identify(BootRegisters::read(registers)?);
        let waited = clock.now().saturating_sub(begun);
        match found {
            Ok(chip) => return Ok((chip, waited)),
            Err(unidentified) if waited >= GPU_BOOT || !unidentified.may_pass() => {
                return Err(Problem::Unidentified { waited, unidentified });
            }
            Err(_) => clock.sleep(BOOT_POLL),
        }
    }
}
