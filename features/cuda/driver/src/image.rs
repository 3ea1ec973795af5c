//! Images of code that programs pass by address alone: the length is in the image.
//!
//! The caller's memory is read through the kernel, so that an image whose header is corrupt is an error of its call.

use crate::{
    error::{Error, Result},
    sys::Probe,
};

/// `__fatBinC_Wrapper_t`: a program's pointer to a fat binary elsewhere.
const WRAPPER: u32 = 0x466243b1;
const FAT: u32 = 0xba55ed50;
/// Bytes of a fat binary's header, and of the part of a wrapper that is read.
const HEAD: usize = 16;
/// The most bytes of an image.
const MOST: usize = 2 << 30;

/// Returns whether these bytes begin as a fat binary.
pub(crate) fn is_fat(bytes: &[u8]) -> bool {
    magic(bytes) == Some(FAT)
}

fn magic(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    bytes.as_chunks().0.get(index).map(|bytes| u64::from_le_bytes(*bytes))
}

/// Returns the length of a fat binary from its header.
fn fat_len(bytes: &[u8]) -> Result<usize> {
    let len = || {
        let header = Some(word(bytes, 0)? >> 48).filter(|header| *header >= HEAD as u64)?;
        usize::try_from(word(bytes, 1)?.checked_add(header)?).ok().filter(|len| *len <= MOST)
    };
    len().ok_or(Error::InvalidImage)
}

/// Whether an image is in the wrapper that nvcc puts around those of programs, which their runtime loads.
pub(crate) fn is_wrapped(at: u64) -> bool {
    let bytes = Probe::new().and_then(|probe| probe.bytes(at, HEAD));
    bytes.is_ok_and(|bytes| magic(&bytes) == Some(WRAPPER))
}

/// Copies the image at an address, or that a wrapper there points to.
///
/// # Errors
/// `InvalidValue` for null, and `InvalidImage` where the image is longer than the memory that is readable.
pub(crate) fn at(mut at: u64) -> Result<Vec<u8>> {
    if at < crate::sys::LOWEST {
        return Err(Error::InvalidValue);
    }
    let probe = Probe::new()?;
    let mut bytes = probe.bytes(at, HEAD)?;
    if magic(&bytes) == Some(WRAPPER) {
        at = word(&bytes, 1).ok_or(Error::InvalidImage)?;
        bytes = probe.bytes(at, HEAD)?;
    }
    match magic(&bytes) {
        Some(WRAPPER) => Err(Error::InvalidImage),
        Some(FAT) => {
            let len = fat_len(&bytes)?;
            Some(probe.bytes(at, len)?).filter(|bytes| bytes.len() == len).ok_or(Error::InvalidImage)
        }
        _ => probe.text(at, MOST)?.ok_or(Error::InvalidImage),
    }
}

/// Cuts bytes of a known length to the image that they begin with.
///
/// # Errors
/// The image is longer than the bytes.
pub(crate) fn of(mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    let len = match magic(&bytes) {
        Some(WRAPPER) => return Err(Error::InvalidImage),
        Some(FAT) => fat_len(&bytes)?,
        _ => bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()),
    };
    if len > bytes.len() {
        return Err(Error::InvalidImage);
    }
    bytes.truncate(len);
    Ok(bytes)
}
