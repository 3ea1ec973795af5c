//! What can be said of a GPU's chip without taking it from its driver.

use thiserror::Error;

use super::identify::{BOOT_42, BootRegisters, Chip, Unidentified, chip_by_name, identify};
use super::registers::RegisterError;
use super::resource::{NotReadable, ResourceRegisters};
use crate::Host;
use crate::pci::{DeviceType, PciFunction};

/// What is known of a GPU's chip.
#[derive(Debug)]
pub struct ChipReport {
    /// The chip that the PCI ID database has for its numbers.
    pub named: Option<&'static str>,
    /// What its boot registers read, where they were.
    pub boot: Option<BootRegisters>,
    /// What they say.
    pub chip: Result<Chip, NoChip>,
}

/// Why nothing is said of a chip.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NoChip {
    /// Its registers are not known here.
    #[error("its registers are not read, which is done of NVIDIA's GPUs alone")]
    NotNvidia,
    /// They can't be read now.
    #[error(transparent)]
    NotReadable(#[from] NotReadable),
    /// One could not be read.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// They say nothing.
    #[error(transparent)]
    Unidentified(#[from] Unidentified),
}

/// Reads the boot registers of a GPU of NVIDIA's that a driver of the host may have, through sysfs, and says which chip it is. It
/// changes nothing, and touches the function only where that is safe ([`ResourceRegisters::open`]).
pub fn report_chip(host: &Host, function: &PciFunction) -> ChipReport {
    let mut boot = None;
    let chip = (|| {
        if function.device_type != DeviceType::GpuNvidia {
            return Err(NoChip::NotNvidia);
        }
        let registers = ResourceRegisters::open(host, function, 0, BOOT_42 + 4)?;
        let read = BootRegisters::read(&registers)?;
        boot = Some(read);
        Ok(identify(read)?)
    })();
    ChipReport { named: chip_by_name(function), boot, chip }
}
