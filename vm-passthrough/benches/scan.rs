//! How long a scan of 10,000 functions takes.
//!
//! The functions are a simulated host's. Every field that the timed scans give is compared with what was simulated first.

use criterion::{Criterion, criterion_group, criterion_main};
use vm_passthrough::pci::{DeviceType, Link, PciAddress, PciFunction, PowerState, Sriov, scan};
use vm_passthrough::sim::{SimFunction, SimHost};

const FUNCTIONS: u32 = 10_000;

fn address(index: u32) -> PciAddress {
    let (domain, bus, device) = (index >> 13, (index >> 5 & 0xff) as u8, (index & 31) as u8);
    PciAddress::new(domain, bus, device, 0).expect("five bits are a device number")
}

fn function(index: u32) -> SimFunction {
    let address = address(index);
    let function = match index % 4 {
        0 => SimFunction::gpu(address).driver("nvidia"),
        1 => SimFunction::network(address).driver("e1000e"),
        _ => SimFunction::nvme(address).driver("nvme"),
    };
    function
        .group(index)
        .numa_node((index % 8) as u16)
        .extended_capability(0x0001, 2, &[0; 44])
        .extended_capability(0x0003, 1, &[0; 8])
}

fn check(functions: &[PciFunction]) {
    assert_eq!(functions.len(), FUNCTIONS as usize);
    for (found, index) in functions.iter().zip(0..) {
        assert_eq!(found.address, address(index));
        assert_eq!(found.iommu_group, Some(index));
        assert_eq!(found.numa_node, Some((index % 8) as u16));
        assert_eq!(found.power_state, PowerState::D0);
        assert_eq!((found.capabilities.len(), found.extended_capabilities.len()), (3, 2));
        assert_eq!(found.resets.len(), 1);
        let (device_type, vendor, driver, bars, speed, width) = match index % 4 {
            0 => (DeviceType::GpuNvidia, 0x10de, "nvidia", 3, 16_000, 16),
            1 => (DeviceType::Network, 0x8086, "e1000e", 1, 2_500, 1),
            _ => (DeviceType::Nvme, 0x144d, "nvme", 1, 16_000, 4),
        };
        assert_eq!((found.device_type, found.ids.vendor), (device_type, vendor));
        assert_eq!(found.driver.as_deref(), Some(driver));
        assert_eq!(found.bars.len(), bars);
        assert_eq!(found.rom.is_some(), index % 4 == 0);
        assert_eq!(found.link, Some(Link { speed, width, max_speed: speed, max_width: width }));
    }
}

/// A host with the functions.
fn build(function: impl Fn(u32) -> SimFunction) -> SimHost {
    let sim = SimHost::new().expect("a temporary directory can be filled");
    for index in 0..FUNCTIONS {
        sim.add(&function(index)).expect("a function can be added");
    }
    sim
}

/// Network cards with 63 virtual functions each, which is what most functions are where there are thousands.
fn virtual_function(index: u32) -> SimFunction {
    let function = SimFunction::network(address(index)).group(index).numa_node((index % 8) as u16);
    match index % 64 {
        0 => function.driver("ice").sriov(63),
        first => function.driver("iavf").virtual_of(address(index - first)),
    }
}

fn check_virtual(functions: &[PciFunction]) {
    assert_eq!(functions.len(), FUNCTIONS as usize);
    for (found, index) in functions.iter().zip(0..) {
        assert_eq!((found.address, found.iommu_group), (address(index), Some(index)));
        assert_eq!(found.numa_node, Some((index % 8) as u16));
        assert_eq!((found.power_state, found.device_type), (PowerState::D0, DeviceType::Network));
        assert_eq!((found.ids.vendor, found.bars.len(), found.resets.len()), (0x8086, 1, 1));
        let (driver, sriov) = match index % 64 {
            0 => ("ice", Sriov::Physical { total_vfs: 63, num_vfs: 63.min(FUNCTIONS - index - 1) as u16 }),
            first => ("iavf", Sriov::Virtual { physical: address(index - first) }),
        };
        assert_eq!((found.driver.as_deref(), found.sriov), (Some(driver), Some(sriov)));
    }
}

fn scans(c: &mut Criterion) {
    let mut group = c.benchmark_group("scan");
    group.sample_size(20);
    let mut scan_of = |name: &str, function: fn(u32) -> SimFunction, check: fn(&[PciFunction])| {
        let sim = build(function);
        let host = sim.plain_host();
        check(&scan(&host).expect("the simulated host can be read"));
        group.bench_function(name, |b| b.iter_with_large_drop(|| scan(&host)));
    };
    scan_of("10000 physical", function, check);
    scan_of("10000 virtual", virtual_function, check_virtual);
    group.finish();
}

criterion_group!(benches, scans);
criterion_main!(benches);
