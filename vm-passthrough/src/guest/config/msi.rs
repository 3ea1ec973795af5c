//! The MSI capability (PCI Express Base 6.0, 7.7.1). All of it is ours; VFIO programs the device.

use super::{Builder, CONFIG_SIZE, ConfigSpace, Facts, Register};
use crate::guest::MsiMessage;
use crate::pci::regs;

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
    let control = builder.word(offset + usize::from(regs::MSI_FLAGS));
    let wide = control & regs::MSI_FLAGS_64BIT != 0;
    let maskable = control & regs::MSI_FLAGS_MASKBIT != 0;
    let data = if wide { regs::MSI_DATA_64 } else { regs::MSI_DATA_32 };
    let len = data + if maskable { 12 } else { 2 };
    if !builder.take(offset, len.into(), CONFIG_SIZE) {
        return false;
    }
    let log = u32::from((control & regs::MSI_FLAGS_QMASK) >> 1).min(5).min(facts.msi_vectors.ilog2());
    let capable = 1 << log;
    builder.put(
        offset + usize::from(regs::MSI_FLAGS),
        2,
        u32::from(control & (regs::MSI_FLAGS_64BIT | regs::MSI_FLAGS_MASKBIT)) | log << 1,
    );
    let enables = regs::MSI_FLAGS_ENABLE | regs::MSI_FLAGS_QSIZE;
    let mut rows = vec![
        // Enable, and the number of vectors that the guest enables.
        Register { offset: regs::MSI_FLAGS, width: 2, writable: enables.into(), ..Register::NONE },
        Register { offset: regs::MSI_ADDRESS_LO, writable: 0xffff_fffc, ..Register::NONE },
        Register { offset: data, width: 2, writable: 0xffff, ..Register::NONE },
    ];
    if wide {
        rows.push(Register { offset: regs::MSI_ADDRESS_HI, writable: u32::MAX, ..Register::NONE });
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
        let control = space.get16(self.offset + regs::MSI_FLAGS);
        if control & regs::MSI_FLAGS_ENABLE == 0 {
            0
        } else {
            (1 << ((control & regs::MSI_FLAGS_QSIZE) >> 4)).min(self.capable)
        }
    }

    /// Shows the guest that `count` vectors, a power of two, are enabled.
    pub(in crate::guest) fn show_enabled(&self, space: &mut ConfigSpace, count: u32) {
        let offset = self.offset + regs::MSI_FLAGS;
        let control = space.get16(offset) & !regs::MSI_FLAGS_QSIZE | (count.ilog2() as u16) << 4;
        space.shadow.put(offset.into(), 2, control.into());
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
        let low = space.get32(self.offset + regs::MSI_ADDRESS_LO);
        let (high, data) = if self.wide {
            (space.get32(self.offset + regs::MSI_ADDRESS_HI), space.get16(self.offset + regs::MSI_DATA_64))
        } else {
            (0, space.get16(self.offset + regs::MSI_DATA_32))
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
