//! MSI-X of the VMM's own functions (PCI Local Bus 3.0, 6.8.2): the table, and eventfds that reach the guest through
//! irqfds.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_passthrough::guest::{self, Vmm, VmmError};
use vm_passthrough::pci::regs;
use vmm_sys_util::eventfd::EventFd;

use super::vector::Vector;

/// The MSI-X table of a function.
pub(in crate::vmm) struct MsixTable {
    vectors: Vec<Vector>,
    state: Mutex<State>,
}

struct State {
    /// The message control register.
    control: u16,
    table: guest::MsixTable,
}

impl MsixTable {
    /// A table of `count` vectors, all masked.
    ///
    /// # Errors
    /// When there are no file descriptors or interrupt routes left.
    pub(in crate::vmm) fn new(vmm: Arc<dyn Vmm>, count: u16) -> Result<Self, VmmError> {
        let vectors = (0..count).map(|_| Vector::new(vmm.clone())).collect::<Result<Vec<_>, _>>()?;
        let state = State { control: 0, table: guest::MsixTable::new(count.into()) };
        Ok(Self { vectors, state: Mutex::new(state) })
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
            *byte = state.table.byte(at);
        }
    }

    /// Writes to the table.
    pub(in crate::vmm) fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        for vector in state.table.write(offset, data).into_iter().flatten() {
            self.update(&state, vector as usize);
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
        state.table.reset();
        for (index, vector) in self.vectors.iter().enumerate() {
            self.update(&state, index);
            vector.clear();
        }
    }

    /// Points a vector to where its entry now says.
    fn update(&self, state: &State, index: usize) {
        let enabled =
            state.control & (regs::MSIX_FLAGS_ENABLE | regs::MSIX_FLAGS_MASKALL) == regs::MSIX_FLAGS_ENABLE;
        if let Some(vector) = self.vectors.get(index) {
            vector.set(state.table.message(index as u32).filter(|_| enabled));
        }
    }
}
