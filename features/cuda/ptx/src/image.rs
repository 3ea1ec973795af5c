//! What programs hand to a driver: text, or a fat binary with code for several architectures, of which the PTX is found.
//!
//! A fat binary is a header and entries one behind the other, each with a header of its own that says what it is (1: PTX, 2: machine
//! code), for which architecture, and whether it is packed: by LZ4, or, of CUDA 12.4 and later, by Zstandard. All of it is read
//! within the bytes that are given.

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{MAX_ENTRIES, MAX_MODULES, MAX_TEXT};
use std::io::Read;
use std::ops::Range;

/// The first bytes of a fat binary.
pub const MAGIC: u32 = 0xba55_ed50;

/// The first bytes of a library.
const LIBRARY: &[u8] = b"!<arch>\n";

const PTX: u16 = 1;
const LZ4: u64 = 0x2000;
const ZSTANDARD: u64 = 0x8000;

/// PTX of a fat binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The architecture, as 75 for sm_75.
    pub architecture: u32,
    payload: &'a [u8],
    flags: u64,
    size: u64,
}

fn wrong(what: impl Into<String>) -> Error {
    Error::at(0, ErrorKind::Image(what.into()))
}

fn number(bytes: &[u8], at: usize, size: usize) -> Result<u64> {
    let bytes = at.checked_add(size).and_then(|end| bytes.get(at..end));
    let bytes = bytes.ok_or_else(|| wrong("the fat binary is cut off"))?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// The bytes of a fat binary, its header included, as the header says: what a program registers is a pointer alone.
///
/// # Errors
///
/// The 16 bytes begin no fat binary.
pub fn size(header: &[u8]) -> Result<u64> {
    if number(header, 0, 4)? != u64::from(MAGIC) {
        return Err(wrong("no fat binary: it does not begin with 0xba55ed50"));
    }
    Ok(number(header, 6, 2)?.saturating_add(number(header, 8, 8)?))
}

/// The fat binaries of an object file for the host, or of a library of these (`ar`), each with the name of its object file.
///
/// # Errors
///
/// The file is neither, or is cut off.
pub fn objects<'a>(name: &str, file: &'a [u8]) -> Result<Vec<(String, &'a [u8])>> {
    let Some(mut rest) = file.strip_prefix(LIBRARY) else {
        return Ok(fat_binaries(file)?.into_iter().map(|image| (name.to_owned(), image)).collect());
    };
    let cut = || wrong("the library is cut off");
    let mut found = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<60>() {
        let field = |range: Range<usize>| str::from_utf8(&head[range]).map(str::trim_end).unwrap_or_default();
        let size = field(48..58).parse::<usize>().map_err(|_| cut())?;
        let member = behind.get(..size).ok_or_else(cut)?;
        // The symbols and the long names of the library are members too.
        if member.starts_with(b"\x7fELF") {
            let name = format!("{name}:{}", field(0..16).trim_end_matches('/'));
            found.extend(fat_binaries(member)?.into_iter().map(|image| (name.clone(), image)));
        }
        if found.len() > MAX_MODULES {
            return Err(Error::large(0, "modules in a link", MAX_MODULES));
        }
        rest = behind.get(size.next_multiple_of(2)..).unwrap_or_default();
    }
    Ok(found)
}

/// The fat binaries in the sections of an ELF file of 64 bits.
fn fat_binaries(file: &[u8]) -> Result<Vec<&[u8]>> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return Err(wrong("no object file: it does not begin as ELF of 64 bits"));
    }
    let (table, size, count) = (number(file, 40, 8)? as usize, number(file, 58, 2)?, number(file, 60, 2)?);
    let mut found = Vec::new();
    for section in 0..count {
        let head = table.saturating_add((section * size) as usize);
        let field = |at: usize, size| number(file, head.saturating_add(at), size);
        /// A section without bytes in the file.
        const EMPTY: u64 = 8;
        if field(4, 4)? == EMPTY {
            continue;
        }
        let start = field(24, 8)? as usize;
        let end = start.saturating_add(field(32, 8)? as usize);
        let mut bytes = file.get(start..end).ok_or_else(|| wrong("the object file is cut off"))?;
        while bytes.starts_with(&MAGIC.to_le_bytes()) {
            let end = usize::try_from(self::size(bytes)?).unwrap_or(usize::MAX);
            let image = bytes.get(..end).filter(|image| !image.is_empty());
            found.push(image.ok_or_else(|| wrong("the fat binary is cut off"))?);
            if found.len() > MAX_MODULES {
                return Err(Error::large(0, "modules in a link", MAX_MODULES));
            }
            bytes = bytes.get(end.next_multiple_of(8)..).unwrap_or_default();
        }
    }
    Ok(found)
}

/// The PTX of a fat binary.
///
/// # Errors
///
/// It is none, or is cut off.
pub fn entries(image: &[u8]) -> Result<Vec<Entry<'_>>> {
    let end = usize::try_from(size(image)?).unwrap_or(usize::MAX);
    let image = image.get(..end).ok_or_else(|| wrong("the fat binary is cut off"))?;
    let mut at = number(image, 6, 2)? as usize;
    let mut found = Vec::new();
    let mut count = 0;
    while at < image.len() {
        count += 1;
        if count > MAX_ENTRIES {
            return Err(Error::large(0, "entries in a fat binary", MAX_ENTRIES));
        }
        let entry = &image[at..];
        let kind = number(entry, 0, 2)? as u16;
        let header = number(entry, 4, 4)? as usize;
        let length = number(entry, 8, 8)? as usize;
        let packed = number(entry, 16, 4)? as usize;
        let (architecture, flags) = (number(entry, 28, 4)? as u32, number(entry, 40, 8)?);
        let payload = header.checked_add(length).and_then(|end| entry.get(header..end));
        let payload =
            payload.filter(|_| header >= 64).ok_or_else(|| wrong("an entry of the fat binary is cut off"))?;
        if kind == PTX {
            let is_packed = flags & (LZ4 | ZSTANDARD) != 0;
            let payload = if is_packed { payload.get(..packed).unwrap_or(payload) } else { payload };
            found.push(Entry { architecture, payload, flags, size: number(entry, 56, 8)? });
        }
        at = at.saturating_add(header + length);
    }
    Ok(found)
}

impl Entry<'_> {
    /// Its text.
    ///
    /// # Errors
    ///
    /// It is longer than a module may be, or what is packed is damaged.
    pub fn text(&self) -> Result<String> {
        let bytes = match self.flags & (LZ4 | ZSTANDARD) {
            0 => self.payload.to_vec(),
            LZ4 => {
                let size = usize::try_from(self.size).ok().filter(|size| *size <= MAX_TEXT);
                let size = size.ok_or_else(|| Error::large(0, "bytes", MAX_TEXT))?;
                let mut bytes = vec![0; size];
                let length = lz4_flex::block::decompress_into(self.payload, &mut bytes)
                    .map_err(|error| wrong(format!("an entry of the fat binary: {error}")))?;
                bytes.truncate(length);
                bytes
            }
            _ => {
                let damaged =
                    |error: &dyn std::fmt::Display| wrong(format!("an entry of the fat binary: {error}"));
                let mut decoder =
                    ruzstd::decoding::StreamingDecoder::new(self.payload).map_err(|error| damaged(&error))?;
                let mut bytes = Vec::new();
                decoder
                    .by_ref()
                    .take(MAX_TEXT as u64 + 1)
                    .read_to_end(&mut bytes)
                    .map_err(|error| damaged(&error))?;
                bytes
            }
        };
        text_of(&bytes)
    }
}

/// Text, which may end with zeros.
fn text_of(bytes: &[u8]) -> Result<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    if end > MAX_TEXT {
        return Err(Error::large(0, "bytes", MAX_TEXT));
    }
    let text = std::str::from_utf8(&bytes[..end]);
    text.map(str::to_owned).map_err(|_| wrong("the PTX is no text"))
}

/// The PTX of an image that a program loads: text, or of a fat binary what is for the newest architecture up to the one given (as 75
/// for sm_75).
///
/// # Errors
///
/// There is none, or it is damaged.
pub fn ptx(image: &[u8], architecture: u32) -> Result<String> {
    if image.starts_with(b"\x7fELF") {
        return Err(wrong(
            "machine code of a GPU, without PTX; compile for compute_75 or another virtual architecture too",
        ));
    }
    if !image.starts_with(&MAGIC.to_le_bytes()) {
        return text_of(image);
    }
    let all = entries(image)?;
    let fits = all.iter().filter(|entry| entry.architecture <= architecture);
    match fits.max_by_key(|entry| entry.architecture) {
        Some(entry) => entry.text(),
        None if all.is_empty() => Err(wrong("the fat binary has machine code of GPUs alone, and no PTX")),
        None => {
            Err(wrong(format!("the PTX of the fat binary is for architectures newer than sm_{architecture}")))
        }
    }
}
