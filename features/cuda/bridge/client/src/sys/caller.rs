//! Memory that a caller passes, by its address. The driver's documentation says of each pointer what it points to; callers of C keep to that, as
//! they must with the driver, and a null pointer is looked for before.

use std::ffi::{CStr, c_char};

use vm_bridge::wire::image::{self, FAT_HEAD, HEAD, Shape};
use vm_bridge::wire::{IMAGE, code};

use super::{PAGE, there};

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

/// Returns the image at an address, with the length that its header gives.
///
/// # Errors
/// `INVALID_VALUE` for null, and `INVALID_IMAGE` if the image cannot be read or is longer than [`IMAGE`].
pub(crate) fn image<'a>(at: usize) -> Result<&'a [u8], u32> {
    const DATA: usize = 8;
    if at < PAGE {
        return Err(code::INVALID_VALUE);
    }
    let inner = match shape(at) {
        Some(Shape::Wrapper) => readable(at, DATA + 8).map(|_| word(at + DATA) as usize),
        _ => Some(at),
    };
    inner.and_then(bare_image).ok_or(code::INVALID_IMAGE)
}

/// Returns `len` bytes of the caller's if all can be read and an image may have so many.
fn readable<'a>(at: usize, len: usize) -> Option<&'a [u8]> {
    (len <= IMAGE && there::can_be_read(at, len)).then(|| bytes(at, len))
}

fn shape(at: usize) -> Option<Shape> {
    Some(image::shape(*readable(at, 4)?.first_chunk()?))
}

/// The image at an address where no wrapper is.
fn bare_image<'a>(at: usize) -> Option<&'a [u8]> {
    match shape(at)? {
        Shape::Wrapper => None,
        Shape::Text => {
            let mut len = 0;
            loop {
                let part = PAGE - (at + len) % PAGE;
                let end = readable(at + len, part)?.iter().position(|byte| *byte == 0);
                len += end.map_or(part, |end| end + 1);
                if end.is_some() || len > IMAGE {
                    return readable(at, len);
                }
            }
        }
        of @ (Shape::Fat | Shape::Elf) => {
            let head = if of == Shape::Fat { FAT_HEAD } else { HEAD };
            let looked = image::looked_at(readable(at, head)?)?;
            readable(at, image::len(readable(at, looked)?)?)
        }
    }
}

/// Copies within the caller's memory; the two may overlap.
pub(crate) fn copy(to: usize, from: usize, len: usize) {
    // SAFETY: the caller has so many bytes at both.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
}
