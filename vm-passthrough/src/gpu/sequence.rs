//! What a sequence is made of: its steps, and why one failed.

use std::time::Duration;

use thiserror::Error;

use super::identify::Unidentified;
use super::registers::RegisterError;
use crate::PciAddress;
use crate::pci::PowerState;
use crate::vfio::{CONFIG_REGION, DeviceFile, VfioError};

/// A step of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Step {
    /// The power management capability is found, and read.
    #[strum(to_string = "read the power state")]
    ReadPower,
    /// The power state is changed.
    #[strum(to_string = "change the power state")]
    ChangePower,
    /// The function is reset.
    #[strum(to_string = "reset it")]
    Reset,
    /// It is to decode memory.
    #[strum(to_string = "enable its memory")]
    EnableMemory,
    /// Its boot register says which chip it is.
    #[strum(to_string = "wait for its boot register")]
    Boot,
    /// It may do DMA and raise message signalled interrupts.
    #[strum(to_string = "enable bus mastering")]
    EnableMaster,
}

/// A step failed.
#[derive(Debug, Error)]
#[error("{address}: could not {step}: {problem}{}", still_on(.left.as_deref()))]
pub struct SequenceError {
    /// The function.
    pub address: PciAddress,
    /// The step.
    pub step: Step,
    /// What was read, or answered.
    pub problem: Problem,
    /// What could not be undone: the function still decodes memory, or masters the bus.
    pub left: Option<Box<Self>>,
}

fn still_on(left: Option<&SequenceError>) -> String {
    left.map_or_else(String::new, |left| format!("; and it could not be switched off again: {left}"))
}

/// Why a step failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Problem {
    /// VFIO did not do it.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A register could not be read.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// It has no power management.
    #[error("it has no power management capability")]
    NoPowerManagement,
    /// It is not a state that is asked for this way.
    #[error("{state} can't be asked for; D0 and D3hot can")]
    NoSuchState {
        /// The state.
        state: PowerState,
    },
    /// Config space reads all ones.
    #[error("{register} reads all ones: the function is gone, without power, or hung")]
    AllOnes {
        /// Which register.
        register: &'static str,
    },
    /// A register did not take what was written.
    #[error("{register} reads {read:#06x} after {wrote:#06x} was written, for {waited:?}")]
    ReadBack {
        /// Which register.
        register: &'static str,
        /// What was written.
        wrote: u16,
        /// What it reads.
        read: u16,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The boot register names no chip.
    #[error("after {waited:?}, {unidentified}")]
    Unidentified {
        /// How long it was waited for.
        waited: Duration,
        /// What it reads instead.
        unidentified: Unidentified,
    },
}

impl Problem {
    /// The error of a step.
    pub(super) fn at(self, device: &dyn DeviceFile, step: Step) -> SequenceError {
        SequenceError { address: device.address(), step, problem: self, left: None }
    }
}

/// Whether a register reads as that of a function that does not answer. vfio-pci answers the bits `virtual_bits` from memory.
pub(super) fn is_all_ones(value: u16, virtual_bits: u16) -> bool {
    value | virtual_bits == u16::MAX
}

pub(super) fn read16(device: &dyn DeviceFile, offset: u16) -> Result<u16, VfioError> {
    let mut value = [0; 2];
    device.read(CONFIG_REGION, offset.into(), &mut value)?;
    Ok(u16::from_le_bytes(value))
}

pub(super) fn write16(device: &dyn DeviceFile, offset: u16, value: u16) -> Result<(), VfioError> {
    device.write(CONFIG_REGION, offset.into(), &value.to_le_bytes())
}
