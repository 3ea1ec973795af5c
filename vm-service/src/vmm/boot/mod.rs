//! Loads what a guest boots and describes the machine to it.
//!
//! Every guest, a bare ELF program too, enters as the 64-bit boot protocol of Linux says (Documentation/arch/x86/
//! boot.rst, "64-bit Boot Protocol"): long mode with the first 4 GiB identity-mapped, flat segments CS 0x10 and
//! DS/ES/SS 0x18, interrupts off, RSI = physical address of `struct boot_params`. Beyond the protocol, RSP points
//! to a few KiB of stack.

mod elf;
mod error;
mod image;
mod loader;
mod params;
mod payload;

use std::ops::Range;

pub use error::BootError;
use image::{Image, Loaded};
use loader::{BootFile, Loader};
#[cfg(test)]
pub(super) use payload::testing as payload_testing;

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::layout::{self, Layout};
use super::quiesced::Quiesced;
use crate::config::Boot;

/// What the first vCPU needs to enter the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Instruction pointer.
    pub(super) rip: u64,
}

/// What lies in RAM to be booted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program {
    kernel: Loaded,
    /// Address and size of the initial RAM disk.
    initrd: Option<(u64, u64)>,
}

/// The files that a guest is booted from, at each start.
pub(super) struct BootFiles {
    kernel: BootFile,
    initrd: Option<BootFile>,
}

impl BootFiles {
    /// Opens them, and checks the headers and sizes, and the command line, without reading more of them.
    ///
    /// # Errors
    /// What [`load`](Program::load) would say of them, as far as that can be known.
    pub(super) fn open(layout: &Layout, boot: &Boot) -> Result<Self, BootError> {
        let kernel = BootFile::open(&boot.kernel)?;
        let image = Image::read(&kernel, layout.ram[0].end)?;
        check_cmdline(&boot.cmdline, image.cmdline_limit())?;
        let room = image.initrd_room(&kernel, layout.ram[0].end)?;
        let initrd = boot.initrd.as_deref().map(BootFile::open).transpose()?;
        initrd.as_ref().map_or(Ok(()), |file| place_initrd(file, &room).map(drop))?;
        Ok(Self { kernel, initrd })
    }
}

impl Program {
    /// Loads the guest's program and its initial RAM disk into RAM, which nobody else writes meanwhile, until `stop` answers
    /// with `true`.
    ///
    /// # Errors
    /// When a file can't be read, is not what it should be, or doesn't fit; when it is to stop.
    pub(super) fn load(
        memory: &GuestMemoryMmap,
        layout: &Layout,
        files: &BootFiles,
        cmdline: &str,
        quiesced: &Quiesced,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, BootError> {
        let loader = Loader::new(memory, quiesced, stop);
        let low_end = layout.ram[0].end;
        let image = Image::read(&files.kernel, low_end)?;
        check_cmdline(cmdline, image.cmdline_limit())?;
        let room = image.initrd_room(&files.kernel, low_end)?;
        let kernel = image.load(&loader, &files.kernel, low_end, cmdline)?;
        let load = |file: &BootFile| {
            let (start, size) = place_initrd(file, &room)?;
            loader.copy(file, 0, size, start).map(|()| (start, size))
        };
        let initrd = files.initrd.as_ref().map(load).transpose()?;
        Ok(Self { kernel, initrd })
    }

    /// Writes the command line and `struct boot_params` into RAM, for a guest whose ACPI tables are at `rsdp`.
    ///
    /// # Errors
    /// When the command line is not one, or there is no RAM for them.
    pub(super) fn describe(
        &self,
        memory: &GuestMemoryMmap,
        layout: &Layout,
        boot: &Boot,
        rsdp: u64,
    ) -> Result<Entry, BootError> {
        write_cmdline(memory, &boot.cmdline)?;
        params::write(memory, layout, &self.kernel, &boot.cmdline, self.initrd, rsdp)?;
        Ok(Entry { rip: self.kernel.entry })
    }
}

fn check_cmdline(cmdline: &str, limit: u64) -> Result<(), BootError> {
    // The zero at the end is not counted in the kernel's limit but is in the room.
    let limit = limit.min(layout::CMDLINE_ROOM - 1);
    if cmdline.len() as u64 > limit {
        return Err(BootError::CmdlineTooLong { len: cmdline.len(), limit });
    }
    if cmdline.bytes().any(|byte| byte == 0) {
        return Err(BootError::CmdlineZero);
    }
    Ok(())
}

fn write_cmdline(memory: &GuestMemoryMmap, cmdline: &str) -> Result<(), BootError> {
    let mut bytes = cmdline.as_bytes().to_vec();
    bytes.push(0);
    memory.write_slice(&bytes, GuestAddress(layout::CMDLINE)).map_err(|_| BootError::TooLittleRam)
}

/// The address and size of the initial RAM disk: as high in the room as it fits.
fn place_initrd(file: &BootFile, room: &Range<u64>) -> Result<(u64, u64), BootError> {
    let size = file.len()?;
    let start = room.end.checked_sub(size).map(|start| start & !0xfff).filter(|&start| start >= room.start);
    start.map(|start| (start, size)).ok_or_else(|| BootError::InitrdTooBig {
        path: file.path().to_owned(),
        size,
        room: room.end.saturating_sub(room.start),
    })
}
