//! An MSI-X table as a guest writes it (PCI Express Base 6.0, 7.7.2.5 to 7.7.2.9): of a passed device, or of one that a VMM
//! emulates.

use std::ops::RangeInclusive;

use super::MsiMessage;
use crate::pci::regs::{MSIX_ENTRY_CTRL_MASKBIT, MSIX_ENTRY_SIZE, MSIX_ENTRY_VECTOR_CTRL};

const ENTRY: usize = MSIX_ENTRY_SIZE as usize;
const CONTROL: usize = MSIX_ENTRY_VECTOR_CTRL as usize;

/// The entries of an MSI-X table.
#[derive(Clone, Debug)]
pub struct MsixTable {
    bytes: Vec<u8>,
}

impl MsixTable {
    /// `vectors` entries, all masked.
    pub fn new(vectors: u32) -> Self {
        let mut table = Self { bytes: vec![0; vectors as usize * ENTRY] };
        table.reset();
        table
    }

    /// Forgets what the guest wrote.
    pub fn reset(&mut self) {
        for entry in self.bytes.chunks_exact_mut(ENTRY) {
            entry.fill(0);
            entry[CONTROL] = MSIX_ENTRY_CTRL_MASKBIT;
        }
    }

    /// The byte at `offset`; zero past the end.
    pub fn byte(&self, offset: u64) -> u8 {
        usize::try_from(offset).ok().and_then(|at| self.bytes.get(at)).copied().unwrap_or(0)
    }

    /// Takes a write of the guest; what lies past the end is ignored. Returns the vectors that it touched.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<RangeInclusive<u32>> {
        let start = usize::try_from(offset).ok()?;
        let places = self.bytes.get_mut(start..)?;
        let len = data.len().min(places.len());
        for (index, (place, &byte)) in places.iter_mut().zip(data).enumerate() {
            // Of vector control, bits other than the mask are reserved and read zero.
            *place = match (start + index) % ENTRY {
                ..CONTROL => byte,
                CONTROL => byte & MSIX_ENTRY_CTRL_MASKBIT,
                _ => 0,
            };
        }
        let last = start.checked_add(len.checked_sub(1)?)?;
        Some((start / ENTRY) as u32..=(last / ENTRY) as u32)
    }

    /// The message of a vector; `None` while it is masked.
    pub fn message(&self, vector: u32) -> Option<MsiMessage> {
        let at = vector as usize * ENTRY;
        let entry = self.bytes.get(at..at + ENTRY)?;
        let (low, rest) = entry.split_first_chunk::<8>()?;
        let (data, control) = rest.split_first_chunk::<4>()?;
        if control.first()? & MSIX_ENTRY_CTRL_MASKBIT != 0 {
            return None;
        }
        Some(MsiMessage { address: u64::from_le_bytes(*low), data: u32::from_le_bytes(*data) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_masked_at_first_and_take_any_access() {
        let mut table = MsixTable::new(3);
        assert_eq!(table.message(0), None);
        assert_eq!(table.byte(12), 1);
        assert_eq!(table.write(0, &0xfee0_1000_u64.to_le_bytes()), Some(0..=0));
        assert_eq!(table.write(8, &[0x41, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff]), Some(0..=0));
        assert_eq!(table.message(0), Some(MsiMessage { address: 0xfee0_1000, data: 0x41 }));
        assert_eq!((table.byte(12), table.byte(15)), (0, 0));
        // Across two entries, past the end, far past the end, nothing.
        assert_eq!(table.write(14, &[0xff; 4]), Some(0..=1));
        assert_eq!(table.write(44, &[0; 8]), Some(2..=2));
        assert_eq!(table.message(2), Some(MsiMessage { address: 0, data: 0 }));
        assert_eq!(table.write(48, &[0]), None);
        assert_eq!(table.write(u64::MAX, &[0]), None);
        assert_eq!(table.write(0, &[]), None);
        assert_eq!((table.message(3), table.message(u32::MAX), table.byte(u64::MAX)), (None, None, 0));
        table.reset();
        assert_eq!(table.message(0), None);
        assert_eq!(table.byte(0), 0);
    }
}
