//! The host bridge, function 00:00.0: nothing but an identity.

use vm_passthrough::pci::regs;

use super::{ConfigSpace, Function};
use crate::vmm::error::MachineError;

/// The host bridge.
#[derive(Debug)]
pub(in crate::vmm) struct HostBridge(ConfigSpace);

impl HostBridge {
    /// A host bridge. Its id is the one that QEMU registered for a bare PCI Express host bridge.
    pub(in crate::vmm) fn new() -> Self {
        let mut config = ConfigSpace::new();
        config.set(0, &[0x36, 0x1b, 0x08, 0x00]);
        config.set(regs::CLASS_REVISION, &[0, 0, 0x00, 0x06]);
        Self(config)
    }
}

impl Function for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn config_write(&self, _offset: u16, _data: &[u8]) {}

    fn find_bar(&self, _address: u64) -> Option<u64> {
        None
    }

    fn bar_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn bar_write(&self, _offset: u64, _data: &[u8]) {}

    fn reset(&self) -> Result<(), MachineError> {
        Ok(())
    }
}
