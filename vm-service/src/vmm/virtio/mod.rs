//! Virtio devices (OASIS Virtual I/O Device 1.3): a transport over PCI that knows no device, and the devices.
//!
//! A device is inert until the guest's driver sets `DRIVER_OK`; then its queues go to a thread of its own, which
//! hands them back when the device is reset. A driver that breaks the rules gets `DEVICE_NEEDS_RESET`; nothing that
//! it writes can do worse.

mod accelerator;
mod block;
#[cfg(test)]
mod fuzz;
mod interrupt;
mod pci;
mod programs;
mod registers;
mod supervisor;
#[cfg(test)]
mod tests;
mod vsock;
mod worker;

pub(super) use accelerator::AcceleratorDevice;
pub(super) use block::BlockDevice;
pub(super) use pci::VirtioPci;
pub(super) use vsock::VsockDevice;

use std::io;
use std::sync::Arc;

use interrupt::Interrupt;
use virtio_queue::Queue;
use vm_memory::{GuestMemoryMmap, MmapRegion};
use vmm_sys_util::eventfd::EventFd;
use worker::Worker;

/// What a device is, apart from how it is reached.
pub(super) trait VirtioDevice: Send + Sync {
    /// What messages call it.
    fn name(&self) -> String;
    /// Virtio device id (section 5).
    fn id(&self) -> u16;
    /// PCI class code.
    fn class(&self) -> u32;
    /// Features that it offers, less those of the transport.
    fn features(&self) -> u64;
    /// The most entries of each queue, powers of two.
    fn queue_sizes(&self) -> &[u16];
    /// Device-specific configuration, read only.
    fn config(&self) -> &[u8];
    /// Memory that the guest reaches without leaving, as shared memory region (section 2.10) of this number. Its length is
    /// a power of two.
    fn window(&self) -> Option<(u8, Arc<MmapRegion>)> {
        None
    }
    /// Starts to serve the queues.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    fn start(&self, work: Activation) -> io::Result<Worker>;
}

/// What a device is given when its driver is ready.
pub(super) struct Activation {
    /// The guest's RAM.
    pub(super) memory: GuestMemoryMmap,
    /// Features that the driver accepted.
    pub(super) features: u64,
    /// The queues that the driver enabled: index, queue, and the eventfd that its notifications signal.
    pub(super) queues: Vec<(u16, Queue, EventFd)>,
    /// How to reach the driver.
    pub(super) interrupt: Arc<Interrupt>,
}
