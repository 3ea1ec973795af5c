//! The guest's PCI Express hierarchy: a host bridge, root ports with the passed-through devices behind them, and
//! the VMM's own devices on bus 0. Each further NUMA node of the guest has a root bus for the devices on it.

mod config;
mod expected;
#[cfg(test)]
mod fuzz;
mod host_bridge;
mod link;
mod msix;
#[cfg(test)]
mod pciehp;
mod place;
mod root;
mod root_errors;
mod root_port;
mod vector;

pub(super) use config::ConfigSpace;
pub use expected::ExpectedFunction;
pub(super) use host_bridge::HostBridge;
pub(super) use msix::MsixTable;

pub(super) use place::RootBus;
pub(super) use root::{PciRoot, SLOTS};
pub use root_port::GuestAnswer;
pub(super) use root_port::RootPort;

use vm_passthrough::pci::regs;

use super::error::MachineError;

/// A function of the VMM's own on bus 0. Its methods are called from any vCPU's thread, with whatever the guest
/// wrote.
pub(super) trait Function: Send + Sync {
    /// Reads 1, 2 or 4 bytes of config space, which do not pass byte 4096.
    fn config_read(&self, offset: u16, data: &mut [u8]);
    /// Writes 1, 2 or 4 bytes of config space, which do not pass byte 4096.
    fn config_write(&self, offset: u16, data: &[u8]);
    /// Offset in its memory BAR at which `address` falls, if the BAR decodes it now.
    fn find_bar(&self, address: u64) -> Option<u64>;
    /// Reads from its memory BAR.
    fn bar_read(&self, offset: u64, data: &mut [u8]);
    /// Writes to its memory BAR.
    fn bar_write(&self, offset: u64, data: &[u8]);
    /// Asks it to end what it does of its own accord, without waiting.
    fn ask_to_stop(&self) {}
    /// Ends what it does of its own accord: afterwards it touches neither RAM nor what is behind it.
    ///
    /// # Errors
    /// When that does not end in time. It was asked to, and it can be waited for again.
    fn stop(&self) -> Result<(), MachineError> {
        Ok(())
    }
    /// Puts it, once it has stopped, to its state after power-on.
    ///
    /// # Errors
    /// When it can't be made ready again.
    fn reset(&self) -> Result<(), MachineError>;
}

/// Command register: parity, SERR and INTx disable, which only read what was written.
pub(super) const COMMAND_OTHER: u16 = regs::COMMAND_PARITY | regs::COMMAND_SERR | regs::COMMAND_INTX_DISABLE;
