//! Power states of a function, through its power management capability (PCI Bus Power Management Interface 1.2, 3.2), with the
//! waits that this asks for, and read back.
//!
//! Behind VFIO the capability is vfio-pci's: a write has Linux change the state, which restores config space when the function
//! has lost it.

use std::time::Duration;

use super::clock::Clock;
use super::sequence::{Problem, SequenceError, Step, is_all_ones, read16, write16};
use crate::deadlines::WAKE;
use crate::pci::config::walk_capabilities;
use crate::pci::{PowerState, regs};
use crate::vfio::{DeviceFile, VfioError};

/// How long config space may not be touched after a change to or from D3hot (PCI Bus Power Management Interface 1.2, state
/// transition delays; PCI Express Base 6.0, 5.9).
const D3HOT_DELAY: Duration = Duration::from_millis(10);
/// The same from D2.
const D2_DELAY: Duration = Duration::from_micros(200);
/// Longest time between two looks.
const LONGEST_POLL: Duration = Duration::from_millis(200);

/// What a change of the power state came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerChange {
    /// The state before.
    pub from: PowerState,
    /// The state now.
    pub to: PowerState,
    /// Whether the function has reset itself on its way to D0, and forgotten what its registers held (`No_Soft_Reset` is 0).
    pub lost_context: bool,
}

/// The power state that a function itself says it is in.
///
/// # Errors
/// When it does not answer, or has no power management.
pub fn power_state(device: &dyn DeviceFile) -> Result<PowerState, SequenceError> {
    read(device).map(|(_, control)| state(control)).map_err(|problem| problem.at(device, Step::ReadPower))
}

/// Puts a function into D0 or D3hot, and reads that back. In the state already, it is left alone.
///
/// # Errors
/// When it has no power management, does not answer, or is in another state still when the deadline passes ([`WAKE`]).
pub fn set_power_state(
    device: &dyn DeviceFile,
    clock: &dyn Clock,
    to: PowerState,
) -> Result<PowerChange, SequenceError> {
    let bits = match to {
        PowerState::D0 => 0,
        PowerState::D3Hot => regs::PM_CTRL_D3HOT,
        state => return Err(Problem::NoSuchState { state }.at(device, Step::ChangePower)),
    };
    let (register, control) = read(device).map_err(|problem| problem.at(device, Step::ReadPower))?;
    let from = state(control);
    if from == to {
        return Ok(PowerChange { from, to, lost_context: false });
    }
    change(device, clock, register, control, bits)
        .map_err(|problem| problem.at(device, Step::ChangePower))?;
    let lost_context = from == PowerState::D3Hot && control & regs::PM_CTRL_NO_SOFT_RESET == 0;
    Ok(PowerChange { from, to, lost_context })
}

/// Bits of Control and Status that vfio-pci answers from memory.
const PME: u16 = regs::PM_CTRL_PME_ENABLE | regs::PM_CTRL_PME_STATUS;

/// Where Control and Status is, and what it reads.
fn read(device: &dyn DeviceFile) -> Result<(u16, u16), Problem> {
    let capabilities = walk_capabilities::<VfioError>(|offset| read16(device, offset))?;
    let Some(pm) = capabilities.iter().find(|capability| capability.id == regs::CAP_ID_PM) else {
        return Err(match read16(device, regs::STATUS)? {
            status if is_all_ones(status, regs::STATUS_CAP_LIST) => Problem::AllOnes { register: "Status" },
            _ => Problem::NoPowerManagement,
        });
    };
    let register = u16::from(pm.offset) + regs::PM_CTRL;
    match read16(device, register)? {
        control if is_all_ones(control, PME) => {
            Err(Problem::AllOnes { register: "Power Management Control" })
        }
        control => Ok((register, control)),
    }
}

fn change(
    device: &dyn DeviceFile,
    clock: &dyn Clock,
    register: u16,
    control: u16,
    bits: u16,
) -> Result<(), Problem> {
    // A 1 in PME_Status would clear it.
    let wrote = control & !(regs::PM_CTRL_STATE_MASK | regs::PM_CTRL_PME_STATUS) | bits;
    let begun = clock.now();
    write16(device, register, wrote)?;
    let deepest = bits.max(control & regs::PM_CTRL_STATE_MASK);
    let mut delay = if deepest == regs::PM_CTRL_D3HOT { D3HOT_DELAY } else { D2_DELAY };
    loop {
        clock.sleep(delay);
        let read = read16(device, register)?;
        if !is_all_ones(read, PME) && read & regs::PM_CTRL_STATE_MASK == bits {
            return Ok(());
        }
        let waited = clock.now().saturating_sub(begun);
        if waited >= WAKE {
            return Err(match read {
                read if is_all_ones(read, PME) => Problem::AllOnes { register: "Power Management Control" },
                read => Problem::ReadBack { register: "Power Management Control", wrote, read, waited },
            });
        }
        delay = (delay * 2).min(LONGEST_POLL);
    }
}

fn state(control: u16) -> PowerState {
    match control & regs::PM_CTRL_STATE_MASK {
        0 => PowerState::D0,
        1 => PowerState::D1,
        2 => PowerState::D2,
        _ => PowerState::D3Hot,
    }
}
