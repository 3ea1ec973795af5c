//! The guest's RAM as the worker has it: memfds, one for each part.

use std::fs::File;
use std::os::fd::OwnedFd;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use vm_paravirt::{Range, Status};

use super::server::Failure;
use crate::accelerators::sys::Window;

const PAGE: u64 = 4096;

/// The guest's RAM.
#[derive(Debug)]
pub(super) struct Ram {
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    start: u64,
    bytes: u64,
    file: File,
}

/// A piece of a file: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    part: usize,
    offset: u64,
    bytes: u64,
}

impl Ram {
    /// The RAM whose parts (address and length) are in these files.
    ///
    /// # Errors
    /// When the numbers differ.
    pub(super) fn new(parts: &[(u64, u64)], files: Vec<OwnedFd>) -> Result<Self, String> {
        if parts.len() != files.len() {
            return Err(format!("{} parts of RAM and {} files", parts.len(), files.len()));
        }
        let parts = parts
            .iter()
            .zip(files)
            .map(|(&(start, bytes), file)| Part { start, bytes, file: file.into() })
            .collect();
        Ok(Self { parts })
    }

    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// All of it, for the queue.
    ///
    /// # Errors
    /// When it can't be mapped.
    pub(super) fn map(&self) -> Result<GuestMemoryMmap, String> {
        let regions = self
            .parts
            .iter()
            .map(|part| {
                let file = part.file.try_clone().map_err(|error| error.to_string())?;
                let bytes = usize::try_from(part.bytes).map_err(|error| error.to_string())?;
                let region = MmapRegionBuilder::new(bytes)
                    .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                    .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                    .with_file_offset(FileOffset::new(file, 0))
                    .build()
                    .map_err(|error| error.to_string())?;
                GuestRegionMmap::new(region, GuestAddress(part.start))
                    .ok_or_else(|| "it passes the end of the address space".to_owned())
            })
            .collect::<Result<Vec<_>, String>>()?;
        GuestMemoryMmap::from_regions(regions).map_err(|error| error.to_string())
    }

    /// Maps ranges one behind the other. Answers with the mapping, and where in it the first range begins.
    ///
    /// # Errors
    /// [`Status::Range`] when not all of it is the guest's RAM, or a range does not end where a page does;
    /// [`Status::Device`] when it can't be mapped.
    pub(super) fn window(&self, ranges: impl Iterator<Item = Range>) -> Result<(Window, u64), Failure> {
        let (pieces, offset) = self.pieces(ranges)?;
        let files = pieces.iter().filter_map(|piece| {
            let part = self.parts.get(piece.part)?;
            Some((&part.file, piece.offset, piece.bytes))
        });
        let window = Window::map(files).map_err(|error| (Status::Device, error.to_string()))?;
        Ok((window, offset))
    }

    /// The pages that ranges lie in, neighbours put together, and where in the first page they begin.
    fn pieces(&self, ranges: impl Iterator<Item = Range>) -> Result<(Vec<Piece>, u64), Failure> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut first = None;
        // Whether the range before ended within a page.
        let mut ragged = false;
        for range in ranges {
            let bad = |what: &str| {
                (Status::Range, format!("{:#x} bytes at {:#x} {what}", range.bytes, range.address))
            };
            let end = range.address.checked_add(range.bytes).filter(|_| range.bytes > 0);
            let end = end.ok_or_else(|| bad("are no range"))?;
            if ragged || first.is_some() && !range.address.is_multiple_of(PAGE) {
                return Err(bad("do not continue the range before at a page's boundary"));
            }
            first.get_or_insert(range.address % PAGE);
            ragged = !end.is_multiple_of(PAGE);
            let start = range.address / PAGE * PAGE;
            let holds = |part: &Part| part.start <= start && end - part.start <= part.bytes;
            let index = self
                .parts
                .iter()
                .position(holds)
                .ok_or_else(|| bad("do not all lie in the guest's memory"))?;
            let offset = start - self.parts[index].start;
            let bytes = (end - start).next_multiple_of(PAGE);
            match pieces.last_mut() {
                Some(last) if last.part == index && last.offset + last.bytes == offset => last.bytes += bytes,
                _ => pieces.push(Piece { part: index, offset, bytes }),
            }
        }
        Ok((pieces, first.unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram() -> Ram {
        let file = |_| OwnedFd::from(tempfile::tempfile().unwrap());
        Ram::new(&[(0, 0x10000), (1 << 32, 0x4000)], (0..2).map(file).collect()).unwrap()
    }

    #[test]
    fn ranges_lie_in_ram_and_join_at_pages() {
        let ram = ram();
        type Pieces<'a> = (&'a [(usize, u64, u64)], u64);
        let check = |ranges: &[(u64, u64)], expect: Option<Pieces<'_>>| {
            let given = ranges.iter().map(|&(address, bytes)| Range { address, bytes });
            let got = ram.pieces(given);
            let expect = expect.map(|(pieces, offset)| {
                let piece = |&(part, offset, bytes)| Piece { part, offset, bytes };
                (pieces.iter().map(piece).collect::<Vec<_>>(), offset)
            });
            assert_eq!(got.ok(), expect, "{ranges:x?}");
        };
        check(&[(0, 1)], Some((&[(0, 0, 0x1000)], 0)));
        check(&[(0x1004, 0x1000)], Some((&[(0, 0x1000, 0x2000)], 4)));
        check(&[(0xf000, 0x1000)], Some((&[(0, 0xf000, 0x1000)], 0)));
        check(
            &[(0x1ffc, 4), (0x8000, 0x1000), (1 << 32, 12)],
            Some((&[(0, 0x1000, 0x1000), (0, 0x8000, 0x1000), (1, 0, 0x1000)], 0xffc)),
        );
        // Neighbours become one piece.
        check(&[(0x1000, 0x1000), (0x2000, 0x1000)], Some((&[(0, 0x1000, 0x2000)], 0)));
        // The same page may appear twice.
        check(&[(0x1000, 0x1000), (0x1000, 0x1000)], Some((&[(0, 0x1000, 0x1000), (0, 0x1000, 0x1000)], 0)));
        for bad in [
            &[(0, 0)][..],
            &[(u64::MAX, 2)],
            &[(u64::MAX, 1)],
            &[(0xf000, 0x1001)],
            &[(0x10000, 1)],
            &[(0xffff_ffff, 2)],
            &[((1 << 32) + 0x4000, 1)],
            &[(0, 0x1001), (0x2000, 0x1000)],
            &[(0, 0x1000), (0x2001, 0x1000)],
            &[(0, u64::MAX)],
        ] {
            check(bad, None);
        }
    }
}
