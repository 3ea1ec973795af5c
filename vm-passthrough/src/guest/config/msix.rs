//! The MSI-X capability (PCI Express Base 6.0, 7.7.2). All of it is ours; VFIO programs the device.

use super::{Builder, ConfigSpace, EXTENDED, Facts, Register};

/// Control register, from the start of the capability.
const CONTROL: u16 = 2;
const ENABLE: u16 = 1 << 15;
const MASK_ALL: u16 = 1 << 14;

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
        u64::from(self.vectors) * 16
    }

    /// Length of the pending bit array in bytes.
    pub(in crate::guest) fn pending_len(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64) * 8
    }

    /// Whether the guest has enabled MSI-X, and whether it masks all vectors.
    pub(in crate::guest) fn enabled(&self, space: &ConfigSpace) -> (bool, bool) {
        let control = space.get16(self.offset + CONTROL);
        (control & ENABLE != 0, control & MASK_ALL != 0)
    }

    /// Whether a write of `len` bytes at `offset` touches the control register.
    pub(in crate::guest) fn touched(&self, offset: usize, len: usize) -> bool {
        let start = usize::from(self.offset + CONTROL);
        offset < start + 2 && start < offset + len
    }
}

pub(super) fn add(builder: &mut Builder<'_>, offset: usize, facts: &Facts) -> bool {
    if builder.space.msix.is_some() {
        return false;
    }
    let vectors =
        (u32::from(builder.word(offset + usize::from(CONTROL)) & 0x7ff) + 1).min(facts.msix_vectors);
    let place = |register: u32| ((register & 0b111) as u8, u64::from(register & !0b111));
    let msix = Msix {
        offset: offset as u16,
        vectors,
        table: place(builder.dword(offset + 4)),
        pending: place(builder.dword(offset + 8)),
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
        || !builder.take(offset, 12, EXTENDED)
    {
        return false;
    }
    builder.put(offset + usize::from(CONTROL), 2, vectors - 1);
    builder.rows(
        offset,
        &[
            Register { offset: CONTROL, width: 2, writable: u32::from(ENABLE | MASK_ALL), ..Register::NONE },
            Register { offset: 4, keep: u32::MAX, ..Register::NONE },
            Register { offset: 8, keep: u32::MAX, ..Register::NONE },
        ],
    );
    builder.space.msix = Some(msix);
    true
}
