//! Plays firmware: finds out how big the BARs of PCI functions are, chooses guest-physical addresses for them, and
//! programs them and the windows of the ports above them.
//!
//! Choosing is pure ([`plan()`]); finding out ([`probe`]) and programming ([`program`], [`program_port`]) go through
//! [`ConfigAccess`], so they serve any function: a [`PassthroughDevice`](crate::PassthroughDevice), or one that a VMM emulates.
//!
//! Which BAR may go where (PCI Express Base 6.0, 7.5.1.2.1 and 7.5.1.3): a bridge forwards one range below 4 GiB
//! and one range that it may prefetch from, which may lie anywhere. So a 64-bit prefetchable BAR goes into the high
//! window, every other BAR of a function behind a port into the low one. On a root bus there is no bridge, and
//! every 64-bit BAR may go high. I/O BARs go into a third window, of ports.
//!
//! A function that is reached through PCI Express alone may have its 64-bit BAR in a prefetchable window though the BAR
//! does not say so, as nothing on the way prefetches. But Linux takes such an address for a mistake, and moves
//! the BAR (`pci_find_parent_resource` in `drivers/pci/pci.c`): below 4 GiB, or nowhere. So it is not done here.

mod plan;

use std::ops::RangeInclusive;

use plan::MEMORY_UNIT;
pub use plan::{
    BarRequest, FunctionRequest, PlacedBar, PlacedFunction, PlacementError, PortWindows, WindowKind, Windows,
    plan,
};

use super::{PciAddress, regs};

/// What names the slot of a guest that a function of the host belongs into: the functions of one device share a slot, and
/// it is named by function 0. A virtual function is a device of its own, as it comes and goes by itself.
pub(crate) fn slot_of(address: PciAddress, is_virtual: bool) -> PciAddress {
    let function = if is_virtual { address.function() } else { 0 };
    PciAddress::new(address.domain(), address.bus(), address.device(), function).unwrap_or(address)
}

/// Access to a PCI function's config space, as a guest has it.
pub trait ConfigAccess {
    /// Reads 1, 2 or 4 bytes at `offset`.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes 1, 2 or 4 bytes at `offset`.
    fn write_config(&self, offset: u16, data: &[u8]);
}

/// The BARs of a function with a type 0 header, sized by writing all ones to them and reading back which bits stuck (PCI
/// Local Bus 3.0, 6.2.5.1).
///
/// Decoding is off meanwhile, and the BARs and the command register are as before afterwards.
pub fn probe<C: ConfigAccess + ?Sized>(function: &C) -> Vec<BarRequest> {
    let command = read16(function, regs::COMMAND);
    write16(function, regs::COMMAND, command & !(regs::COMMAND_IO | regs::COMMAND_MEMORY));
    let mut found = Vec::new();
    let mut index = 0;
    while index < 6 {
        let (request, width) = probe_bar(function, index);
        found.extend(request);
        index += width;
    }
    let rom = sized(function, regs::ROM_ADDRESS, regs::ROM_ADDRESS_MASK);
    if rom & regs::ROM_ADDRESS_MASK != 0 && rom != u32::MAX {
        let size = 1 << (rom & regs::ROM_ADDRESS_MASK).trailing_zeros();
        let (wide, prefetchable, io) = (false, false, false);
        found.push(BarRequest { index: BarRequest::ROM, size, wide, prefetchable, io });
    }
    write16(function, regs::COMMAND, command);
    found
}

/// The BAR that starts at register `index`, and how many registers it takes.
fn probe_bar<C: ConfigAccess + ?Sized>(function: &C, index: u8) -> (Option<BarRequest>, u8) {
    let low = size_register(function, index);
    if low == 0 || low == u32::MAX {
        return (None, 1);
    }
    if low & regs::BASE_ADDRESS_SPACE_IO != 0 {
        let mask = low & regs::BASE_ADDRESS_IO_MASK;
        let size = 1u64 << mask.trailing_zeros();
        return (
            (mask != 0).then_some(BarRequest { index, size, wide: false, prefetchable: false, io: true }),
            1,
        );
    }
    let prefetchable = low & regs::BASE_ADDRESS_MEM_PREFETCH != 0;
    let wide = low & regs::BASE_ADDRESS_MEM_TYPE_MASK == regs::BASE_ADDRESS_MEM_TYPE_64 && index < 5;
    let mask = if wide {
        u64::from(size_register(function, index + 1)) << 32 | u64::from(low & regs::BASE_ADDRESS_MEM_MASK)
    } else {
        u64::from(low & regs::BASE_ADDRESS_MEM_MASK) | u64::from(u32::MAX) << 32
    };
    let width = if wide { 2 } else { 1 };
    // The lowest bit that sticks is the size; a register where none does is no BAR.
    if mask == 0 || (!wide && low & regs::BASE_ADDRESS_MEM_MASK == 0) {
        return (None, width);
    }
    (Some(BarRequest { index, size: 1 << mask.trailing_zeros(), wide, prefetchable, io: false }), width)
}

/// What register `index` reads after all ones were written to it.
fn size_register<C: ConfigAccess + ?Sized>(function: &C, index: u8) -> u32 {
    sized(function, regs::BASE_ADDRESS_0 + u16::from(index) * 4, u32::MAX)
}

/// What a register reads after ones were written to it; its value is put back.
fn sized<C: ConfigAccess + ?Sized>(function: &C, offset: u16, ones: u32) -> u32 {
    let before = read32(function, offset);
    write32(function, offset, ones);
    let sized = read32(function, offset);
    write32(function, offset, before);
    sized
}

/// Writes the chosen addresses into the function's BARs. Decoding stays as it is: an operating system turns it on,
/// a guest without one needs [`enable`].
pub fn program<C: ConfigAccess + ?Sized>(function: &C, placed: &PlacedFunction) {
    for bar in &placed.bars {
        let offset = match bar.request.index {
            BarRequest::ROM => regs::ROM_ADDRESS,
            index => regs::BASE_ADDRESS_0 + u16::from(index) * 4,
        };
        write32(function, offset, bar.address as u32);
        if bar.request.wide {
            write32(function, offset + 4, (bar.address >> 32) as u32);
        }
    }
}

/// Lets the function decode memory and ports, or forward them, and master the bus.
pub fn enable<C: ConfigAccess + ?Sized>(function: &C) {
    let command = read16(function, regs::COMMAND);
    write16(
        function,
        regs::COMMAND,
        command | regs::COMMAND_IO | regs::COMMAND_MEMORY | regs::COMMAND_MASTER,
    );
}

/// Writes the windows into a port's type 1 header (PCI-to-PCI Bridge 1.2, 3.2.5.6 to 3.2.5.10). A window that is
/// `None` is closed: its base is above its limit.
pub fn program_port<C: ConfigAccess + ?Sized>(port: &C, windows: &PortWindows) {
    let closed = || RangeInclusive::new(MEMORY_UNIT, 0);
    let unit = |address: u64| (address >> 16) as u16 & 0xfff0;
    let (base, limit) = windows.memory.clone().unwrap_or_else(closed).into_inner();
    write16(port, regs::MEMORY_BASE, unit(base));
    write16(port, regs::MEMORY_LIMIT, unit(limit));
    let (base, limit) = windows.prefetchable.clone().unwrap_or_else(closed).into_inner();
    // The upper halves first: the window is closed or too high in between, never too wide.
    write32(port, regs::PREF_BASE_UPPER32, (base >> 32) as u32);
    write32(port, regs::PREF_LIMIT_UPPER32, (limit >> 32) as u32);
    write16(port, regs::PREF_MEMORY_BASE, unit(base));
    write16(port, regs::PREF_MEMORY_LIMIT, unit(limit));
    let closed = || RangeInclusive::new(u64::from(u16::MAX), 0);
    let (base, limit) = windows.io.clone().unwrap_or_else(closed).into_inner();
    write16(port, regs::IO_BASE, (base >> 8 & 0xf0 | limit & 0xf000) as u16);
}

fn read16<C: ConfigAccess + ?Sized>(function: &C, offset: u16) -> u16 {
    let mut data = [0; 2];
    function.read_config(offset, &mut data);
    u16::from_le_bytes(data)
}

fn read32<C: ConfigAccess + ?Sized>(function: &C, offset: u16) -> u32 {
    let mut data = [0; 4];
    function.read_config(offset, &mut data);
    u32::from_le_bytes(data)
}

fn write16<C: ConfigAccess + ?Sized>(function: &C, offset: u16, value: u16) {
    function.write_config(offset, &value.to_le_bytes());
}

fn write32<C: ConfigAccess + ?Sized>(function: &C, offset: u16, value: u32) {
    function.write_config(offset, &value.to_le_bytes());
}

#[cfg(test)]
mod tests;
