//! The guest's PCI Express hierarchy: a host bridge, root ports with the passed-through devices behind them, and
//! the VMM's own devices on bus 0.

mod config;
#[cfg(test)]
mod fuzz;
mod host_bridge;
mod msix;
mod place;
mod root;
mod root_port;
mod vector;

pub(super) use config::ConfigSpace;
pub(super) use host_bridge::HostBridge;
pub(super) use msix::{MSIX_ENTRY_SIZE, MsixTable};

pub(super) use root::PciRoot;
pub(super) use root_port::RootPort;

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

/// Offsets in the config header (PCI Local Bus 3.0, chapter 6; PCI-to-PCI Bridge 1.2, chapter 3).
pub(super) mod reg {
    pub(in crate::vmm) const COMMAND: u16 = 0x04;
    pub(in crate::vmm) const STATUS: u16 = 0x06;
    pub(in crate::vmm) const REVISION: u16 = 0x08;
    pub(in crate::vmm) const HEADER_TYPE: u16 = 0x0e;
    pub(in crate::vmm) const PRIMARY_BUS: u16 = 0x18;
    pub(in crate::vmm) const SECONDARY_BUS: u16 = 0x19;
    pub(in crate::vmm) const IO_BASE: u16 = 0x1c;
    pub(in crate::vmm) const MEMORY_BASE: u16 = 0x20;
    pub(in crate::vmm) const MEMORY_LIMIT: u16 = 0x22;
    pub(in crate::vmm) const PREFETCH_BASE: u16 = 0x24;
    pub(in crate::vmm) const PREFETCH_LIMIT: u16 = 0x26;
    pub(in crate::vmm) const PREFETCH_BASE_HIGH: u16 = 0x28;
    pub(in crate::vmm) const PREFETCH_LIMIT_HIGH: u16 = 0x2c;
    pub(in crate::vmm) const BAR0: u16 = 0x10;
    pub(in crate::vmm) const SUBSYSTEM: u16 = 0x2c;
    pub(in crate::vmm) const CAPABILITIES: u16 = 0x34;
    pub(in crate::vmm) const INTERRUPT_LINE: u16 = 0x3c;
    pub(in crate::vmm) const BRIDGE_CONTROL: u16 = 0x3e;
    /// Command register: decode I/O.
    pub(in crate::vmm) const COMMAND_IO: u16 = 1;
    /// Command register: decode memory.
    pub(in crate::vmm) const COMMAND_MEMORY: u16 = 2;
    /// Command register: may start DMA and interrupts.
    pub(in crate::vmm) const COMMAND_MASTER: u16 = 4;
    /// Command register: parity, SERR and INTx disable.
    pub(in crate::vmm) const COMMAND_OTHER: u16 = 1 << 6 | 1 << 8 | 1 << 10;
}
