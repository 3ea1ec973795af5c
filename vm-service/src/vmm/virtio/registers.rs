//! The registers of the virtio PCI transport that hold what the driver negotiates (section 4.1.4.3).

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::interrupt::Interrupt;

/// Device status bits (section 2.1).
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
pub(super) const NEEDS_RESET: u8 = 64;
const FAILED: u8 = 128;

/// Features of the transport and its queues.
pub(super) const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// What the driver has set.
pub(super) struct Registers {
    offered: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    pub(super) status: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

#[derive(Clone)]
struct QueueRegisters {
    max_size: u16,
    size: u16,
    enabled: bool,
    descriptors: u64,
    driver: u64,
    device: u64,
}

impl Registers {
    /// Registers after a reset.
    pub(super) fn new(features: u64, queue_sizes: &[u16]) -> Self {
        let queues = queue_sizes
            .iter()
            .map(|&size| QueueRegisters {
                max_size: size,
                size,
                enabled: false,
                descriptors: 0,
                driver: 0,
                device: 0,
            })
            .collect();
        Self {
            offered: features | TRANSPORT_FEATURES,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            status: 0,
            queue_select: 0,
            queues,
        }
    }

    /// Features that the driver accepted.
    pub(super) fn features(&self) -> u64 {
        self.driver_features
    }

    /// Accepts features as a driver does.
    #[cfg(test)]
    pub(super) fn accept_for_test(&mut self, features: u64) {
        self.driver_features = features;
    }

    /// Reads the register of `len` bytes at `offset`; 0 where there is none.
    pub(super) fn read(&self, offset: u64, len: usize, interrupt: &Interrupt) -> u64 {
        let queue = self.queues.get(usize::from(self.queue_select));
        match (offset, len) {
            (0x00, 4) => self.device_feature_select.into(),
            (0x04, 4) => half(self.offered, self.device_feature_select),
            (0x08, 4) => self.driver_feature_select.into(),
            (0x0c, 4) => half(self.driver_features, self.driver_feature_select),
            (0x10, 2) => interrupt.config_vector().into(),
            (0x12, 2) => self.queues.len() as u64,
            (0x14, 1) => self.status.into(),
            (0x16, 2) => self.queue_select.into(),
            (0x18, 2) => queue.map_or(0, |queue| queue.size.into()),
            (0x1a, 2) => interrupt.queue_vector(self.queue_select).into(),
            (0x1c, 2) => queue.map_or(0, |queue| queue.enabled.into()),
            // Each queue has a notification address of its own.
            (0x1e, 2) => queue.map_or(0, |_| self.queue_select.into()),
            (0x20, 4 | 8) => queue.map_or(0, |queue| queue.descriptors & mask(len)),
            (0x24, 4) => queue.map_or(0, |queue| queue.descriptors >> 32),
            (0x28, 4 | 8) => queue.map_or(0, |queue| queue.driver & mask(len)),
            (0x2c, 4) => queue.map_or(0, |queue| queue.driver >> 32),
            (0x30, 4 | 8) => queue.map_or(0, |queue| queue.device & mask(len)),
            (0x34, 4) => queue.map_or(0, |queue| queue.device >> 32),
            _ => 0,
        }
    }

    /// Writes the register of `len` bytes at `offset`, except the device status, which is the transport's. What the
    /// rules forbid at this moment has no effect.
    pub(super) fn write(&mut self, offset: u64, len: usize, value: u64, interrupt: &Interrupt) {
        let running = self.status & DRIVER_OK != 0;
        match (offset, len) {
            (0x00, 4) => self.device_feature_select = value as u32,
            (0x08, 4) => self.driver_feature_select = value as u32,
            (0x0c, 4) if self.status & FEATURES_OK == 0 => {
                let shift = match self.driver_feature_select {
                    0 => 0,
                    1 => 32,
                    _ => return,
                };
                self.driver_features =
                    self.driver_features & !(0xffff_ffff << shift) | (value & 0xffff_ffff) << shift;
            }
            (0x10, 2) => interrupt.set_config_vector(value as u16),
            (0x16, 2) => self.queue_select = value as u16,
            (0x1a, 2) => interrupt.set_queue_vector(self.queue_select, value as u16),
            _ if running => {}
            _ => {
                let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else { return };
                match (offset, len) {
                    (0x1c, 2) => queue.enabled |= value == 1,
                    _ if queue.enabled => {}
                    (0x18, 2) => {
                        let size = value as u16;
                        if size.is_power_of_two() && size <= queue.max_size {
                            queue.size = size;
                        }
                    }
                    (0x20..0x28, _) => set_half(&mut queue.descriptors, offset - 0x20, len, value),
                    (0x28..0x30, _) => set_half(&mut queue.driver, offset - 0x28, len, value),
                    (0x30..0x38, _) => set_half(&mut queue.device, offset - 0x30, len, value),
                    _ => {}
                }
            }
        }
    }

    /// Sets device status bits; `FEATURES_OK` only if the features are ones that were offered and make a modern
    /// driver. Returns whether the driver became ready just now.
    pub(super) fn set_status(&mut self, status: u8) -> bool {
        let before = self.status;
        let mut added = status & !before & !NEEDS_RESET;
        let good =
            self.driver_features & !self.offered == 0 && self.driver_features >> VIRTIO_F_VERSION_1 & 1 != 0;
        if added & FEATURES_OK != 0 && !good {
            added &= !FEATURES_OK;
        }
        if (before | added) & (FEATURES_OK | FAILED) != FEATURES_OK {
            added &= !DRIVER_OK;
        }
        self.status |= added;
        added & DRIVER_OK != 0
    }

    /// The enabled queues with their indexes, or what is wrong with one.
    pub(super) fn build_queues(&self, memory: &GuestMemoryMmap) -> Result<Vec<(u16, Queue)>, String> {
        let mut built = Vec::new();
        for (index, registers) in self.queues.iter().enumerate().filter(|(_, queue)| queue.enabled) {
            let wrong = |error: virtio_queue::Error| format!("queue {index}: {error}");
            let mut queue = Queue::new(registers.max_size).map_err(wrong)?;
            queue.try_set_size(registers.size).map_err(wrong)?;
            queue.try_set_desc_table_address(GuestAddress(registers.descriptors)).map_err(wrong)?;
            queue.try_set_avail_ring_address(GuestAddress(registers.driver)).map_err(wrong)?;
            queue.try_set_used_ring_address(GuestAddress(registers.device)).map_err(wrong)?;
            queue.set_event_idx(self.driver_features >> VIRTIO_RING_F_EVENT_IDX & 1 != 0);
            queue.set_ready(true);
            if !queue.is_valid(memory) {
                return Err(format!("queue {index} does not lie in RAM"));
            }
            built.push((index as u16, queue));
        }
        Ok(built)
    }
}

fn half(value: u64, select: u32) -> u64 {
    match select {
        0 => value & 0xffff_ffff,
        1 => value >> 32,
        _ => 0,
    }
}

fn mask(len: usize) -> u64 {
    if len == 8 { u64::MAX } else { 0xffff_ffff }
}

fn set_half(register: &mut u64, offset: u64, len: usize, value: u64) {
    match (offset, len) {
        (0, 8) => *register = value,
        (0, 4) => *register = *register & !0xffff_ffff | value & 0xffff_ffff,
        (4, 4) => *register = *register & 0xffff_ffff | value << 32,
        _ => {}
    }
}
