//! INTx from the device to the guest (PCI Local Bus 3.0, 2.2.6): a level-triggered line, by two eventfds.
//!
//! When the device asserts its pin, VFIO masks it on the host and signals the trigger, which asserts the guest's line. Once the
//! guest has ended the interrupt, its interrupt controller deasserts the line and signals the other eventfd, by which VFIO
//! unmasks the pin: if the device still asserts it, it fires again. So nothing is lost however long the guest has the line
//! masked, each end of an interrupt lets one more through at most, and none of this exits to the VMM.
//!
//! The guest's INTx Disable reaches vfio-pci while the pin is connected, which masks and unmasks in its place, also for a device
//! that can't. A pin that is not connected is disabled.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use super::{DeviceError, RouteId, Vmm, VmmError};
use crate::vfio::{DeviceFile, INTX_IRQ, IrqTrigger, Result};

/// The interrupt pin of a function.
#[derive(Debug)]
pub(super) struct Intx {
    file: Arc<dyn DeviceFile>,
    vmm: Arc<dyn Vmm>,
    /// 1 to 4 for INTA to INTD; 0 where it has none that VFIO can deliver.
    pin: u8,
    /// Where it leads.
    line: Option<u32>,
    wire: Option<Wire>,
    /// Whether VFIO signals a trigger.
    enabled: bool,
    /// Whether it could not be connected, which only a reset has tried again.
    failed: bool,
}

/// What leads from VFIO to the guest, and back. Closing an eventfd would disconnect it.
#[derive(Debug)]
struct Wire {
    route: RouteId,
    trigger: OwnedFd,
    resample: OwnedFd,
}

impl Intx {
    /// Not connected. `pin` is the function's Interrupt Pin register.
    pub(super) fn new(file: Arc<dyn DeviceFile>, vmm: Arc<dyn Vmm>, pin: u8) -> Result<Self> {
        let info = file.irq(INTX_IRQ)?;
        let works = info.count == 1 && info.eventfd && info.maskable && (1..=4).contains(&pin);
        let pin = if works { pin } else { 0 };
        Ok(Self { file, vmm, pin, line: None, wire: None, enabled: false, failed: false })
    }

    /// Takes the lines that the pins of its slot lead to; answers with the pin that the guest is to see.
    pub(super) fn connect_pins(&mut self, lines: [u32; 4]) -> u8 {
        self.line = self.pin.checked_sub(1).and_then(|pin| lines.get(usize::from(pin)).copied());
        self.pin
    }

    /// Connects the pin to its line, if it has one and is not.
    pub(super) fn connect(&mut self) {
        let Some(line) = self.line.filter(|_| self.wire.is_none() && !self.failed) else { return };
        if let Err(error) = self.wire(line) {
            self.failed = true;
            tracing::warn!(device = %self.file.address(), %error, "the guest gets no INTx from the device until it resets it");
            if let Err(error) = self.disconnect() {
                tracing::warn!(device = %self.file.address(), %error, "INTx is half connected");
            }
        }
    }

    /// Whether it leads to its line.
    pub(super) fn is_connected(&self) -> bool {
        self.enabled && self.wire.is_some()
    }

    fn wire(&mut self, line: u32) -> Result<(), DeviceError> {
        let event = || {
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| VmmError::new("make an interrupt's eventfd", error))
        };
        let (trigger, resample) = (event()?, event()?);
        let route = self.vmm.add_line(line, trigger.as_fd(), resample.as_fd())?;
        let wire = self.wire.insert(Wire { route, trigger, resample });
        self.file.set_triggers(INTX_IRQ, 0, &[IrqTrigger::Eventfd(wire.trigger.as_fd())])?;
        self.enabled = true;
        // What the guest ended before this is in the eventfd, and unmasks the pin now.
        Ok(self.file.set_unmask_event(INTX_IRQ, wire.resample.as_fd())?)
    }

    /// Disconnects the pin. Does all of it even if a part fails, and returns the first failure; doing it again does the rest.
    pub(super) fn disconnect(&mut self) -> Result<(), DeviceError> {
        let mut result = Ok(());
        if self.enabled {
            result = self.file.disable_irqs(INTX_IRQ).map_err(DeviceError::from);
            self.enabled = result.is_err();
        }
        if let Some(wire) = self.wire.take()
            && let Err(error) = self.vmm.remove_route(wire.route)
        {
            result = result.and(Err(error.into()));
            self.wire = Some(wire);
        }
        result
    }

    /// Disconnects the pin of a device that is reset.
    pub(super) fn clear(&mut self) -> Result<(), DeviceError> {
        self.failed = false;
        self.disconnect()
    }
}
