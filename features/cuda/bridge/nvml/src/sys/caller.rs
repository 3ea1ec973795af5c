//! Memory that a caller passes, by its address. Callers of C pass as much as NVML's documentation says, as they must with NVIDIA's; a null pointer is
//! looked for before.

use std::ffi::{CStr, c_char};

/// Writes bytes to where the caller wants them.
pub(crate) fn write(at: usize, bytes: &[u8]) {
    // SAFETY: the caller has room for so many bytes there.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
}

/// A number of 32 bits of the caller's.
pub(crate) fn number(at: usize) -> u32 {
    // SAFETY: the caller has one there.
    unsafe { std::ptr::read_unaligned(at as *const u32) }
}

/// So many bytes of the caller's.
pub(crate) fn bytes(at: usize, len: usize) -> Vec<u8> {
    // SAFETY: the caller has so many bytes there, which NVML writes.
    unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec()
}

/// The caller's string.
pub(crate) fn text<'a>(at: usize) -> &'a [u8] {
    // SAFETY: the caller passes a string.
    unsafe { CStr::from_ptr(at as *const c_char) }.to_bytes()
}
