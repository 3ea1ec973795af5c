//! Loads a bzImage or an ELF program into RAM.
//!
//! linux-loader knows both, too, but reads what a file says it has, in one piece, notes that nobody asked for included: a
//! loader that is to be bounded and stopped reads by itself.

use std::ops::Range;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued as _;

use super::error::BootError;
use super::loader::{BootFile, Loader};
use super::{elf, payload};
use crate::vmm::layout;

/// What the headers of a file that boots say. They were checked against the file's length and the RAM.
pub(super) enum Image {
    /// A compressed Linux kernel: its setup header, and where in the file the part begins that is loaded.
    BzImage(Box<setup_header>, u64),
    /// A vmlinux or a bare program.
    Elf(elf::Headers),
}

/// A program that was loaded.
#[derive(Clone, Copy, Debug)]
pub(in crate::vmm) struct Loaded {
    /// Where it is entered.
    pub(in crate::vmm) entry: u64,
    /// Setup header of a bzImage.
    pub(in crate::vmm) header: Option<setup_header>,
}

/// An ELF program's headers must end within this number of bytes; they are at its beginning.
const MAX_ELF_HEADERS: usize = 64 << 10;
/// Where a bzImage's setup header is.
const SETUP_HEADER: usize = 0x1f1;
/// `HdrS`, in the setup header.
const SETUP_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// Offset of the 64-bit entry point from the load address of a bzImage (boot.rst, "64-bit Boot Protocol").
const ENTRY_64: u64 = 0x200;
/// `LOADED_HIGH` in `loadflags`.
const LOADED_HIGH: u8 = 1;
/// `XLF_KERNEL_64` in `xloadflags`.
const XLF_KERNEL_64: u16 = 1;
/// Longest command line of a Linux kernel that says nothing of it, `COMMAND_LINE_SIZE` of x86.
const COMMAND_LINE_SIZE: u64 = 2047;

fn not_bootable(file: &BootFile, reason: impl Into<String>) -> BootError {
    BootError::NotBootable { path: file.path().to_owned(), reason: reason.into() }
}

fn too_big(file: &BootFile, start: u64, end: u64, ram_end: u64) -> BootError {
    BootError::KernelTooBig { path: file.path().to_owned(), start, end, ram_start: layout::HIGH_RAM, ram_end }
}

impl Image {
    /// Reads the headers of a file that is to be loaded into the RAM that ends at `ram_end`.
    ///
    /// # Errors
    /// When it can't be read, is cut off, does not boot in 64-bit mode or doesn't fit.
    pub(super) fn read(file: &BootFile, ram_end: u64) -> Result<Self, BootError> {
        let start = file.beginning(MAX_ELF_HEADERS)?;
        if start.starts_with(b"\x7fELF") {
            return elf(file, &start, ram_end).map(Self::Elf);
        }
        match start.get(SETUP_HEADER..SETUP_HEADER + size_of::<setup_header>()) {
            Some(bytes) if bytes[0x11..].starts_with(&SETUP_MAGIC.to_le_bytes()) => {
                let mut header = setup_header::default();
                header.as_mut_slice().copy_from_slice(bytes);
                bzimage(file, header, ram_end)
            }
            _ => Err(not_bootable(file, "it has neither the ELF magic number nor a Linux setup header")),
        }
    }

    /// The longest command line that it takes.
    pub(super) fn cmdline_limit(&self) -> u64 {
        match self {
            Self::BzImage(header, _) => u64::from(header.cmdline_size),
            Self::Elf(_) => COMMAND_LINE_SIZE,
        }
    }

    /// Where its initial RAM disk may be, in the RAM that ends at `ram_end`: behind it and the memory that it needs before it
    /// reads the memory map.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn initrd_room(&self, file: &BootFile, ram_end: u64) -> Result<Range<u64>, BootError> {
        Ok(match self {
            Self::BzImage(header, begin) => {
                let end = loaded_end(header, file.len()?.saturating_sub(*begin));
                end..ram_end.min(u64::from(header.initrd_addr_max) + 1)
            }
            Self::Elf(headers) => {
                let ends = headers.segments.iter().map(|segment| segment.address + segment.size());
                ends.max().unwrap_or(layout::HIGH_RAM)..ram_end
            }
        })
    }

    /// Loads it. A kernel in a bzImage is unpacked if it does not matter to it who does that, which the command line has a
    /// say in.
    ///
    /// # Errors
    /// When it can't be read, or loading is to stop.
    pub(super) fn load(
        self,
        loader: &Loader<'_>,
        file: &BootFile,
        ram_end: u64,
        cmdline: &str,
    ) -> Result<Loaded, BootError> {
        match self {
            Self::BzImage(header, begin) => load_bzimage(loader, file, *header, begin, ram_end, cmdline),
            Self::Elf(headers) => load_elf(loader, file, &headers),
        }
    }
}

fn bzimage(file: &BootFile, mut header: setup_header, ram_end: u64) -> Result<Image, BootError> {
    let begin = payload::setup_bytes(&header);
    let size = file.len()?.checked_sub(begin);
    if header.version < 0x200 || header.loadflags & LOADED_HIGH == 0 || size.is_none() {
        return Err(not_bootable(file, "its setup header is not that of a bzImage"));
    }
    if header.version < 0x20c || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(not_bootable(
            file,
            "it has no 64-bit entry point; build it for x86-64, Linux 3.8 or newer",
        ));
    }
    // The kernel is counted in units of 16 bytes; what is packed lies in it.
    let kernel_end = begin + u64::from(header.syssize) * 16;
    let payload_end = payload::place(&header).map_or(0, |(start, len)| start + len);
    let needed = kernel_end.max(payload_end);
    if file.len()? < needed {
        let reason = format!(
            "it was cut off: by its setup header it has {needed} bytes, and {} are there; copy it again",
            file.len()?
        );
        return Err(not_bootable(file, reason));
    }
    let end = loaded_end(&header, size.unwrap_or_default());
    if end > ram_end {
        return Err(too_big(file, layout::HIGH_RAM, end, ram_end));
    }
    header.code32_start = layout::HIGH_RAM as u32;
    Ok(Image::BzImage(Box::new(header), begin))
}

/// First address after a bzImage of which `size` bytes are loaded, and after the memory that it needs. It unpacks itself to
/// where it prefers to run, and uses `init_size` bytes there, before it looks at the memory map; so that must be RAM.
fn loaded_end(header: &setup_header, size: u64) -> u64 {
    let runs_at = header.pref_address.max(layout::HIGH_RAM);
    runs_at.saturating_add(u64::from(header.init_size)).max(layout::HIGH_RAM.saturating_add(size))
}

fn load_bzimage(
    loader: &Loader<'_>,
    file: &BootFile,
    header: setup_header,
    begin: u64,
    ram_end: u64,
    cmdline: &str,
) -> Result<Loaded, BootError> {
    let (start, size) = (layout::HIGH_RAM, file.len()?.saturating_sub(begin));
    loader.copy(file, begin, size, start)?;
    let unpacked = match header.pref_address >= start + size {
        true => unpack(loader, file, &header, ram_end, cmdline),
        false => Err("it runs where the bzImage lies".to_owned()),
    };
    let entry = match unpacked {
        Ok(entry) => entry,
        Err(reason) => {
            loader.go_on()?;
            tracing::debug!(path = %file.path().display(), reason, "the kernel unpacks itself");
            start + ENTRY_64
        }
    };
    Ok(Loaded { entry, header: Some(header) })
}

/// Unpacks the kernel to where it runs and returns where it is entered, or says why it has to do that itself.
fn unpack(
    loader: &Loader<'_>,
    file: &BootFile,
    header: &setup_header,
    ram_end: u64,
    cmdline: &str,
) -> Result<u64, String> {
    let (offset, len) = payload::place(header).ok_or("its setup header does not say where the kernel is")?;
    let mut packed = loader.stream(file, offset, len).map_err(|error| error.to_string())?;
    let needed = header.pref_address.saturating_add(header.init_size.into());
    payload::unpack(loader, &mut packed, header, ram_end.min(needed), cmdline)
}

fn elf(file: &BootFile, head: &[u8], ram_end: u64) -> Result<elf::Headers, BootError> {
    let headers = elf::parse(head).map_err(|error| not_bootable(file, error.to_string()))?;
    for segment in &headers.segments {
        match segment.address.checked_add(segment.size()) {
            Some(end) if segment.address >= layout::HIGH_RAM && end <= ram_end => {}
            end => return Err(too_big(file, segment.address, end.unwrap_or(u64::MAX), ram_end)),
        }
        if segment.offset.saturating_add(segment.in_file) > file.len()? {
            let reason = format!(
                "its segment at {:#x} goes on behind the end of the file, which has only {} bytes",
                segment.address,
                file.len()?
            );
            return Err(not_bootable(file, reason));
        }
    }
    if let Some(address) = headers.overlap() {
        return Err(not_bootable(file, format!("its segments overlap at {address:#x}")));
    }
    if !headers.enters_a_segment() {
        return Err(not_bootable(file, format!("its entry point {:#x} is not in it", headers.entry)));
    }
    Ok(headers)
}

fn load_elf(loader: &Loader<'_>, file: &BootFile, headers: &elf::Headers) -> Result<Loaded, BootError> {
    for segment in &headers.segments {
        loader.copy(file, segment.offset, segment.in_file, segment.address)?;
        // After a reboot the RAM is not fresh.
        loader.zero(segment.address + segment.in_file, segment.in_memory.saturating_sub(segment.in_file))?;
    }
    Ok(Loaded { entry: headers.entry, header: None })
}
