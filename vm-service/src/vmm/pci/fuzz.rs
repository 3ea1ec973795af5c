//! What a guest does to the PCI hierarchy's registers, at random: it reaches no other function's state, and a reset
//! undoes it.

use std::sync::Arc;

use proptest::prelude::*;
use vm_passthrough::PassthroughDevice as _;
use vm_passthrough::guest::BarHit;
use vm_passthrough::pci::regs;
use vm_passthrough::sim::{SimLog, SimVmm};

use super::PciRoot;
use crate::vmm::lifecycle::Lifecycle;
use crate::vmm::testing::{FakeDevice, add};

/// One access of a guest.
#[derive(Clone, Debug)]
enum Access {
    PortRead(u16, usize),
    PortWrite(u16, Vec<u8>),
    EcamRead(u64, usize),
    EcamWrite(u64, Vec<u8>),
    MemoryRead(u64, usize),
    MemoryWrite(u64, Vec<u8>),
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    (prop_oneof![Just(1usize), Just(2), Just(4), Just(8)], any::<[u8; 8]>())
        .prop_map(|(len, bytes)| bytes[..len].to_vec())
}

/// Mostly the registers of the first functions of the first buses.
fn ecam() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0u64..5, 0u64..4, 0u64..0x100).prop_map(|(bus, slot, register)| bus << 20 | slot << 15 | register),
        1 => any::<u64>(),
    ]
}

/// Mostly addresses of configuration mechanism 1.
fn port_data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        (0u32..5, 0u32..4, 0u32..0x100).prop_map(|(bus, slot, register)| {
            (1 << 31 | bus << 16 | slot << 11 | register & 0xfc).to_le_bytes().to_vec()
        }),
        data(),
    ]
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![0xbfff_f000u64..0xc040_0000, Just(0xffff_fffc), Just(u64::MAX), any::<u64>()]
}

fn access() -> impl Strategy<Value = Access> {
    let port = || 0xcf0u16..0xd08;
    prop_oneof![
        1 => (port(), 1usize..9).prop_map(|(port, len)| Access::PortRead(port, len)),
        3 => (port(), data()).prop_map(|(port, data)| Access::PortWrite(port, data)),
        3 => port_data().prop_map(|data| Access::PortWrite(0xcf8, data)),
        1 => (ecam(), 1usize..9).prop_map(|(offset, len)| Access::EcamRead(offset, len)),
        6 => (ecam(), data()).prop_map(|(offset, data)| Access::EcamWrite(offset, data)),
        1 => (address(), 1usize..9).prop_map(|(address, len)| Access::MemoryRead(address, len)),
        1 => (address(), data()).prop_map(|(address, data)| Access::MemoryWrite(address, data)),
    ]
}

fn perform(root: &PciRoot, access: &Access) {
    let mut buffer = [0; 8];
    match access {
        Access::PortRead(port, len) => root.port_read(*port, &mut buffer[..*len]),
        Access::PortWrite(port, data) => root.port_write(*port, data),
        Access::EcamRead(offset, len) => root.ecam_read(*offset, &mut buffer[..*len]),
        Access::EcamWrite(offset, data) => root.ecam_write(*offset, data),
        Access::MemoryRead(address, len) => {
            root.memory_read(*address, &mut buffer[..*len]);
        }
        Access::MemoryWrite(address, data) => {
            root.memory_write(*address, data);
        }
    }
}

fn read32(root: &PciRoot, bus: u8, slot: u8, offset: u16) -> u32 {
    let mut data = [0; 4];
    root.config_read(bus, slot << 3, offset, &mut data);
    u32::from_le_bytes(data)
}

/// All config space of bus 0.
fn bus_0(root: &PciRoot) -> Vec<u32> {
    (0..4)
        .flat_map(|slot| (0..256).step_by(4).map(move |offset| (slot, offset)))
        .map(|(slot, offset)| read32(root, 0, slot, offset))
        .collect()
}

fn root() -> (PciRoot, Arc<SimVmm>, Vec<Arc<FakeDevice>>) {
    let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
    let root = PciRoot::new(vmm.clone(), vmm.bars().clone(), Arc::new(Lifecycle::new().unwrap()));
    let devices: Vec<_> = (0..3).map(|index| Arc::new(FakeDevice::new(index).on(vmm.bars()))).collect();
    for device in &devices {
        add(&root, device.clone()).unwrap();
    }
    root.reset().unwrap();
    root.place(&(1 << 32..1 << 40)).unwrap();
    (root, vmm, devices)
}

proptest! {
    #[test]
    fn registers_keep_their_meaning(accesses in prop::collection::vec(access(), 0..200)) {
        let (root, vmm, devices) = root();
        let fresh = bus_0(&root);
        for access in &accesses {
            perform(&root, access);
        }
        // What identifies a function and what a guest finds its way by is not the guest's to write.
        prop_assert_eq!(read32(&root, 0, 0, 0), 0x0008_1b36);
        for slot in 1..4 {
            prop_assert_eq!(read32(&root, 0, slot, 0), 0x000c_1b36);
            prop_assert_eq!(read32(&root, 0, slot, 8), 0x0604_0000);
            prop_assert_eq!(read32(&root, 0, slot, 0x0c) >> 16 & 0xff, 1);
            prop_assert_eq!(read32(&root, 0, slot, 0x34), 0x40);
            prop_assert_eq!(read32(&root, 0, slot, 0x40) & 0xffff, 0x7c10);
            prop_assert_eq!(read32(&root, 0, slot, 0x7c) & 0xffff, 0x0005);
        }
        // Both ways to config space lead to the same place.
        for (bus, slot, offset) in [(0u8, 1u8, 0x18u16), (0, 2, 0x20), (1, 0, 0), (2, 0, 0x10), (3, 0, 4)] {
            let address = 1u32 << 31 | u32::from(bus) << 16 | u32::from(slot) << 11 | u32::from(offset);
            root.port_write(0xcf8, &address.to_le_bytes());
            let mut by_port = [0; 4];
            root.port_read(0xcfc, &mut by_port);
            let mut by_memory = [0; 4];
            root.ecam_read(u64::from(bus) << 20 | u64::from(slot) << 15 | u64::from(offset), &mut by_memory);
            prop_assert_eq!(by_port, by_memory);
        }
        // A reboot starts as the first start did.
        root.reset().unwrap();
        prop_assert_eq!(root.place(&(1 << 32..1 << 40)).unwrap()[0].last, 3);
        prop_assert_eq!(bus_0(&root), fresh);
        for (bus, device) in (1..).zip(&devices) {
            prop_assert_eq!(read32(&root, bus, 0, 0), FakeDevice::ID);
            root.config_write(bus, 0, regs::COMMAND, &[2, 0]);
            let bar = u64::from(read32(&root, bus, 0, regs::BASE_ADDRESS_0));
            prop_assert!(root.memory_read(bar, &mut [0; 4]));
            let hit = BarHit { device: device.address(), bar: 0, offset: 0 };
            prop_assert_eq!(vmm.bars().find(bar), Some(hit));
        }
    }
}
