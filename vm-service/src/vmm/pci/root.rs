//! Routes the guest's config and memory accesses to the functions of its PCI hierarchy.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_passthrough::PassthroughDevice;

use super::{Function, HostBridge, RootPort};
use crate::vmm::error::MachineError;
use crate::vmm::layout;

/// Slots of a bus.
pub(in crate::vmm) const SLOTS: usize = 32;

/// What is in a slot of bus 0.
enum Slot {
    Own(Arc<dyn Function>),
    Port(Box<RootPort>),
}

/// The root complex.
pub(in crate::vmm) struct PciRoot {
    /// Bus 0, from slot 0 on, without gaps.
    slots: Vec<Slot>,
    /// Address register of configuration mechanism 1 (PCI Local Bus 3.0, 3.2.2.3.2).
    address: AtomicU32,
}

impl PciRoot {
    /// A root complex with its host bridge.
    pub(in crate::vmm) fn new() -> Self {
        Self { slots: vec![Slot::Own(Arc::new(HostBridge::new()))], address: AtomicU32::new(0) }
    }

    /// Puts a function of the VMM's own into the next slot; `false` when the bus is full.
    #[must_use]
    pub(in crate::vmm) fn add(&mut self, function: Arc<dyn Function>) -> bool {
        let fits = self.slots.len() < SLOTS;
        if fits {
            self.slots.push(Slot::Own(function));
        }
        fits
    }

    /// Puts a root port with `device` into the next slot; `false` when the bus is full.
    #[must_use]
    pub(in crate::vmm) fn add_port(&mut self, device: Arc<dyn PassthroughDevice>) -> bool {
        let fits = self.slots.len() < SLOTS;
        if fits {
            self.slots.push(Slot::Port(Box::new(RootPort::new(self.slots.len() as u8, device))));
        }
        fits
    }

    /// The root ports with their slots.
    pub(in crate::vmm) fn ports(&self) -> impl Iterator<Item = (u8, &RootPort)> {
        self.slots.iter().enumerate().filter_map(|(slot, entry)| match entry {
            Slot::Port(port) => Some((slot as u8, port.as_ref())),
            Slot::Own(_) => None,
        })
    }

    /// The VMM's own functions.
    pub(in crate::vmm) fn functions(&self) -> impl Iterator<Item = &Arc<dyn Function>> {
        self.slots.iter().filter_map(|entry| match entry {
            Slot::Own(function) => Some(function),
            Slot::Port(_) => None,
        })
    }

    /// The passed-through devices.
    pub(in crate::vmm) fn devices(&self) -> impl Iterator<Item = &Arc<dyn PassthroughDevice>> {
        self.ports().map(|(_, port)| port.device())
    }

    /// Asks the VMM's own functions to end what they do of their own accord.
    pub(in crate::vmm) fn ask_to_stop(&self) {
        for function in self.functions() {
            function.ask_to_stop();
        }
    }

    /// Ends what the VMM's own functions do of their own accord, all at the same time.
    ///
    /// # Errors
    /// The first that does not stop in time. The others have stopped then.
    pub(in crate::vmm) fn stop(&self) -> Result<(), MachineError> {
        self.ask_to_stop();
        self.functions().map(|function| function.stop()).fold(Ok(()), Result::and)
    }

    /// Puts everything but the passed-through devices to its state after power-on, once it has stopped.
    ///
    /// # Errors
    /// When a device can't be made ready again.
    pub(in crate::vmm) fn reset(&self) -> Result<(), MachineError> {
        self.address.store(0, Ordering::Relaxed);
        for slot in &self.slots {
            match slot {
                Slot::Own(function) => function.reset()?,
                Slot::Port(port) => port.reset(),
            }
        }
        Ok(())
    }

    /// Reads config space; all ones where no function is.
    pub(in crate::vmm) fn config_read(&self, bus: u8, devfn: u8, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if !in_config(offset, data.len()) {
            return;
        }
        match self.find(bus, devfn) {
            Some(Target::Own(function)) => function.config_read(offset, data),
            Some(Target::Port(port)) => port.config_read(offset, data),
            Some(Target::Device(device)) => device.config_read(offset, data),
            None => {}
        }
    }

    /// Writes config space; nothing happens where no function is.
    pub(in crate::vmm) fn config_write(&self, bus: u8, devfn: u8, offset: u16, data: &[u8]) {
        if !in_config(offset, data.len()) {
            return;
        }
        match self.find(bus, devfn) {
            Some(Target::Own(function)) => function.config_write(offset, data),
            Some(Target::Port(port)) => port.config_write(offset, data),
            Some(Target::Device(device)) => device.config_write(offset, data),
            None => {}
        }
    }

    fn find(&self, bus: u8, devfn: u8) -> Option<Target<'_>> {
        if devfn & 7 != 0 {
            return None;
        }
        if bus == 0 {
            return self.slots.get(usize::from(devfn >> 3)).map(|slot| match slot {
                Slot::Own(function) => Target::Own(function.as_ref()),
                Slot::Port(port) => Target::Port(port),
            });
        }
        if devfn != 0 {
            return None;
        }
        let (_, port) = self.ports().find(|(_, port)| port.secondary_bus() == bus)?;
        Some(Target::Device(port.device().as_ref()))
    }

    /// Reads a port of configuration mechanism 1, from 0xcf8 to 0xcff.
    pub(in crate::vmm) fn port_read(&self, port: u16, data: &mut [u8]) {
        let address = self.address.load(Ordering::Relaxed);
        if port == layout::port::PCI_ADDRESS && data.len() == 4 {
            data.copy_from_slice(&address.to_le_bytes());
        } else if let Some((bus, devfn, offset)) = mechanism_1(address, port) {
            self.config_read(bus, devfn, offset, data);
        } else {
            data.fill(0xff);
        }
    }

    /// Writes a port of configuration mechanism 1, from 0xcf8 to 0xcff.
    pub(in crate::vmm) fn port_write(&self, port: u16, data: &[u8]) {
        if port == layout::port::PCI_ADDRESS {
            if let Ok(address) = data.try_into().map(u32::from_le_bytes) {
                self.address.store(address & 0x80ff_fffc, Ordering::Relaxed);
            }
        } else if let Some((bus, devfn, offset)) = mechanism_1(self.address.load(Ordering::Relaxed), port) {
            self.config_write(bus, devfn, offset, data);
        }
    }

    /// Reads memory in the ECAM window at `offset`; all ones for what is no config access.
    pub(in crate::vmm) fn ecam_read(&self, offset: u64, data: &mut [u8]) {
        let (bus, devfn, register) = ecam(offset);
        match data.len() {
            // The guest may read a quadword; the bus does that in two.
            8 => {
                let (low, high) = data.split_at_mut(4);
                self.config_read(bus, devfn, register, low);
                self.config_read(bus, devfn, register.saturating_add(4), high);
            }
            _ => self.config_read(bus, devfn, register, data),
        }
    }

    /// Writes memory in the ECAM window at `offset`.
    pub(in crate::vmm) fn ecam_write(&self, offset: u64, data: &[u8]) {
        let (bus, devfn, register) = ecam(offset);
        match data.len() {
            8 => {
                self.config_write(bus, devfn, register, &data[..4]);
                self.config_write(bus, devfn, register.saturating_add(4), &data[4..]);
            }
            _ => self.config_write(bus, devfn, register, data),
        }
    }

    /// Reads memory that is neither RAM nor mapped into the guest; `false` when no function decodes it.
    pub(in crate::vmm) fn memory_read(&self, address: u64, data: &mut [u8]) -> bool {
        data.fill(0xff);
        if let Some((device, bar, offset)) = self.find_device_bar(address) {
            if let Err(error) = device.bar_read(bar, offset, data) {
                tracing::debug!(device = %device.address(), %error, "a guest's read failed");
            }
            return true;
        }
        match self.find_own_bar(address) {
            Some((function, offset)) => {
                function.bar_read(offset, data);
                true
            }
            None => false,
        }
    }

    /// Writes memory that is neither RAM nor mapped into the guest; `false` when no function decodes it.
    pub(in crate::vmm) fn memory_write(&self, address: u64, data: &[u8]) -> bool {
        if let Some((device, bar, offset)) = self.find_device_bar(address) {
            if let Err(error) = device.bar_write(bar, offset, data) {
                tracing::debug!(device = %device.address(), %error, "a guest's write failed");
            }
            return true;
        }
        match self.find_own_bar(address) {
            Some((function, offset)) => {
                function.bar_write(offset, data);
                true
            }
            None => false,
        }
    }

    fn find_device_bar(&self, address: u64) -> Option<(&dyn PassthroughDevice, u8, u64)> {
        self.ports().find_map(|(_, port)| {
            let (bar, offset) =
                port.forwards_memory(address).then(|| port.device().find_bar(address)).flatten()?;
            Some((port.device().as_ref(), bar, offset))
        })
    }

    fn find_own_bar(&self, address: u64) -> Option<(&dyn Function, u64)> {
        self.functions().find_map(|function| Some((function.as_ref(), function.find_bar(address)?)))
    }
}

/// Where a config access goes.
enum Target<'a> {
    Own(&'a dyn Function),
    Port(&'a RootPort),
    Device(&'a dyn PassthroughDevice),
}

/// Whether an access is one that a bus can make: 1, 2 or 4 bytes, aligned, in config space.
fn in_config(offset: u16, len: usize) -> bool {
    matches!(len, 1 | 2 | 4) && usize::from(offset).is_multiple_of(len) && usize::from(offset) + len <= 4096
}

fn mechanism_1(address: u32, port: u16) -> Option<(u8, u8, u16)> {
    let byte = port.checked_sub(layout::port::PCI_DATA).filter(|&byte| byte < 4)?;
    let enabled = address >> 31 != 0;
    enabled.then_some(((address >> 16) as u8, (address >> 8) as u8, (address & 0xfc) as u16 | byte))
}

fn ecam(offset: u64) -> (u8, u8, u16) {
    ((offset >> 20) as u8, (offset >> 12) as u8, (offset & 0xfff) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::pci::reg;
    use crate::vmm::testing::FakeDevice;

    fn root() -> PciRoot {
        let mut root = PciRoot::new();
        assert!(root.add_port(Arc::new(FakeDevice::new(0))));
        assert!(root.add_port(Arc::new(FakeDevice::new(1))));
        root
    }

    fn read32(root: &PciRoot, bus: u8, devfn: u8, offset: u16) -> u32 {
        let mut data = [0; 4];
        root.config_read(bus, devfn, offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn buses_follow_the_bridge_registers() {
        let root = root();
        assert_eq!(read32(&root, 0, 0, 0), 0x0008_1b36);
        assert_eq!(read32(&root, 0, 1 << 3, 0), 0x000c_1b36);
        assert_eq!(read32(&root, 0, 3 << 3, 0), u32::MAX);
        assert_eq!(read32(&root, 0, 1 << 3 | 1, 0), u32::MAX);
        assert_eq!(read32(&root, 7, 0, 0), u32::MAX);
        root.config_write(0, 2 << 3, reg::SECONDARY_BUS, &[7]);
        assert_eq!(read32(&root, 7, 0, 0), FakeDevice::ID);
        assert_eq!(read32(&root, 7, 1 << 3, 0), u32::MAX, "only slot 0 is behind a port");
        root.reset().unwrap();
        assert_eq!(read32(&root, 7, 0, 0), u32::MAX);
    }

    #[test]
    fn both_mechanisms_reach_the_same_space() {
        let root = root();
        root.port_write(0xcf8, &0x8000_0800u32.to_le_bytes());
        let mut data = [0; 2];
        root.port_read(0xcfe, &mut data);
        assert_eq!(u16::from_le_bytes(data), 0x000c);
        let mut data = [0; 8];
        root.ecam_read(1 << 15, &mut data);
        assert_eq!(data[..4], 0x000c_1b36u32.to_le_bytes());
        root.port_write(0xcf8, &0u32.to_le_bytes());
        let mut data = [0; 4];
        root.port_read(0xcfc, &mut data);
        assert_eq!(data, [0xff; 4], "the enable bit is off");
    }

    #[test]
    fn no_access_panics() {
        let root = root();
        for offset in [0, 1, 3, 0xfc, 0xfd, 0xff, 0x100, 0xffc, 0xffd, 0xfff, 0xf_ffff, u64::MAX] {
            for len in 0..=8 {
                let mut data = vec![0; len];
                root.ecam_read(offset, &mut data);
                root.ecam_write(offset, &data);
                root.memory_read(offset, &mut data);
                root.memory_write(offset, &data);
                root.port_read(offset as u16, &mut data);
                root.port_write(offset as u16, &data);
            }
        }
    }

    #[test]
    fn a_full_bus_says_so() {
        let mut root = PciRoot::new();
        for _ in 1..SLOTS {
            assert!(root.add_port(Arc::new(FakeDevice::new(0))));
        }
        assert!(!root.add_port(Arc::new(FakeDevice::new(0))));
    }
}
