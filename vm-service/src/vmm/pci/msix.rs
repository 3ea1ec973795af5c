//! MSI-X of the VMM's own functions (PCI Local Bus 3.0, 6.8.2): the table, and eventfds that reach the guest through
//! irqfds.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_passthrough::guest::{KvmVmm, MsiMessage, RouteId, Vmm as _, VmmError};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vmm::sys;

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
    vmm: Arc<KvmVmm>,
    triggers: Vec<EventFd>,
    state: Mutex<State>,
}

struct State {
    control: u16,
    vectors: Vec<Vector>,
}

struct Vector {
    route: RouteId,
    /// Address low and high, data, vector control.
    words: [u32; 4],
    /// What the route was last told.
    routed: Option<MsiMessage>,
}

impl MsixTable {
    /// A table of `count` vectors, all masked.
    ///
    /// # Errors
    /// When there are no file descriptors or interrupt routes left.
    pub(in crate::vmm) fn new(vmm: Arc<KvmVmm>, count: u16) -> Result<Self, VmmError> {
        let no_event = |error: io::Error| VmmError { what: "create an eventfd", reason: error.to_string() };
        let mut table =
            Self { vmm, triggers: Vec::new(), state: Mutex::new(State { control: 0, vectors: Vec::new() }) };
        for _ in 0..count {
            let trigger = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(no_event)?;
            let route = table.vmm.add_route(&trigger)?;
            table.triggers.push(trigger);
            table.state().vectors.push(Vector { route, words: [0, 0, 0, MASKED], routed: None });
        }
        Ok(table)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of vectors.
    pub(in crate::vmm) fn len(&self) -> u16 {
        self.triggers.len() as u16
    }

    /// Signals a vector; one that is masked is delivered when it is unmasked.
    pub(in crate::vmm) fn signal(&self, vector: u16) {
        if let Some(trigger) = self.triggers.get(usize::from(vector)) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = trigger.write(1);
        }
    }

    /// The eventfd that signals a vector, for another process; `None` where there is no such vector, or no descriptor.
    pub(in crate::vmm) fn trigger(&self, vector: u16) -> Option<EventFd> {
        self.triggers.get(usize::from(vector))?.try_clone().ok()
    }

    /// Takes a new value of the message control register.
    pub(in crate::vmm) fn set_control(&self, control: u16) {
        let mut state = self.state();
        if state.control != control {
            state.control = control;
            for index in 0..state.vectors.len() {
                self.update(&mut state, index);
            }
        }
    }

    /// Reads from the table.
    pub(in crate::vmm) fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state();
        for (at, byte) in (offset..).zip(data) {
            let vector = state.vectors.get((at / MSIX_ENTRY_SIZE) as usize);
            let word = vector.map_or(0, |vector| vector.words[(at / 4 % 4) as usize]);
            *byte = word.to_le_bytes()[(at % 4) as usize];
        }
    }

    /// Writes to the table.
    pub(in crate::vmm) fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        for (at, byte) in (offset..).zip(data) {
            if let Some(vector) = state.vectors.get_mut((at / MSIX_ENTRY_SIZE) as usize) {
                let word = &mut vector.words[(at / 4 % 4) as usize];
                let mut bytes = word.to_le_bytes();
                bytes[(at % 4) as usize] = *byte;
                *word = u32::from_le_bytes(bytes);
            }
        }
        if let Some(last) = (data.len() as u64).checked_sub(1).and_then(|len| offset.checked_add(len)) {
            for index in offset / MSIX_ENTRY_SIZE..=last / MSIX_ENTRY_SIZE {
                self.update(&mut state, index as usize);
            }
        }
    }

    /// Reads the pending bits: a masked vector whose eventfd was signalled.
    pub(in crate::vmm) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let state = self.state();
        for (at, byte) in (offset..).zip(data) {
            *byte = (0..8).fold(0, |bits, bit| {
                let index = at.saturating_mul(8).saturating_add(bit) as usize;
                let masked = state.vectors.get(index).is_some_and(|vector| vector.routed.is_none());
                let pending = masked && self.triggers.get(index).is_some_and(sys::signalled);
                bits | u8::from(pending) << bit
            });
        }
    }

    /// Masks everything and forgets what is pending.
    pub(in crate::vmm) fn reset(&self) {
        let mut state = self.state();
        state.control = 0;
        for index in 0..state.vectors.len() {
            state.vectors[index].words = [0, 0, 0, MASKED];
            self.update(&mut state, index);
        }
        for trigger in &self.triggers {
            // It fails when it was not signalled.
            let _ = trigger.read();
        }
    }

    /// Tells a vector's route what its entry now means.
    fn update(&self, state: &mut State, index: usize) {
        let enabled = state.control & (ENABLE | FUNCTION_MASK) == ENABLE;
        let Some(vector) = state.vectors.get_mut(index) else { return };
        let [low, high, data, control] = vector.words;
        let message = (enabled && control & MASKED == 0)
            .then_some(MsiMessage { address: u64::from(high) << 32 | u64::from(low), data });
        if message == vector.routed {
            return;
        }
        match self.vmm.set_route(vector.route, message) {
            Ok(()) => vector.routed = message,
            Err(error) => tracing::warn!(index, %error, "an interrupt of the guest stays masked"),
        }
    }
}

impl Drop for MsixTable {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for vector in &state.vectors {
            if let Err(error) = self.vmm.remove_route(vector.route) {
                tracing::warn!(%error, "an interrupt route was not removed");
            }
        }
    }
}
