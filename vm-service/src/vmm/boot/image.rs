//! Loads a bzImage or an ELF program into RAM.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::error::BootError;
use crate::vmm::layout;

/// Kinds of file that boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vmm) enum Format {
    /// A compressed Linux kernel with its setup header.
    BzImage,
    /// A vmlinux or a bare program.
    Elf,
}

/// A program that was loaded.
#[derive(Clone, Copy, Debug)]
pub(in crate::vmm) struct Loaded {
    /// Where it is entered.
    pub(in crate::vmm) entry: u64,
    /// First address after it and the memory that it needs before it reads the memory map.
    pub(in crate::vmm) end: u64,
    /// Setup header of a bzImage.
    pub(in crate::vmm) header: Option<setup_header>,
}

/// Offset of the 64-bit entry point from the load address of a bzImage (boot.rst, "64-bit Boot Protocol").
const ENTRY_64: u64 = 0x200;
/// `XLF_KERNEL_64` in `xloadflags`.
const XLF_KERNEL_64: u16 = 1;
/// Longest command line of a Linux kernel that says nothing of it, `COMMAND_LINE_SIZE` of x86.
const COMMAND_LINE_SIZE: u64 = 2047;

impl Loaded {
    /// The longest command line that it takes.
    pub(in crate::vmm) fn cmdline_limit(&self) -> u64 {
        self.header.map_or(COMMAND_LINE_SIZE, |header| u64::from(header.cmdline_size))
    }

    /// First address that its initial RAM disk may not reach.
    pub(in crate::vmm) fn initrd_limit(&self) -> u64 {
        self.header.map_or(layout::LOW_RAM_LIMIT, |header| u64::from(header.initrd_addr_max) + 1)
    }
}

/// Loads `file`, known to the user as `path`, into the RAM that ends at `ram_end`.
///
/// # Errors
/// When it can't be read, does not boot in 64-bit mode or doesn't fit.
pub(super) fn load(
    memory: &GuestMemoryMmap,
    file: &mut File,
    path: &Path,
    ram_end: u64,
) -> Result<Loaded, BootError> {
    match format(file, path)? {
        Format::BzImage => load_bzimage(memory, file, path, ram_end),
        Format::Elf => load_elf(memory, file, path, ram_end),
    }
}

fn not_bootable(path: &Path, reason: impl Into<String>) -> BootError {
    BootError::NotBootable { path: path.to_owned(), reason: reason.into() }
}

/// What `file` is, by its magic numbers.
fn format(file: &mut File, path: &Path) -> Result<Format, BootError> {
    let read = |source| BootError::Read { path: path.to_owned(), source };
    let mut start = Vec::new();
    file.rewind().map_err(read)?;
    file.by_ref().take(0x206).read_to_end(&mut start).map_err(read)?;
    if start.starts_with(b"\x7fELF") {
        return Ok(Format::Elf);
    }
    if start.get(0x202..0x206) == Some(b"HdrS") {
        return Ok(Format::BzImage);
    }
    Err(not_bootable(path, "it has neither the ELF magic number nor a Linux setup header"))
}

fn load_bzimage(
    memory: &GuestMemoryMmap,
    file: &mut File,
    path: &Path,
    ram_end: u64,
) -> Result<Loaded, BootError> {
    let size = file.metadata().map_err(|source| BootError::Read { path: path.to_owned(), source })?.len();
    let start = layout::HIGH_RAM;
    let too_big = |end| BootError::KernelTooBig {
        path: path.to_owned(),
        start,
        end,
        ram_start: layout::HIGH_RAM,
        ram_end,
    };
    if start + size > ram_end {
        return Err(too_big(start + size));
    }
    let loaded = BzImage::load(memory, Some(GuestAddress(start)), file, None)
        .map_err(|error| not_bootable(path, error.to_string()))?;
    let header = loaded.setup_header.ok_or_else(|| not_bootable(path, "it has no setup header"))?;
    if header.version < 0x20c || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(not_bootable(
            path,
            "it has no 64-bit entry point; build it for x86-64, Linux 3.8 or newer",
        ));
    }
    // It unpacks itself to where it prefers to run, and uses `init_size` bytes there, before it looks at the memory
    // map; so that must be RAM.
    let runs_at = header.pref_address.max(start);
    let end = runs_at.saturating_add(u64::from(header.init_size)).max(loaded.kernel_end);
    if end > ram_end {
        return Err(too_big(end));
    }
    Ok(Loaded { entry: start + ENTRY_64, end, header: Some(header) })
}

/// An ELF program header of type `PT_LOAD`.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    in_file: u64,
    in_memory: u64,
}

fn load_elf(
    memory: &GuestMemoryMmap,
    file: &mut File,
    path: &Path,
    ram_end: u64,
) -> Result<Loaded, BootError> {
    let (entry, segments) = elf_segments(file, path)?;
    let mut end = layout::HIGH_RAM;
    for segment in &segments {
        let segment_end = segment.address.checked_add(segment.in_memory.max(segment.in_file));
        match segment_end {
            Some(segment_end) if segment.address >= layout::HIGH_RAM && segment_end <= ram_end => {
                end = end.max(segment_end);
            }
            _ => {
                return Err(BootError::KernelTooBig {
                    path: path.to_owned(),
                    start: segment.address,
                    end: segment_end.unwrap_or(u64::MAX),
                    ram_start: layout::HIGH_RAM,
                    ram_end,
                });
            }
        }
    }
    if !segments.iter().any(|s| (s.address..s.address + s.in_memory.max(s.in_file)).contains(&entry)) {
        return Err(not_bootable(path, format!("its entry point {entry:#x} is not in it")));
    }
    Elf::load(memory, None, file, None).map_err(|error| not_bootable(path, error.to_string()))?;
    // After a reboot the RAM is not fresh.
    for segment in segments.iter().filter(|segment| segment.in_memory > segment.in_file) {
        zero(memory, segment.address + segment.in_file, segment.in_memory - segment.in_file)
            .map_err(|_| BootError::TooLittleRam)?;
    }
    Ok(Loaded { entry, end, header: None })
}

fn zero(memory: &GuestMemoryMmap, start: u64, len: u64) -> Result<(), vm_memory::GuestMemoryError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(ZEROS.len() as u64);
        memory.write_slice(&ZEROS[..count as usize], GuestAddress(start + done))?;
        done += count;
    }
    Ok(())
}

/// Entry point and loadable segments of a 64-bit x86 ELF file (System V ABI, "ELF Header" and "Program Header").
fn elf_segments(file: &mut File, path: &Path) -> Result<(u64, Vec<Segment>), BootError> {
    let short = |_| not_bootable(path, "it ends within its ELF headers");
    let mut header = [0; 64];
    file.rewind().and_then(|()| file.read_exact(&mut header)).map_err(short)?;
    if header[4] != 2 || header[5] != 1 {
        return Err(not_bootable(path, "it is not a 64-bit little-endian ELF file"));
    }
    if u16_at(&header, 18) != 62 {
        return Err(not_bootable(path, format!("it is for ELF machine {}, not x86-64", u16_at(&header, 18))));
    }
    if u16_at(&header, 54) != 56 {
        return Err(not_bootable(path, "its program headers are not of the size of ELF-64"));
    }
    let (entry, table, count) = (u64_at(&header, 24), u64_at(&header, 32), u16_at(&header, 56));
    file.seek(SeekFrom::Start(table)).map_err(short)?;
    let mut segments = Vec::new();
    for _ in 0..count {
        let mut entry = [0; 56];
        file.read_exact(&mut entry).map_err(short)?;
        if u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) == 1 {
            segments.push(Segment {
                address: u64_at(&entry, 24),
                in_file: u64_at(&entry, 32),
                in_memory: u64_at(&entry, 40),
            });
        }
    }
    if segments.is_empty() {
        return Err(not_bootable(path, "it has no segment to load"));
    }
    Ok((entry, segments))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}
