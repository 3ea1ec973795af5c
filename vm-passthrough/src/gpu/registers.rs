//! 32-bit registers of a BAR.

use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::vfio::{DeviceFile, VfioError};

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

/// The registers of a region of an open VFIO device, by `pread` and `pwrite`: where memory decoding is off, vfio-pci answers with
/// an error, and nothing faults.
#[derive(Clone, Debug)]
pub struct RegionRegisters {
    device: Arc<dyn DeviceFile>,
    region: u32,
    size: u64,
}

impl RegionRegisters {
    /// The registers of region `region`, a BAR.
    ///
    /// # Errors
    /// When the device has no such region, or does not let it be read and written.
    pub fn new(device: Arc<dyn DeviceFile>, region: u32) -> Result<Self, VfioError> {
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
        Ok(Self { device, region, size: info.size })
    }
}

impl Registers for RegionRegisters {
    fn size(&self) -> u64 {
        self.size
    }

    fn read32(&self, offset: u64) -> Result<u32, RegisterError> {
        check(offset, self.size)?;
        let mut value = [0; 4];
        self.device.read(self.region, offset, &mut value)?;
        Ok(u32::from_le_bytes(value))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), RegisterError> {
        check(offset, self.size)?;
        Ok(self.device.write(self.region, offset, &value.to_le_bytes())?)
    }
}
