//! Routes port and memory accesses that left the guest.

use std::sync::Arc;

use super::acpi;
use super::error::MachineError;
use super::layout::{self, port};
use super::lifecycle::{Event, Lifecycle};
use super::pci::PciRoot;
use super::serial::SerialConsole;

/// Everything that the guest can reach with an exit.
pub(super) struct Io {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) serial: Arc<SerialConsole>,
    pub(super) pci: PciRoot,
}

/// Pulse the processor's reset line (IBM PC AT keyboard controller).
const KEYBOARD_RESET: u8 = 0xfe;
/// ACPI sleep control: enter the sleep type in bits 4:2.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Reset control register: reset the processor, on a rising edge.
const RESET_CPU: u8 = 1 << 2;

impl Io {
    /// Reads a port; all ones where there is nothing.
    pub(super) fn port_read(&self, address: u16, data: &mut [u8]) {
        match (address, data) {
            (port::SERIAL..=0x3ff, [byte]) => *byte = self.serial.read((address - port::SERIAL) as u8),
            // No input, no output pending, no sleep status.
            (port::KEYBOARD | port::SLEEP_CONTROL | port::SLEEP_STATUS | port::RESET, [byte]) => *byte = 0,
            (port::PCI_ADDRESS..=0xcff, data) => self.pci.port_read(address, data),
            (_, data) => self.pci.io_read(address, data),
        }
    }

    /// Writes a port; nothing happens where there is nothing.
    pub(super) fn port_write(&self, address: u16, data: &[u8]) {
        match (address, data) {
            (port::SERIAL..=0x3ff, &[byte]) => {
                self.serial.write((address - port::SERIAL) as u8, byte, || self.lifecycle.stopping());
            }
            (port::KEYBOARD, &[KEYBOARD_RESET]) => self.lifecycle.announce(Event::Reboot),
            (port::RESET, &[byte]) if byte & RESET_CPU != 0 => self.lifecycle.announce(Event::Reboot),
            (port::SLEEP_CONTROL, &[byte])
                if byte & SLEEP_ENABLE != 0 && byte >> 2 & 7 == acpi::SLEEP_TYPE_S5 =>
            {
                self.lifecycle.announce(Event::Shutdown);
            }
            // The other bytes of these two registers do nothing; neither do they reach what lies around them.
            (port::RESET | port::SLEEP_CONTROL, &[_]) => {}
            (port::PCI_ADDRESS..=0xcff, data) => self.pci.port_write(address, data),
            _ => self.pci.io_write(address, data),
        }
    }

    /// Reads memory; all ones where there is nothing.
    pub(super) fn memory_read(&self, address: u64, data: &mut [u8]) {
        if layout::ECAM_WINDOW.contains(&address) {
            self.pci.ecam_read(address - layout::ECAM, data);
        } else if !self.pci.memory_read(address, data) {
            tracing::trace!(address, "the guest read memory that nothing decodes");
        }
    }

    /// Writes memory; nothing happens where there is nothing.
    pub(super) fn memory_write(&self, address: u64, data: &[u8]) {
        if layout::ECAM_WINDOW.contains(&address) {
            self.pci.ecam_write(address - layout::ECAM, data);
        } else if !self.pci.memory_write(address, data) {
            tracing::trace!(address, "the guest wrote memory that nothing decodes");
        }
    }

    /// Puts everything but the passed-through devices to its state after power-on, once it has stopped.
    ///
    /// # Errors
    /// When a device can't be made ready again.
    pub(super) fn reset(&self) -> Result<(), MachineError> {
        self.serial.reset();
        self.pci.reset()
    }
}
