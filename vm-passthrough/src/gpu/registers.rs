//! 32-bit registers of a BAR.

use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;

use super::power::power_state;
use super::sequence::{Problem, SequenceError, is_all_ones, read16};
use crate::pci::{PowerState, regs};
use crate::vfio::{DeviceFile, Mapping, VfioError, load_u32, store_u32};

/// The 32-bit little-endian registers of one BAR.
pub trait Registers: fmt::Debug + Send + Sync {
    /// Size of the BAR in bytes.
    fn size(&self) -> u64;
    /// Reads the register at `offset`, in bytes from the start of the BAR.
    ///
    /// # Errors
    /// When there is no register, or the function does not answer.
    fn read32(&self, offset: u64) -> Result<u32, RegisterError>;
    /// Writes the register at `offset`.
    ///
    /// # Errors
    /// As for reads, and where registers are only read.
    fn write32(&self, offset: u64, value: u32) -> Result<(), RegisterError>;
}

/// Why a register was not read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A register is 4 bytes at a multiple of 4.
    #[error("{offset:#x} is no register's offset, which is a multiple of 4")]
    Misaligned {
        /// Offset in bytes.
        offset: u64,
    },
    /// It lies outside of the BAR.
    #[error("the register at {offset:#x} is outside of the BAR, which has {size:#x} bytes")]
    Outside {
        /// Offset in bytes.
        offset: u64,
        /// Bytes of the BAR.
        size: u64,
    },
    /// They can't be written this way.
    #[error("the register at {offset:#x} can't be written: {reason}")]
    ReadOnly {
        /// Offset in bytes.
        offset: u64,
        /// Why not.
        reason: &'static str,
    },
    /// VFIO did not do it.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// The mapping was not accessed.
    #[error("the register at {offset:#x} can't be accessed: {source}")]
    Mapping {
        /// Offset in bytes.
        offset: u64,
        /// What the system answered.
        source: io::Error,
    },
}

/// Whether a register is at `offset` of a BAR of `size` bytes.
pub(crate) fn check(offset: u64, size: u64) -> Result<(), RegisterError> {
    if !offset.is_multiple_of(4) {
        return Err(RegisterError::Misaligned { offset });
    }
    match offset.checked_add(4) {
        Some(end) if end <= size => Ok(()),
        _ => Err(RegisterError::Outside { offset, size }),
    }
}

/// The registers of a region of an open VFIO device.
///
/// [`new`](Self::new) reaches them by `pread` and `pwrite`: where the function does not decode memory, vfio-pci answers with an
/// error, and nothing faults. It is for functions that are brought up, reset or put to sleep. [`mapped`](Self::mapped) reaches
/// them with no system call.
#[derive(Clone, Debug)]
pub struct RegionRegisters {
    device: Arc<dyn DeviceFile>,
    region: u32,
    size: u64,
    /// Parts that are mapped, by their offset, sorted.
    maps: Vec<(u64, Arc<dyn Mapping>)>,
}

impl RegionRegisters {
    /// The registers of region `region`, a BAR.
    ///
    /// # Errors
    /// When the device has no such region, or does not let it be read and written.
    pub fn new(device: Arc<dyn DeviceFile>, region: u32) -> Result<Self, VfioError> {
        Self::of(device, region).map(|(registers, _)| registers)
    }

    /// As [`new`](Self::new), for a function that is up: what VFIO lets be mapped of the region is mapped, and accessed by 32-bit
    /// loads and stores. What it keeps, as the pages of MSI-X tables before Linux 4.16, or a BAR that shares its page, is reached by
    /// `pread` and `pwrite` still.
    ///
    /// It is to be dropped before the function is put to sleep or its memory decoding is turned off: the Linux kernel ends a process
    /// that accesses the mapping then (SIGBUS). Resets through VFIO are waited for by the access.
    ///
    /// # Errors
    /// As for [`new`](Self::new); when the function does not decode memory or is not in D0; when the Linux kernel does not map it.
    pub fn mapped(device: Arc<dyn DeviceFile>, region: u32) -> Result<Self, VfioError> {
        let (mut registers, mappable) = Self::of(device, region)?;
        registers.check_up()?;
        for (start, len) in mappable {
            registers.maps.push((start, registers.device.map(region, start, len)?));
        }
        Ok(registers)
    }

    /// How many bytes of them are reached with no system call.
    pub fn mapped_bytes(&self) -> u64 {
        self.maps.iter().map(|(_, map)| map.len()).sum()
    }

    /// The registers, none of them mapped, and what can be.
    fn of(device: Arc<dyn DeviceFile>, region: u32) -> Result<(Self, Vec<(u64, u64)>), VfioError> {
        let info = device.region(region)?;
        if info.size == 0 || !info.readable || !info.writable {
            return Err(VfioError::Unavailable {
                address: device.address(),
                reason: format!(
                    "region {region} holds no registers: {} bytes, readable {}, writable {}",
                    info.size, info.readable, info.writable
                ),
            });
        }
        Ok((Self { device, region, size: info.size, maps: Vec::new() }, info.mappable))
    }

    /// Refuses a function whose mapping would fault.
    fn check_up(&self) -> Result<(), VfioError> {
        let command = read16(&*self.device, regs::COMMAND)?;
        let reason = match power_state(&*self.device) {
            _ if is_all_ones(command, regs::COMMAND_INTX_DISABLE) || command & regs::COMMAND_MEMORY == 0 => {
                format!("it does not decode memory (Command reads {command:#06x})")
            }
            Ok(PowerState::D0) | Err(SequenceError { problem: Problem::NoPowerManagement, .. }) => {
                return Ok(());
            }
            Ok(state) => format!("it is in {state}"),
            Err(error) => error.to_string(),
        };
        let reason = format!("its registers can't be mapped: {reason}; bring it up first");
        Err(VfioError::Unavailable { address: self.device.address(), reason })
    }

    /// The mapping that has a register, and where in it.
    fn find(&self, offset: u64) -> Option<(&dyn Mapping, u64)> {
        let (start, map) =
            self.maps.get(self.maps.partition_point(|(start, _)| *start <= offset).checked_sub(1)?)?;
        let inside = offset - start;
        inside.checked_add(4).is_some_and(|end| end <= map.len()).then_some((&**map, inside))
    }
}

impl Registers for RegionRegisters {
    fn size(&self) -> u64 {
        self.size
    }

    fn read32(&self, offset: u64) -> Result<u32, RegisterError> {
        check(offset, self.size)?;
        if let Some((map, inside)) = self.find(offset) {
            return load_u32(map, inside).map_err(|source| RegisterError::Mapping { offset, source });
        }
        let mut value = [0; 4];
        self.device.read(self.region, offset, &mut value)?;
        Ok(u32::from_le_bytes(value))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), RegisterError> {
        check(offset, self.size)?;
        if let Some((map, inside)) = self.find(offset) {
            return store_u32(map, inside, value).map_err(|source| RegisterError::Mapping { offset, source });
        }
        Ok(self.device.write(self.region, offset, &value.to_le_bytes())?)
    }
}
