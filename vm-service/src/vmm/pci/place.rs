//! Plays firmware: gives buses to root ports and addresses to BARs.

use std::ops::Range;

use vm_passthrough::guest::placement::{self, ConfigAccess, FunctionRequest, Windows};

use super::{Function, PciRoot, RootPort, reg};
use crate::vmm::error::MachineError;
use crate::vmm::layout;

impl ConfigAccess for RootPort {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config_read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config_write(offset, data);
    }
}

/// A function of the VMM's own, for its BARs to be placed.
struct Own<'a>(&'a dyn Function);

impl ConfigAccess for Own<'_> {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.config_read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.0.config_write(offset, data);
    }
}

impl PciRoot {
    /// Numbers the buses, places all memory BARs, and opens the ports; returns the highest bus. Devices keep their
    /// decoding off, as their drivers expect; ports forward, so that a guest without an operating system need not
    /// know of them.
    ///
    /// # Errors
    /// When the BARs don't fit.
    pub(in crate::vmm) fn place(&self, mem64: &Range<u64>) -> Result<u8, MachineError> {
        let windows = Windows { low: layout::MEM32, high: mem64.clone() };
        let own: Vec<Own<'_>> = self.functions().map(|function| Own(function.as_ref())).collect();
        let ports: Vec<(u8, &RootPort)> = self.ports().collect();
        let mut requests: Vec<FunctionRequest> = own
            .iter()
            .map(|function| FunctionRequest {
                name: "a device of the VMM".to_owned(),
                behind_port: false,
                bars: placement::probe(function),
            })
            .collect();
        requests.extend(ports.iter().map(|(_, port)| FunctionRequest {
            name: port.device().address().to_string(),
            behind_port: true,
            bars: placement::probe(port.device().as_ref()),
        }));
        let mut placed = placement::plan(&requests, &windows)?.into_iter();
        for (function, placed) in own.iter().zip(placed.by_ref()) {
            placement::program(function, &placed);
        }
        let mut bus = 0;
        for ((_, port), placed) in ports.iter().zip(placed) {
            // There are fewer slots than buses.
            bus += 1;
            port.config_write(reg::PRIMARY_BUS, &[0, bus, bus]);
            placement::program_port(*port, &placed.port);
            placement::program(port.device().as_ref(), &placed);
            placement::enable_memory(*port);
        }
        Ok(bus)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_passthrough::PassthroughDevice as _;

    use super::*;
    use crate::vmm::testing::FakeDevice;

    #[test]
    fn every_device_is_reached_where_it_was_placed() {
        let mut root = PciRoot::new();
        let devices: Vec<_> = (0..3).map(|index| Arc::new(FakeDevice::new(index))).collect();
        for device in &devices {
            assert!(root.add_port(device.clone()));
        }
        for _ in 0..2 {
            root.reset().unwrap();
            assert_eq!(root.place(&(1 << 32..1 << 40)).unwrap(), 3);
            for (bus, device) in (1..).zip(&devices) {
                let mut bar = [0; 4];
                root.config_read(bus, 0, reg::BAR0, &mut bar);
                let address = u64::from(u32::from_le_bytes(bar));
                assert!(layout::MEM32.contains(&address));
                assert!(!root.memory_read(address, &mut [0; 4]), "decode is off");
                root.config_write(bus, 0, reg::COMMAND, &[2, 0]);
                let mut data = [0; 4];
                assert!(root.memory_read(address, &mut data));
                assert_eq!(data, [0xa5; 4]);
                assert!(device.find_bar(address).is_some());
                root.config_write(bus, 0, reg::COMMAND, &[0, 0]);
            }
        }
    }
}
