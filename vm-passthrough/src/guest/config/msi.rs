//! The MSI capability (PCI Express Base 6.0, 7.7.1). All of it is ours; VFIO programs the device.

use super::{Builder, ConfigSpace, EXTENDED, Facts, Register};
use crate::guest::MsiMessage;

/// Control register, from the start of the capability.
const CONTROL: u16 = 2;
const ENABLE: u16 = 1;
const WIDE: u16 = 1 << 7;
const MASKABLE: u16 = 1 << 8;

/// Where the parts of the MSI capability are.
#[derive(Clone, Copy, Debug)]
pub(in crate::guest) struct Msi {
    offset: u16,
    wide: bool,
    /// Vectors that the guest may have, a power of two up to 32.
    pub(in crate::guest) capable: u32,
    /// Offset of the mask bits, if there are any.
    mask: Option<u16>,
}

pub(super) fn add(builder: &mut Builder<'_>, offset: usize, facts: &Facts) -> bool {
    if builder.space.msi.is_some() || facts.msi_vectors == 0 {
        return false;
    }
    let control = builder.word(offset + usize::from(CONTROL));
    let wide = control & WIDE != 0;
    let maskable = control & MASKABLE != 0;
    let data = if wide { 12 } else { 8 };
    let len = data + if maskable { 12 } else { 2 };
    if !builder.take(offset, len.into(), EXTENDED) {
        return false;
    }
    let log = u32::from(control >> 1 & 0b111).min(5).min(facts.msi_vectors.ilog2());
    let capable = 1 << log;
    builder.put(offset + usize::from(CONTROL), 2, u32::from(control & (WIDE | MASKABLE)) | log << 1);
    let mut rows = vec![
        // Enable, and the number of vectors that the guest enables.
        Register { offset: CONTROL, width: 2, writable: 0x71, ..Register::NONE },
        Register { offset: 4, writable: 0xffff_fffc, ..Register::NONE },
        Register { offset: data, width: 2, writable: 0xffff, ..Register::NONE },
    ];
    if wide {
        rows.push(Register { offset: 8, writable: u32::MAX, ..Register::NONE });
    }
    if maskable {
        let writable = u32::MAX >> (32 - capable);
        rows.push(Register { offset: data + 4, writable, ..Register::NONE });
    }
    builder.rows(offset, &rows);
    let offset = offset as u16;
    builder.space.msi = Some(Msi { offset, wide, capable, mask: maskable.then_some(offset + data + 4) });
    true
}

impl Msi {
    /// Number of vectors that the guest has enabled; 0 when MSI is off.
    pub(in crate::guest) fn enabled(&self, space: &ConfigSpace) -> u32 {
        let control = space.get16(self.offset + CONTROL);
        if control & ENABLE == 0 { 0 } else { (1 << (control >> 4 & 0b111)).min(self.capable) }
    }

    /// The message of vector `vector` of `count`; `None` while the guest masks it.
    pub(in crate::guest) fn message(
        &self,
        space: &ConfigSpace,
        vector: u32,
        count: u32,
    ) -> Option<MsiMessage> {
        if self.mask.is_some_and(|mask| space.get32(mask) >> vector & 1 != 0) {
            return None;
        }
        let low = space.get32(self.offset + 4);
        let (high, data) = if self.wide {
            (space.get32(self.offset + 8), space.get16(self.offset + 12))
        } else {
            (0, space.get16(self.offset + 8))
        };
        // The device modifies the low bits to tell its vectors apart.
        let data = u32::from(data) & !(count - 1) | vector;
        Some(MsiMessage { address: u64::from(high) << 32 | u64::from(low), data })
    }

    /// Offset of the pending bits, if there are any.
    pub(in crate::guest) fn pending(&self) -> Option<u16> {
        self.mask.map(|mask| mask + 4)
    }

    /// Whether a write of `len` bytes at `offset` touches the capability.
    pub(in crate::guest) fn touched(&self, offset: usize, len: usize) -> bool {
        let start = usize::from(self.offset);
        offset < start + 24 && start < offset + len
    }
}
