//! The message signalled interrupt of a device, as something to wait for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::vfio::{DeviceFile, IrqTrigger, MSI_IRQ, VfioError};

/// The first vector of a device's MSI, enabled until it is closed or dropped. Its descriptor is an eventfd that doesn't block.
#[derive(Debug)]
pub struct Interrupt {
    device: Arc<dyn DeviceFile>,
    event: OwnedFd,
    is_enabled: bool,
}

impl Interrupt {
    /// Enables it.
    ///
    /// # Errors
    /// When the device has no MSI, another kind of interrupt is enabled, or the Linux kernel refuses.
    pub fn enable(device: Arc<dyn DeviceFile>) -> Result<Self, VfioError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            VfioError::System {
                operation: "eventfd",
                path: device.address().to_string(),
                source: error.into(),
                remedy: "raise the limit of open files (ulimit -n)",
            }
        })?;
        if device.irq(MSI_IRQ)?.count == 0 {
            let reason = "it has no message signalled interrupts (MSI)".into();
            return Err(VfioError::Unavailable { address: device.address(), reason });
        }
        device.set_triggers(MSI_IRQ, 0, &[IrqTrigger::Eventfd(event.as_fd())])?;
        Ok(Self { device, event, is_enabled: true })
    }

    /// Disables it.
    ///
    /// # Errors
    /// When the Linux kernel refuses.
    pub fn close(mut self) -> Result<(), VfioError> {
        self.is_enabled = false;
        self.device.disable_irqs(MSI_IRQ)
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        if self.is_enabled
            && let Err(error) = self.device.disable_irqs(MSI_IRQ)
        {
            tracing::error!(address = %self.device.address(), %error, "an interrupt stays enabled");
        }
    }
}
