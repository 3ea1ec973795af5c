//! The window: memory that programs of the guest share with the accelerator.

use std::fs::OpenOptions;
use std::path::Path;

use vm_paravirt::Range;

use super::sys::Mapping;
use super::system;
use crate::Error;

/// The window, mapped. It is copied into and out of: the accelerator and other programs may write it at any time.
#[derive(Debug)]
pub struct Window {
    mapping: Mapping,
}

impl Window {
    /// Maps the first `bytes` bytes of a file: a function's BAR in sysfs, or any memory that the other side has.
    ///
    /// # Errors
    /// When it can't be opened or mapped.
    pub fn open(path: &Path, bytes: u64) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(system("opening the accelerator's window (are you root?)"))?;
        let mapping = Mapping::new(&file, bytes).map_err(system("mapping the accelerator's window"))?;
        Ok(Self { mapping })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes() as u64
    }

    /// Copies into it.
    ///
    /// # Errors
    /// [`Error::Window`] when it does not all fit behind `offset`.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.range(offset, data.len() as u64)?;
        self.mapping.write(offset as usize, data);
        Ok(())
    }

    /// Copies out of it.
    ///
    /// # Errors
    /// [`Error::Window`] when there is not so much behind `offset`.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        self.range(offset, data.len() as u64)?;
        self.mapping.read(offset as usize, data);
        Ok(())
    }

    /// A part of it, as [`import_buffer`](vm_paravirt::BatchWriter::import_buffer) takes it.
    ///
    /// # Errors
    /// [`Error::Window`] when it has no such part.
    pub fn range(&self, offset: u64, bytes: u64) -> Result<Range, Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes() => Ok(Range { address: offset, bytes }),
            _ => Err(Error::Window),
        }
    }
}
