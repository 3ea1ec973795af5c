//! What a device tells its driver: a queue has used buffers, or the device needs a reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use vmm_sys_util::eventfd::EventFd;

use crate::vmm::pci::MsixTable;

/// No vector is assigned (section 4.1.5.1.2).
pub(in crate::vmm) const NO_VECTOR: u16 = 0xffff;

/// The vectors of a device, and whether it gave up.
pub(in crate::vmm) struct Interrupt {
    msix: Arc<MsixTable>,
    config: AtomicU16,
    queues: Vec<AtomicU16>,
    needs_reset: AtomicBool,
}

impl Interrupt {
    /// No vectors assigned.
    pub(super) fn new(msix: Arc<MsixTable>, queues: usize) -> Self {
        let queues = (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect();
        Self { msix, config: AtomicU16::new(NO_VECTOR), queues, needs_reset: AtomicBool::new(false) }
    }

    /// Tells the driver that a queue has used buffers.
    pub(in crate::vmm) fn used(&self, queue: u16) {
        self.msix.signal(self.queue_vector(queue));
    }

    /// What delivers a queue's interrupt when another process signals it; `None` where the driver wants none. A vector
    /// that the driver assigns later is not followed.
    pub(super) fn trigger(&self, queue: u16) -> Option<EventFd> {
        self.msix.trigger(self.queue_vector(queue))
    }

    /// Tells the driver that the device won't go on before a reset.
    pub(in crate::vmm) fn give_up(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.msix.signal(self.config_vector());
    }

    /// Whether the device gave up.
    pub(super) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Vector of configuration changes.
    pub(super) fn config_vector(&self) -> u16 {
        self.config.load(Ordering::Relaxed)
    }

    /// Vector of a queue.
    pub(super) fn queue_vector(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    /// Assigns the vector of configuration changes; one that does not exist is none.
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config.store(self.existing(vector), Ordering::Relaxed);
    }

    /// Assigns the vector of a queue; one that does not exist is none.
    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(slot) = self.queues.get(usize::from(queue)) {
            slot.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    /// Forgets everything.
    pub(super) fn reset(&self) {
        self.config.store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.queues {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.needs_reset.store(false, Ordering::Release);
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.msix.len() { vector } else { NO_VECTOR }
    }
}
