//! A PCI Express root port: a type 1 header with the device that is passed through behind it.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_passthrough::PassthroughDevice;

use super::{ConfigSpace, reg};

/// Bridge control: secondary bus reset.
const SECONDARY_BUS_RESET: u16 = 1 << 6;

/// A root port and the device behind it.
#[derive(Debug)]
pub(in crate::vmm) struct RootPort {
    config: Mutex<ConfigSpace>,
    device: Arc<dyn PassthroughDevice>,
}

impl RootPort {
    /// The port in slot `slot` of bus 0 for `device`.
    pub(in crate::vmm) fn new(slot: u8, device: Arc<dyn PassthroughDevice>) -> Self {
        let mut config = ConfigSpace::new();
        // The id that QEMU registered for a generic root port.
        config.set(0, &[0x36, 0x1b, 0x0c, 0x00]);
        config.set(reg::REVISION, &[0, 0, 0x04, 0x06]);
        config.set(reg::HEADER_TYPE, &[1]);
        let command = reg::COMMAND_IO | reg::COMMAND_MEMORY | reg::COMMAND_MASTER | reg::COMMAND_OTHER;
        config.allow(reg::COMMAND, &command.to_le_bytes());
        config.allow(reg::PRIMARY_BUS, &[0xff; 3]);
        // Windows of whole 4 KiB (I/O) and 1 MiB (memory); the prefetchable one has 64 bits.
        config.allow(reg::IO_BASE, &[0xf0, 0xf0]);
        config.allow(reg::MEMORY_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.set(reg::PREFETCH_BASE, &[1, 0, 1, 0]);
        config.allow(reg::PREFETCH_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.allow(reg::PREFETCH_BASE_HIGH, &[0xff; 8]);
        config.allow(reg::INTERRUPT_LINE, &[0xff]);
        config.allow(reg::BRIDGE_CONTROL, &(1u16 | 1 << 1 | SECONDARY_BUS_RESET).to_le_bytes());
        // Windows are closed while base is above limit.
        config.set(reg::IO_BASE, &[0xf0, 0]);
        config.set(reg::MEMORY_BASE, &[0xf0, 0xff, 0, 0]);
        config.set(reg::PREFETCH_BASE, &[0xf1, 0xff, 1, 0]);
        let express = config.add_capability(0x10, &express_capability(slot));
        // Device, link and root control; device control 2 and link control 2.
        config.allow(express + 0x08, &[0xff, 0x7f]);
        config.allow(express + 0x10, &[0xfb, 0x0f]);
        config.allow(express + 0x1c, &[0x1f, 0x00]);
        config.allow(express + 0x28, &[0x1f, 0x00]);
        config.allow(express + 0x30, &[0xff, 0x1f]);
        config.freeze();
        Self { config: Mutex::new(config), device }
    }

    /// The device behind it.
    pub(in crate::vmm) fn device(&self) -> &Arc<dyn PassthroughDevice> {
        &self.device
    }

    /// The bus behind it, 0 while it has none.
    pub(in crate::vmm) fn secondary_bus(&self) -> u8 {
        self.config().u8(reg::SECONDARY_BUS)
    }

    /// Whether it forwards a memory access to the device.
    pub(in crate::vmm) fn forwards_memory(&self, address: u64) -> bool {
        let config = self.config();
        config.u16(reg::COMMAND) & reg::COMMAND_MEMORY != 0
            && (memory_window(&config).contains(&address) || prefetch_window(&config).contains(&address))
    }

    /// Reads its own config space.
    pub(in crate::vmm) fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    /// Writes its own config space.
    pub(in crate::vmm) fn config_write(&self, offset: u16, data: &[u8]) {
        let reset = {
            let mut config = self.config();
            let before = config.u16(reg::BRIDGE_CONTROL);
            config.write(offset, data);
            config.u16(reg::BRIDGE_CONTROL) & !before & SECONDARY_BUS_RESET != 0
        };
        if reset && let Err(error) = self.device.reset() {
            tracing::warn!(device = %self.device.address(), %error, "the guest reset the bus, but the device was not reset");
        }
    }

    /// Puts the port to its state after power-on; the device is left alone.
    pub(in crate::vmm) fn reset(&self) {
        self.config().reset();
    }

    fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn memory_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let base = u64::from(config.u16(reg::MEMORY_BASE) & 0xfff0) << 16;
    let limit = u64::from(config.u16(reg::MEMORY_LIMIT) & 0xfff0) << 16 | 0xf_ffff;
    base..=limit
}

fn prefetch_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let end = |low, high| u64::from(config.u16(low) & 0xfff0) << 16 | u64::from(config.u32(high)) << 32;
    let base = end(reg::PREFETCH_BASE, reg::PREFETCH_BASE_HIGH);
    let limit = end(reg::PREFETCH_LIMIT, reg::PREFETCH_LIMIT_HIGH) | 0xf_ffff;
    base..=limit
}

/// PCI Express capability, version 2, of a root port without a slot (PCI Express 6.0, 7.5.3). The link says 16 GT/s
/// and 16 lanes: no driver should think that the port holds its device back.
fn express_capability(slot: u8) -> [u8; 58] {
    const SPEED_16GT: u32 = 4;
    const LANES_16: u32 = 16;
    let mut body = [0; 58];
    let mut put =
        |offset: usize, value: &[u8]| body[offset - 2..offset - 2 + value.len()].copy_from_slice(value);
    put(0x02, &(2u16 | 4 << 4).to_le_bytes());
    // Role-based error reporting.
    put(0x04, &(1u32 << 15).to_le_bytes());
    put(0x0c, &(SPEED_16GT | LANES_16 << 4 | u32::from(slot) << 24).to_le_bytes());
    put(0x12, &((SPEED_16GT | LANES_16 << 4) as u16 | 1 << 13).to_le_bytes());
    // Supported speeds, 2.5 to 16 GT/s, and the target speed.
    put(0x2c, &0x1eu32.to_le_bytes());
    put(0x30, &(SPEED_16GT as u16).to_le_bytes());
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::testing::FakeDevice;

    fn port() -> (RootPort, Arc<FakeDevice>) {
        let device = Arc::new(FakeDevice::new(0));
        (RootPort::new(3, device.clone()), device)
    }

    #[test]
    fn windows_filter() {
        let (port, _) = port();
        let opened = |address| port.forwards_memory(address);
        assert!(!opened(0xc000_0000));
        port.config_write(reg::MEMORY_BASE, &[0x00, 0xc0, 0x10, 0xc0]);
        assert!(!opened(0xc000_0000), "memory decode is off");
        port.config_write(reg::COMMAND, &reg::COMMAND_MEMORY.to_le_bytes());
        assert!(opened(0xc000_0000) && opened(0xc01f_ffff));
        assert!(!opened(0xbfff_ffff) && !opened(0xc020_0000));
        port.config_write(reg::PREFETCH_BASE, &[0x01, 0x00, 0xf1, 0xff]);
        port.config_write(reg::PREFETCH_BASE_HIGH, &[0x40, 0, 0, 0, 0x41, 0, 0, 0]);
        assert!(opened(0x40_0000_0000) && opened(0x41_ffff_ffff) && !opened(0x42_0000_0000));
        port.reset();
        assert!(!opened(0xc000_0000) && !opened(0x40_0000_0000));
    }

    #[test]
    fn a_secondary_bus_reset_resets_the_device_once() {
        let (port, device) = port();
        for value in [0u16, SECONDARY_BUS_RESET, SECONDARY_BUS_RESET, 0, SECONDARY_BUS_RESET] {
            port.config_write(reg::BRIDGE_CONTROL, &value.to_le_bytes());
        }
        assert_eq!(device.resets(), 2);
    }
}
