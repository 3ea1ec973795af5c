//! Memory that a caller passes, by its address. The driver's documentation says of each pointer what it points to; callers of C keep to that, as
//! they must with the driver, and a null pointer is looked for before.

use std::ffi::{CStr, c_char};

use vm_bridge::wire::image::{self, HEAD, Shape};

/// So many bytes of the caller's.
pub(crate) fn bytes<'a>(at: usize, len: usize) -> &'a [u8] {
    if at == 0 || len == 0 {
        return &[];
    }
    // SAFETY: the caller has so many bytes there, and waits until the call returns.
    unsafe { std::slice::from_raw_parts(at as *const u8, len) }
}

/// So many bytes of the caller's, which the call writes.
pub(crate) fn bytes_mut<'a>(at: usize, len: usize) -> &'a mut [u8] {
    if at == 0 || len == 0 {
        return &mut [];
    }
    // SAFETY: the caller has so many bytes there, waits until the call returns, and uses them for nothing else meanwhile.
    unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
}

/// Writes bytes to where the caller wants them.
pub(crate) fn write_bytes(at: usize, bytes: &[u8]) {
    if at != 0 {
        // SAFETY: the caller has room for so many bytes there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
    }
}

/// A word of the caller's.
pub(crate) fn word(at: usize) -> u64 {
    bytes(at, 8).first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// A number of 32 bits of the caller's.
pub(crate) fn half(at: usize) -> u32 {
    bytes(at, 4).first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// Writes a word.
pub(crate) fn write(at: usize, word: u64) {
    write_bytes(at, &word.to_ne_bytes());
}

/// Writes a number of 32 bits.
pub(crate) fn write_half(at: usize, half: u32) {
    write_bytes(at, &half.to_ne_bytes());
}

/// So many bytes that wait in a stream of the caller's, which it keeps.
pub(crate) fn peek<const LEN: usize>(stream: i32) -> Option<[u8; LEN]> {
    let mut bytes = [0; LEN];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: it writes into these bytes alone, whatever the number is.
    let read = unsafe { libc::recv(stream, bytes.as_mut_ptr().cast(), LEN, flags) };
    (read == LEN as isize).then_some(bytes)
}

/// The caller's string, with its zero.
pub(crate) fn text<'a>(at: usize) -> Option<&'a [u8]> {
    if at == 0 {
        return None;
    }
    // SAFETY: the caller passes a string.
    Some(unsafe { CStr::from_ptr(at as *const c_char) }.to_bytes_with_nul())
}

/// The image at an address: as much of it as it says.
pub(crate) fn image<'a>(at: usize) -> Option<&'a [u8]> {
    const DATA: usize = 8;
    let magic = *bytes(at, 4).first_chunk()?;
    match image::shape(magic) {
        Shape::Text => text(at),
        Shape::Wrapper => {
            let inner = word(at + DATA) as usize;
            let magic = *bytes(inner, 4).first_chunk()?;
            if image::shape(magic) == Shape::Wrapper { None } else { image(inner) }
        }
        Shape::Fat | Shape::Elf => {
            let looked = image::looked_at(bytes(at, HEAD).first_chunk()?)?;
            Some(bytes(at, image::len(bytes(at, looked))?))
        }
    }
}

/// Copies within the caller's memory; the two may overlap.
pub(crate) fn copy(to: usize, from: usize, len: usize) {
    // SAFETY: the caller has so many bytes at both.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
}
