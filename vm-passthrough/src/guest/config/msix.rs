//! The MSI-X capability (PCI Express Base 6.0, 7.7.2). All of it is ours; VFIO programs the device.

use super::{Builder, CONFIG_SIZE, ConfigSpace, Facts, Register};
use crate::pci::regs;

/// Where the MSI-X capability and its two structures are.
#[derive(Clone, Copy, Debug)]
pub(in crate::guest) struct Msix {
    offset: u16,
    /// Number of vectors, 1 to 2048.
    pub(in crate::guest) vectors: u32,
    /// BAR and offset of the table.
    pub(in crate::guest) table: (u8, u64),
    /// BAR and offset of the pending bit array.
    pub(in crate::guest) pending: (u8, u64),
}

impl Msix {
    /// Length of the table in bytes.
    pub(in crate::guest) fn table_len(&self) -> u64 {
        u64::from(self.vectors) * regs::MSIX_ENTRY_SIZE
    }

    /// Length of the pending bit array in bytes.
    pub(in crate::guest) fn pending_len(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64) * 8
    }

    /// Whether the guest has enabled MSI-X, and whether it masks all vectors.
    pub(in crate::guest) fn enabled(&self, space: &ConfigSpace) -> (bool, bool) {
        let control = space.get16(self.offset + regs::MSIX_FLAGS);
        (control & regs::MSIX_FLAGS_ENABLE != 0, control & regs::MSIX_FLAGS_MASKALL != 0)
    }

    /// Whether a write of `len` bytes at `offset` touches the control register.
    pub(in crate::guest) fn touched(&self, offset: usize, len: usize) -> bool {
        let start = usize::from(self.offset + regs::MSIX_FLAGS);
        offset < start + 2 && start < offset + len
    }
}

pub(super) fn add(builder: &mut Builder<'_>, offset: usize, facts: &Facts) -> bool {
    if builder.space.msix.is_some() {
        return false;
    }
    let control = builder.word(offset + usize::from(regs::MSIX_FLAGS));
    let vectors = (u32::from(control & regs::MSIX_FLAGS_QSIZE) + 1).min(facts.msix_vectors);
    let place = |register: u16| {
        let value = builder.dword(offset + usize::from(register));
        ((value & regs::MSIX_TABLE_BIR) as u8, u64::from(value & !regs::MSIX_TABLE_BIR))
    };
    let msix = Msix {
        offset: offset as u16,
        vectors,
        table: place(regs::MSIX_TABLE),
        pending: place(regs::MSIX_PBA),
    };
    // Structures outside a memory BAR are hostile or broken: no MSI-X then.
    let fits = |(bar, start): (u8, u64), len: u64| {
        facts.bar_sizes.get(usize::from(bar)).is_some_and(|&size| start + len <= size)
    };
    let overlap = msix.table.0 == msix.pending.0
        && msix.table.1 < msix.pending.1 + msix.pending_len()
        && msix.pending.1 < msix.table.1 + msix.table_len();
    if vectors == 0
        || overlap
        || !fits(msix.table, msix.table_len())
        || !fits(msix.pending, msix.pending_len())
        || !builder.take(offset, 12, CONFIG_SIZE)
    {
        return false;
    }
    builder.put(offset + usize::from(regs::MSIX_FLAGS), 2, vectors - 1);
    let enables = regs::MSIX_FLAGS_ENABLE | regs::MSIX_FLAGS_MASKALL;
    builder.rows(
        offset,
        &[
            Register { offset: regs::MSIX_FLAGS, width: 2, writable: enables.into(), ..Register::NONE },
            Register { offset: regs::MSIX_TABLE, keep: u32::MAX, ..Register::NONE },
            Register { offset: regs::MSIX_PBA, keep: u32::MAX, ..Register::NONE },
        ],
    );
    builder.space.msix = Some(msix);
    true
}
