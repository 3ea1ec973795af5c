//! The errors, interrupts and link of a device.

use vm_passthrough::{Host, PciAddress, pci};

use crate::api::DeviceHealth;
use crate::deadlines::DEVICE_HEALTH;

/// The state of a function at this moment; `None` when it has just gone.
pub(crate) fn read(host: &Host, address: PciAddress) -> Option<DeviceHealth> {
    let interrupts = pci::interrupts(host).get(&address).copied();
    match pci::health(host, address, DEVICE_HEALTH) {
        Ok(health) => Some(DeviceHealth::new(&health, interrupts, None)),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    }
}
