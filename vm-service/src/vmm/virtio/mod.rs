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
mod net;
mod pci;
mod programs;
mod registers;
mod supervisor;
#[cfg(test)]
mod tests;
mod vhost_rings;
mod vsock;
mod worker;

pub(super) use accelerator::AcceleratorDevice;
pub(super) use block::BlockDevice;
pub(super) use net::NetDevice;
pub(super) use pci::VirtioPci;
pub(super) use vsock::VsockDevice;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// How long it may take to stop, and what to look at when it does not.
    fn stopping(&self) -> (Duration, &'static str);
    /// Ends what it does beside serving the queues, until it is reset.
    ///
    /// # Errors
    /// When that has not ended by then.
    fn stop(&self, _until: Instant) -> Result<(), Busy> {
        Ok(())
    }
    /// Makes it ready for another start of the guest, once it has stopped.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    fn reset(&self) -> io::Result<()> {
        Ok(())
    }
    /// Starts to serve the queues.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    fn start(&self, work: Activation) -> io::Result<Worker>;
}

/// Something did not end in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

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
