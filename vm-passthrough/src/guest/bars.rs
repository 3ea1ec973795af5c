//! The memory BARs of a device: which exist, and which parts of them the guest may reach with no exit.

use std::ops::Range;

use super::config::header::BarRegisters;
use crate::vfio::{DeviceFile, Result, VfioError};

/// A memory BAR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bar {
    /// Index of its first register, and of its region.
    pub(super) index: u8,
    /// Size in bytes, a power of two.
    pub(super) size: u64,
    /// Whether it takes two registers.
    pub(super) wide: bool,
    prefetchable: bool,
    /// Parts that VFIO lets map, page-aligned.
    mappable: Vec<Range<u64>>,
}

/// Finds the memory BARs, from the BAR registers in `config` and the sizes of VFIO's regions. I/O BARs are left out.
///
/// # Errors
/// When a region can't be asked for, or has a size that no BAR has.
pub(super) fn find(file: &dyn DeviceFile, config: &[u8]) -> Result<Vec<Bar>> {
    let mut bars: Vec<Bar> = Vec::new();
    let mut index = 0u8;
    while index < 6 {
        let at = 0x10 + usize::from(index) * 4;
        let register = config.get(at).copied().unwrap_or(0);
        let wide = register & 0b111 == 0b100 && index < 5;
        let width = if wide { 2 } else { 1 };
        if register & 1 == 0 {
            let region = file.region(index.into())?;
            let most = if wide { 1 << 63 } else { 1 << 31 };
            if region.size != 0 {
                if !region.size.is_power_of_two() || region.size < 16 || region.size > most {
                    return Err(VfioError::InvalidResponse {
                        operation: "VFIO_DEVICE_GET_REGION_INFO",
                        path: file.address().to_string(),
                        what: format!("BAR {index} of {:#x} bytes", region.size),
                    });
                }
                let mappable = region.mappable.iter().map(|&(start, len)| start..start.saturating_add(len));
                bars.push(Bar {
                    index,
                    size: region.size,
                    wide,
                    prefetchable: register & 0b1000 != 0,
                    mappable: mappable.collect(),
                });
            }
        }
        index += width;
    }
    Ok(bars)
}

/// The BAR registers: the address bits above the size can be written, the low bits say what it is.
pub(super) fn registers(bars: &[Bar]) -> BarRegisters {
    let mut registers = BarRegisters::default();
    for bar in bars {
        let mask = !(bar.size - 1);
        let fixed = u32::from(bar.wide) << 2 | u32::from(bar.prefetchable) << 3;
        let index = usize::from(bar.index);
        registers.0[index] = (mask as u32 & !0xf, fixed);
        if bar.wide {
            registers.0[index + 1] = ((mask >> 32) as u32, 0);
        }
    }
    registers
}

/// Sizes by index, 0 for those that are not there.
pub(super) fn sizes(bars: &[Bar]) -> [u64; 6] {
    let mut sizes = [0; 6];
    for bar in bars {
        sizes[usize::from(bar.index)] = bar.size;
    }
    sizes
}

impl Bar {
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
