//! The headers of a 64-bit x86 ELF file (System V ABI, "ELF Header" and "Program Header").

use thiserror::Error;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;

/// What is needed of the headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Headers {
    /// Where the program is entered.
    pub(super) entry: u64,
    /// What is loaded.
    pub(super) segments: Vec<Segment>,
    /// First offset after all that the file's headers speak of.
    pub(super) file_end: u64,
}

/// A program header of type `PT_LOAD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Where it is in the file.
    pub(super) offset: u64,
    /// Where it is loaded, physically.
    pub(super) address: u64,
    /// Bytes in the file.
    pub(super) in_file: u64,
    /// Bytes in memory, of which those that are not in the file are zero.
    pub(super) in_memory: u64,
}

/// Why bytes are not the beginning of a program that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum Unfit {
    /// There are too few of them.
    #[error("it ends within its ELF headers")]
    Short,
    /// They are something else.
    #[error("{0}")]
    Other(String),
}

impl Segment {
    /// Bytes that it takes in RAM.
    pub(super) fn size(&self) -> u64 {
        self.in_memory.max(self.in_file)
    }
}

impl Headers {
    /// Where two segments overlap that both lie in RAM. Those of a linker never do, and without any the bytes that are
    /// loaded are bounded by RAM.
    pub(super) fn overlap(&self) -> Option<u64> {
        let mut ranges: Vec<_> =
            self.segments.iter().map(|segment| (segment.address, segment.size())).collect();
        ranges.retain(|&(_, size)| size > 0);
        ranges.sort_unstable();
        ranges.windows(2).find_map(|pair| match pair {
            [(start, size), (next, _)] if start.saturating_add(*size) > *next => Some(*next),
            _ => None,
        })
    }

    /// Whether the entry point lies in a segment.
    pub(super) fn enters_a_segment(&self) -> bool {
        self.segments.iter().any(|segment| {
            self.entry.checked_sub(segment.address).is_some_and(|offset| offset < segment.size())
        })
    }
}

/// Reads the headers from the beginning of a file.
///
/// # Errors
/// [`Unfit::Short`] when more of the file is needed.
pub(super) fn parse(file: &[u8]) -> Result<Headers, Unfit> {
    let other = |what: String| Err(Unfit::Other(what));
    let header: &[u8; HEADER] = file.first_chunk().ok_or(Unfit::Short)?;
    if !header.starts_with(b"\x7fELF") || header[4] != 2 || header[5] != 1 {
        return other("it is not a 64-bit little-endian ELF file".into());
    }
    if u16_at(header, 18) != EM_X86_64 {
        return other(format!("it is for ELF machine {}, not x86-64", u16_at(header, 18)));
    }
    if usize::from(u16_at(header, 54)) != PROGRAM_HEADER {
        return other("its program headers are not of the size of ELF-64".into());
    }
    let (entry, table, sections) = (u64_at(header, 24), u64_at(header, 32), u64_at(header, 40));
    let table_len = u64::from(u16_at(header, 56)) * PROGRAM_HEADER as u64;
    let sections_len = u64::from(u16_at(header, 58)) * u64::from(u16_at(header, 60));
    let (Some(table_end), Some(sections_end)) =
        (table.checked_add(table_len), sections.checked_add(sections_len))
    else {
        return other("its tables are beyond any file's end".into());
    };
    let range = usize::try_from(table).ok().zip(usize::try_from(table_end).ok());
    let table = range.and_then(|(start, end)| file.get(start..end)).ok_or(Unfit::Short)?;
    let mut headers = Headers { entry, segments: Vec::new(), file_end: table_end.max(sections_end) };
    for header in table.chunks_exact(PROGRAM_HEADER) {
        let segment = Segment {
            offset: u64_at(header, 8),
            address: u64_at(header, 24),
            in_file: u64_at(header, 32),
            in_memory: u64_at(header, 40),
        };
        if u32::from_le_bytes([header[0], header[1], header[2], header[3]]) != PT_LOAD {
            continue;
        }
        let Some(end) = segment.offset.checked_add(segment.in_file) else {
            return other("a segment is beyond any file's end".into());
        };
        headers.file_end = headers.file_end.max(end);
        headers.segments.push(segment);
    }
    if headers.segments.is_empty() {
        return other("it has no segment to load".into());
    }
    Ok(headers)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}
