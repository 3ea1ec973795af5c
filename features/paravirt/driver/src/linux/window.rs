//! The window: memory that programs of the guest share with the accelerator.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vm_paravirt::Range;

use super::sys::{self, Mapping};
use super::system;
use crate::Error;

/// Parts begin at multiples of it: a page, which is what buffers are mapped by.
const STEP: u64 = 4096;

/// The window, mapped. All programs that map it see all of it: each works in [parts](Window::take) that no other has.
#[derive(Clone, Debug)]
pub struct Window {
    mapping: Arc<Mapping>,
    path: PathBuf,
}

impl Window {
    /// Maps the first `bytes` bytes of a file: a function's BAR in sysfs, or any memory that the other side has.
    ///
    /// # Errors
    /// When it can't be opened or mapped.
    pub fn open(path: impl Into<PathBuf>, bytes: u64) -> Result<Self, Error> {
        let path = path.into();
        let mapping =
            Mapping::new(&open(&path)?, bytes).map_err(system("mapping the accelerator's window"))?;
        Ok(Self { mapping: Arc::new(mapping), path })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes() as u64
    }

    /// Where this program has it mapped. It stays there as long as a clone of this, or a part of it.
    pub fn address(&self) -> u64 {
        self.mapping.address() as u64
    }

    /// Takes the first free part of N bytes. No other taker gets it, in this program or another, until it is
    /// dropped or its program has ended; that is an agreement between those who ask this way, which the host knows nothing
    /// of.
    ///
    /// # Errors
    /// [`Error::WindowFull`]; the Linux kernel's.
    pub fn take(&self, bytes: u64) -> Result<Part, Error> {
        let file = open(&self.path)?;
        let mut offset = 0u64;
        loop {
            if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
                return Err(Error::WindowFull);
            }
            match sys::lock(&file, offset, bytes).map_err(system("taking a part of the window"))? {
                None => return Ok(Part { window: self.clone(), offset, bytes, _lock: file }),
                Some(end) => {
                    offset = end.checked_next_multiple_of(STEP).ok_or(Error::WindowFull)?;
                }
            }
        }
    }
}

fn open(path: &Path) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(system("opening the accelerator's window (are you root?)"))
}

/// A part of the window. It is copied into and out of: the accelerator may write it at any time. Drop it only when no buffer
/// lies over it any more.
#[derive(Debug)]
pub struct Part {
    window: Window,
    offset: u64,
    bytes: u64,
    /// Open for as long as it holds the range.
    _lock: File,
}

impl Part {
    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it begins in the window.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Copies into it.
    ///
    /// # Errors
    /// [`Error::Window`] when it does not all fit behind `offset`.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let range = self.range(offset, data.len() as u64)?;
        self.window.mapping.write(range.address as usize, data);
        Ok(())
    }

    /// Copies out of it.
    ///
    /// # Errors
    /// [`Error::Window`] when there is not so much behind `offset`.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        let range = self.range(offset, data.len() as u64)?;
        self.window.mapping.read(range.address as usize, data);
        Ok(())
    }

    /// Some of it, as [`import_buffer`](vm_paravirt::BatchWriter::import_buffer) takes it.
    ///
    /// # Errors
    /// [`Error::Window`] when it has not so much behind `offset`.
    pub fn range(&self, offset: u64, bytes: u64) -> Result<Range, Error> {
        match offset.checked_add(bytes) {
            // It lies in the window, so the sum does too.
            Some(end) if end <= self.bytes => Ok(Range { address: self.offset + offset, bytes }),
            _ => Err(Error::Window),
        }
    }
}
