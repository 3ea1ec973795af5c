//! The BARs of a device: which exist, and which parts of them the guest may reach with no exit.

use std::ops::Range;

use super::config::header::BarRegisters;
use super::device::Rom;
use crate::pci::MAX_ROM;
use crate::pci::regs::{
    BASE_ADDRESS_0, BASE_ADDRESS_IO_MASK, BASE_ADDRESS_MEM_MASK, BASE_ADDRESS_SPACE_IO, ROM_ADDRESS,
    ROM_ADDRESS_ENABLE, ROM_ADDRESS_MASK,
};
use crate::vfio::{DeviceFile, ROM_REGION, Result, VfioError};

/// The index of the expansion ROM, of its BAR and of its region.
pub(super) const ROM: u8 = ROM_REGION as u8;

/// A BAR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bar {
    /// Index of its first register, and of its region.
    pub(super) index: u8,
    /// Size in bytes, a power of two.
    pub(super) size: u64,
    /// Whether it takes two registers.
    pub(super) wide: bool,
    /// Whether it is port I/O.
    pub(super) io: bool,
    prefetchable: bool,
    /// Parts that VFIO lets map, page-aligned.
    mappable: Vec<Range<u64>>,
}

/// Finds the BARs, from the BAR registers in `config` and the sizes of VFIO's regions; the expansion ROM is `shown`.
///
/// # Errors
/// When a region can't be asked for, or has a size that no BAR has.
pub(super) fn find(file: &dyn DeviceFile, config: &[u8], shown: &Rom) -> Result<Vec<Bar>> {
    let mut bars: Vec<Bar> = Vec::new();
    let mut index = 0u8;
    while index < 6 {
        let at = 0x10 + usize::from(index) * 4;
        let register = config.get(at).copied().unwrap_or(0);
        let io = register & 1 != 0;
        let wide = register & 0b111 == 0b100 && index < 5;
        let width = if wide { 2 } else { 1 };
        let region = file.region(index.into())?;
        let (least, most) = if io { (4, 1 << 16) } else { (16, if wide { 1 << 63 } else { 1 << 31 }) };
        if region.size != 0 {
            if !region.size.is_power_of_two() || region.size < least || region.size > most {
                return Err(VfioError::InvalidResponse {
                    operation: "VFIO_DEVICE_GET_REGION_INFO",
                    path: file.address().to_string(),
                    what: format!("BAR {index} of {:#x} bytes", region.size),
                });
            }
            let mappable = region.mappable.iter().filter(|_| !io);
            bars.push(Bar {
                index,
                size: region.size,
                wide,
                io,
                prefetchable: !io && register & 0b1000 != 0,
                mappable: mappable.map(|&(start, len)| start..start.saturating_add(len)).collect(),
            });
        }
        index += width;
    }
    let rom = match shown {
        Rom::Hidden => None,
        Rom::Image(image) => Some(image.bar_size()),
        Rom::Device => {
            // The Linux kernel has looked whether there is one.
            let rom = file.region(ROM_REGION)?;
            let is_there = rom.readable && rom.size.is_power_of_two() && (2048..=MAX_ROM).contains(&rom.size);
            is_there.then_some(rom.size)
        }
    };
    let (wide, io, prefetchable) = (false, false, false);
    bars.extend(rom.map(|size| Bar { index: ROM, size, wide, io, prefetchable, mappable: Vec::new() }));
    Ok(bars)
}

/// The BAR registers: the address bits above the size can be written, the low bits say what it is.
pub(super) fn registers(bars: &[Bar]) -> BarRegisters {
    let mut registers = BarRegisters::default();
    for bar in bars {
        let mask = !(bar.size - 1);
        if bar.index == ROM {
            registers.rom = mask as u32 & bar.mask() | ROM_ADDRESS_ENABLE;
            continue;
        }
        let index = usize::from(bar.index);
        registers.bars[index] = if bar.io {
            (mask as u32 & bar.mask(), BASE_ADDRESS_SPACE_IO)
        } else {
            let fixed = u32::from(bar.wide) << 2 | u32::from(bar.prefetchable) << 3;
            (mask as u32 & bar.mask(), fixed)
        };
        if bar.wide {
            registers.bars[index + 1] = ((mask >> 32) as u32, 0);
        }
    }
    registers
}

/// Sizes by index, the ROM's last; 0 for those that are not there.
pub(super) fn sizes(bars: &[Bar]) -> [u64; 7] {
    let mut sizes = [0; 7];
    for bar in bars {
        sizes[usize::from(bar.index)] = bar.size;
    }
    sizes
}

impl Bar {
    /// Offset of its first register.
    pub(super) fn register(&self) -> u16 {
        if self.index == ROM { ROM_ADDRESS } else { BASE_ADDRESS_0 + u16::from(self.index) * 4 }
    }

    /// The bits of that which are its address.
    pub(super) fn mask(&self) -> u32 {
        match (self.index, self.io) {
            (ROM, _) => ROM_ADDRESS_MASK,
            (_, true) => BASE_ADDRESS_IO_MASK,
            (_, false) => BASE_ADDRESS_MEM_MASK,
        }
    }

    /// The parts to map into the guest: what VFIO lets map, less the pages of `page` bytes that `trapped` touches.
    pub(super) fn pieces(&self, trapped: &[Range<u64>], page: u64) -> Vec<Range<u64>> {
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for range in &self.mappable {
            let end = range.end.min(self.size);
            let start = range.start.next_multiple_of(page);
            pieces.push(start..end - end % page);
        }
        for trap in trapped {
            let trap = trap.start - trap.start % page..trap.end.next_multiple_of(page);
            pieces = pieces
                .into_iter()
                .flat_map(|piece| {
                    [piece.start..piece.end.min(trap.start), piece.start.max(trap.end)..piece.end]
                })
                .collect();
        }
        pieces.retain(|piece| piece.start < piece.end);
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_all_but_trapped_pages() {
        fn check(size: u64, mappable: &[(u64, u64)], trapped: &[(u64, u64)], expect: &[(u64, u64)]) {
            let ranges =
                |list: &[(u64, u64)]| list.iter().map(|&(start, end)| start..end).collect::<Vec<_>>();
            let bar = Bar {
                index: 0,
                size,
                wide: false,
                io: false,
                prefetchable: false,
                mappable: mappable.iter().map(|&(start, len)| start..start + len).collect(),
            };
            assert_eq!(bar.pieces(&ranges(trapped), 4096), ranges(expect));
        }
        let all = [(0, 0x10000)];
        check(0x10000, &all, &[], &[(0, 0x10000)]);
        check(0x10000, &[], &[], &[]);
        check(0x10000, &all, &[(0x3000, 0x3010)], &[(0, 0x3000), (0x4000, 0x10000)]);
        check(0x10000, &all, &[(0, 0x10), (0xf800, 0xf808)], &[(0x1000, 0xf000)]);
        check(0x10000, &all, &[(0x2ff0, 0x3010)], &[(0, 0x2000), (0x4000, 0x10000)]);
        check(0x10000, &all, &[(0x2000, 0x2800), (0x2800, 0x2808)], &[(0, 0x2000), (0x3000, 0x10000)]);
        // VFIO already left the table out.
        check(
            0x10000,
            &[(0, 0x2000), (0x3000, 0xd000)],
            &[(0x2000, 0x2010)],
            &[(0, 0x2000), (0x3000, 0x10000)],
        );
        // Smaller than a page.
        check(0x400, &[(0, 0x400)], &[], &[]);
        check(0x4000, &[(0, 0x4000)], &[(0, 0x4000)], &[]);
        // Not aligned, past the end.
        check(0x4000, &[(0x800, 0x8000)], &[], &[(0x1000, 0x4000)]);
    }
}
