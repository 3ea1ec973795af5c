//! MSI-X of the VMM's own functions (PCI Local Bus 3.0, 6.8.2): the table, and eventfds that reach the guest through
//! irqfds.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_passthrough::guest::{MsiMessage, Vmm, VmmError};
use vmm_sys_util::eventfd::EventFd;

use super::vector::Vector;

/// Bytes of one table entry.
pub(in crate::vmm) const MSIX_ENTRY_SIZE: u64 = 16;
/// Message control: MSI-X is on.
const ENABLE: u16 = 1 << 15;
/// Message control: all vectors are masked.
const FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: this vector is masked.
const MASKED: u32 = 1;

/// The MSI-X table of a function.
pub(in crate::vmm) struct MsixTable {
    vectors: Vec<Vector>,
    state: Mutex<State>,
}

struct State {
    control: u16,
    /// Address low and high, data, vector control of each vector.
    entries: Vec<[u32; 4]>,
}

impl MsixTable {
    /// A table of `count` vectors, all masked.
    ///
    /// # Errors
    /// When there are no file descriptors or interrupt routes left.
    pub(in crate::vmm) fn new(vmm: Arc<dyn Vmm>, count: u16) -> Result<Self, VmmError> {
        let vectors = (0..count).map(|_| Vector::new(vmm.clone())).collect::<Result<Vec<_>, _>>()?;
        let entries = vec![[0, 0, 0, MASKED]; vectors.len()];
        Ok(Self { vectors, state: Mutex::new(State { control: 0, entries }) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of vectors.
    pub(in crate::vmm) fn len(&self) -> u16 {
        self.vectors.len() as u16
    }

    /// Signals a vector; one that is masked is delivered when it is unmasked.
    pub(in crate::vmm) fn signal(&self, vector: u16) {
        if let Some(vector) = self.vectors.get(usize::from(vector)) {
            vector.signal();
        }
    }

    /// The eventfd that signals a vector, for another process; `None` where there is no such vector, or no descriptor.
    pub(in crate::vmm) fn trigger(&self, vector: u16) -> Option<EventFd> {
        self.vectors.get(usize::from(vector))?.trigger()
    }

    /// Takes a new value of the message control register.
    pub(in crate::vmm) fn set_control(&self, control: u16) {
        let mut state = self.state();
        if state.control != control {
            state.control = control;
            for index in 0..self.vectors.len() {
                self.update(&state, index);
            }
        }
    }

    /// Reads from the table.
    pub(in crate::vmm) fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state();
        for (at, byte) in (offset..).zip(data) {
            let entry = state.entries.get((at / MSIX_ENTRY_SIZE) as usize);
            let word = entry.map_or(0, |entry| entry[(at / 4 % 4) as usize]);
            *byte = word.to_le_bytes()[(at % 4) as usize];
        }
    }

    /// Writes to the table.
    pub(in crate::vmm) fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        for (at, byte) in (offset..).zip(data) {
            if let Some(entry) = state.entries.get_mut((at / MSIX_ENTRY_SIZE) as usize) {
                let word = &mut entry[(at / 4 % 4) as usize];
                let mut bytes = word.to_le_bytes();
                bytes[(at % 4) as usize] = *byte;
                *word = u32::from_le_bytes(bytes);
            }
        }
        if let Some(last) = (data.len() as u64).checked_sub(1).and_then(|len| offset.checked_add(len)) {
            for index in offset / MSIX_ENTRY_SIZE..=last / MSIX_ENTRY_SIZE {
                self.update(&state, index as usize);
            }
        }
    }

    /// Reads the pending bits: a masked vector whose eventfd was signalled.
    pub(in crate::vmm) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = (0..8).fold(0, |bits, bit| {
                let index = at.saturating_mul(8).saturating_add(bit) as usize;
                bits | u8::from(self.vectors.get(index).is_some_and(Vector::is_pending)) << bit
            });
        }
    }

    /// Masks everything and forgets what is pending.
    pub(in crate::vmm) fn reset(&self) {
        let mut state = self.state();
        state.control = 0;
        state.entries.fill([0, 0, 0, MASKED]);
        for (index, vector) in self.vectors.iter().enumerate() {
            self.update(&state, index);
            vector.clear();
        }
    }

    /// Points a vector to where its entry now says.
    fn update(&self, state: &State, index: usize) {
        let enabled = state.control & (ENABLE | FUNCTION_MASK) == ENABLE;
        let Some((vector, &[low, high, data, control])) =
            self.vectors.get(index).zip(state.entries.get(index))
        else {
            return;
        };
        let message = MsiMessage { address: u64::from(high) << 32 | u64::from(low), data };
        vector.set((enabled && control & MASKED == 0).then_some(message));
    }
}
