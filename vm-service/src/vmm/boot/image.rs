//! Loads a bzImage or an ELF program into RAM.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader as _};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::error::BootError;
use super::{elf, payload};
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

/// An ELF program's headers must end within so many bytes; they are at its beginning.
const MAX_ELF_HEADERS: u64 = 64 << 10;
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

/// Loads `file`, known to the user as `path`, into the RAM that ends at `ram_end`. A kernel in a bzImage is unpacked if
/// it does not matter to it who does that, which the command line has a say in.
///
/// # Errors
/// When it can't be read, does not boot in 64-bit mode or doesn't fit.
pub(super) fn load(
    memory: &GuestMemoryMmap,
    file: &mut File,
    path: &Path,
    ram_end: u64,
    cmdline: &str,
) -> Result<Loaded, BootError> {
    match format(file, path)? {
        Format::BzImage => load_bzimage(memory, file, path, ram_end, cmdline),
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
    cmdline: &str,
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
    let unpacked = match header.pref_address >= loaded.kernel_end {
        true => unpack(memory, file, &header, ram_end, cmdline),
        false => Err("it runs where the bzImage lies".to_owned()),
    };
    let entry = match unpacked {
        Ok(entry) => entry,
        Err(reason) => {
            tracing::debug!(path = %path.display(), reason, "the kernel unpacks itself");
            start + ENTRY_64
        }
    };
    Ok(Loaded { entry, end, header: Some(header) })
}

/// Unpacks the kernel to where it runs and returns where it is entered, or says why it has to do that itself.
fn unpack(
    memory: &GuestMemoryMmap,
    file: &mut File,
    header: &setup_header,
    ram_end: u64,
    cmdline: &str,
) -> Result<u64, String> {
    let (offset, len) = payload::place(header).ok_or("its setup header does not say where the kernel is")?;
    file.seek(SeekFrom::Start(offset)).map_err(|error| error.to_string())?;
    let needed = header.pref_address.saturating_add(header.init_size.into());
    payload::unpack(memory, &mut file.take(len), header, ram_end.min(needed), cmdline)
}

fn load_elf(
    memory: &GuestMemoryMmap,
    file: &mut File,
    path: &Path,
    ram_end: u64,
) -> Result<Loaded, BootError> {
    let mut head = Vec::new();
    file.rewind()
        .and_then(|()| file.take(MAX_ELF_HEADERS).read_to_end(&mut head))
        .map_err(|source| BootError::Read { path: path.to_owned(), source })?;
    let headers = elf::parse(&head).map_err(|error| not_bootable(path, error.to_string()))?;
    let mut end = layout::HIGH_RAM;
    for segment in &headers.segments {
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
    if !headers.enters_a_segment() {
        return Err(not_bootable(path, format!("its entry point {:#x} is not in it", headers.entry)));
    }
    Elf::load(memory, None, file, None).map_err(|error| not_bootable(path, error.to_string()))?;
    // After a reboot the RAM is not fresh.
    for segment in headers.segments.iter().filter(|segment| segment.in_memory > segment.in_file) {
        elf::zero(memory, segment.address + segment.in_file, segment.in_memory - segment.in_file)
            .map_err(|_| BootError::TooLittleRam)?;
    }
    Ok(Loaded { entry: headers.entry, end, header: None })
}
