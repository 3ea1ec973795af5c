//! Registers behind VFIO and behind sysfs.

use std::sync::Arc;

use super::super::{NoChip, NotReadable, RegionRegisters, Registers, ResourceRegisters, report_chip};
use crate::pci::{self, regs};
use crate::sim::{Fault, SimConfig, SimDevice, SimDeviceBuilder, SimFunction, SimHost, SimLog, SimSpace};
use crate::vfio::{CONFIG_REGION, DeviceFile as _};

const PM: u8 = 0x60;

fn device() -> Arc<SimDevice> {
    device_of(0x1000, &[])
}

/// A function that is up, with these parts of its BAR mappable.
fn device_of(size: u64, mappable: &[(u64, u64)]) -> Arc<SimDevice> {
    let space = SimSpace::new(Vec::new(), &SimLog::default());
    let mut config = SimConfig::new(0x10de, 0x2330, 0x03_0200);
    config.capability(regs::CAP_ID_PM, PM, &[3, 0, 0, 0, 0, 0]);
    config.put(regs::COMMAND.into(), &regs::COMMAND_MEMORY.to_le_bytes());
    let device = SimDeviceBuilder::new(config.bytes()).bar(0, size, mappable);
    device.build("0000:01:00.0".parse().unwrap(), space).unwrap()
}

#[test]
fn a_region_is_read_and_written_within_its_size() {
    let device = device();
    let registers = RegionRegisters::new(device.clone(), 0).unwrap();
    registers.write32(0xffc, 0x1234_5678).unwrap();
    assert_eq!(registers.read32(0xffc).unwrap(), 0x1234_5678);
    let mut bytes = [0; 4];
    device.read(0, 0xffc, &mut bytes).unwrap();
    assert_eq!(bytes, [0x78, 0x56, 0x34, 0x12], "little-endian");
    let check = |offset, expect: &str| {
        for error in [registers.read32(offset).map(drop), registers.write32(offset, 0)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expect), "{offset:#x}: {error}");
        }
    };
    check(0x1000, "outside of the BAR, which has 0x1000 bytes");
    check(u64::MAX - 3, "outside of the BAR");
    check(0xffe, "a multiple of 4");
    check(u64::MAX, "a multiple of 4");
    device.vanish();
    assert_eq!(registers.read32(0).unwrap(), u32::MAX);
    device.write(CONFIG_REGION, regs::COMMAND.into(), &[0, 0]).unwrap();
    check(0, "Input/output error");
}

#[test]
fn a_region_is_mapped_where_it_can_be() {
    const SIZE: u64 = 0x8000;
    // Which registers still answer where no read or write of the region does any more. On Linux the access ends the process.
    let check = |mappable: &[(u64, u64)], offset: u64, is_mapped: bool| {
        let device = device_of(SIZE, mappable);
        let registers = RegionRegisters::mapped(device.clone(), 0).unwrap();
        assert_eq!(registers.mapped_bytes(), mappable.iter().map(|(_, len)| len).sum::<u64>());
        let plain = RegionRegisters::new(device.clone(), 0).unwrap();
        registers.write32(offset, 0x1234_5678).unwrap();
        assert_eq!(plain.read32(offset).unwrap(), 0x1234_5678, "{mappable:x?} {offset:#x}");
        plain.write32(offset, 7).unwrap();
        assert_eq!(registers.read32(offset).unwrap(), 7, "{mappable:x?} {offset:#x}");
        for outside in [SIZE, u64::MAX - 3, offset + 2] {
            registers.read32(outside).unwrap_err();
            registers.write32(outside, 1).unwrap_err();
        }
        device.write(CONFIG_REGION, regs::COMMAND.into(), &[0, 0]).unwrap();
        assert_eq!(registers.read32(offset).is_ok(), is_mapped, "{mappable:x?} {offset:#x}");
        assert_eq!(registers.write32(offset, 1).is_ok(), is_mapped, "{mappable:x?} {offset:#x}");
    };
    for offset in [0, 0xffc, SIZE - 4] {
        check(&[(0, SIZE)], offset, true);
        check(&[], offset, false);
    }
    // All but a page.
    let around = [(0, 0x2000), (0x3000, 0x5000)];
    for (offset, is_mapped) in [(0x1ffc, true), (0x2000, false), (0x2ffc, false), (0x3000, true)] {
        check(&around, offset, is_mapped);
    }
    check(&[(0x1000, 0x1000)], 0xffc, false);
    check(&[(0x1000, 0x1000)], 0x2000, false);
}

#[test]
fn a_function_that_is_not_up_is_not_mapped() {
    let check = |offset: u16, bytes: &[u8], expect: &str| {
        let device = device_of(0x1000, &[(0, 0x1000)]);
        device.set_config(offset.into(), bytes);
        let error = RegionRegisters::mapped(device.clone(), 0).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        RegionRegisters::new(device, 0).unwrap();
    };
    check(regs::COMMAND, &[0, 0], "it does not decode memory (Command reads 0x0000); bring it up first");
    check(regs::COMMAND, &[0xff, 0xff], "it does not decode memory (Command reads 0xfbff)");
    check(u16::from(PM) + regs::PM_CTRL, &[3], "it is in D3hot; bring it up first");
    let device = device_of(0x1000, &[(0, 0x1000)]);
    device.fail(Fault::MapBar);
    RegionRegisters::mapped(device, 0).unwrap_err();
}

#[test]
fn a_region_that_is_not_there_has_no_registers() {
    let error = RegionRegisters::new(device(), 1).unwrap_err().to_string();
    assert!(error.contains("region 1 holds no registers"), "{error}");
    assert!(RegionRegisters::new(device(), CONFIG_REGION).is_ok(), "config space is a region as others");
}

#[test]
fn a_resource_is_only_read() {
    let address = "0000:01:00.0".parse().unwrap();
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::gpu(address)).unwrap();
    let size = 16 << 20;
    sim.set_registers(address, 0, size, &[(0, 0x1920_00a1), (size - 4, 7)]).unwrap();
    let host = sim.plain_host();
    let function = || pci::read_function(&host, address).unwrap();
    let registers = ResourceRegisters::open(&host, &function(), 0, u64::MAX).unwrap();
    assert_eq!(registers.size(), size);
    assert_eq!(registers.read32(0).unwrap(), 0x1920_00a1);
    assert_eq!(registers.read32(size - 4).unwrap(), 7);
    registers.read32(size).unwrap_err();
    let error = registers.write32(0, 1).unwrap_err().to_string();
    assert!(error.contains("claim it, and use VFIO"), "{error}");
    let part = ResourceRegisters::open(&host, &function(), 0, 0xa04).unwrap();
    part.read32(0xa00).unwrap();
    part.read32(0xa04).unwrap_err();

    // Each of these is refused before the BAR is mapped.
    let check = |expect: &str| {
        let error = ResourceRegisters::open(&host, &function(), 0, u64::MAX).unwrap_err();
        let found = format!("{error:?}");
        assert!(found.starts_with(expect), "{found}");
    };
    for state in ["D1", "D3hot", "D3cold", "unknown", ""] {
        sim.set(address, "power_state", state).unwrap();
        check("Asleep");
    }
    sim.set(address, "power_state", "D0").unwrap();
    // Config space knows better: D3hot in the power management capability at 0x40.
    let config = sim.device_dir(address).unwrap().join("config");
    let good = std::fs::read(&config).unwrap();
    let changed = |offset: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[offset] = value;
        std::fs::write(&config, bytes).unwrap();
    };
    changed(0x44, 3);
    check("Asleep");
    changed(0x04, 0);
    check("NotDecoding");
    std::fs::write(&config, vec![0xff; 256]).unwrap();
    check("NotDecoding");
    std::fs::write(&config, &good[..64]).unwrap();
    ResourceRegisters::open(&host, &function(), 0, 4).unwrap();
    std::fs::write(&config, &good).unwrap();
    sim.set_registers(address, 0, 0x1000, &[]).unwrap();
    check("File { doing: \"mapped\"");
    std::fs::remove_file(sim.device_dir(address).unwrap().join("resource0")).unwrap();
    check("File { doing: \"opened\"");
    let no_bar = ResourceRegisters::open(&host, &function(), 2, 4).unwrap_err();
    assert!(matches!(no_bar, NotReadable::NoBar { bar: 2, .. }), "{no_bar}");
}

#[test]
fn a_virtual_function_is_not_read() {
    let (pf, vf) = ("0000:01:00.0".parse().unwrap(), "0000:01:00.4".parse().unwrap());
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::gpu(pf).sriov(16)).unwrap();
    sim.add(&SimFunction::gpu(vf).virtual_of(pf)).unwrap();
    sim.set_registers(vf, 0, 16 << 20, &[(0, 0x1920_00a1)]).unwrap();
    let host = sim.plain_host();
    let function = pci::read_function(&host, vf).unwrap();
    let error = ResourceRegisters::open(&host, &function, 0, 4).unwrap_err().to_string();
    assert!(error.contains("ask that, 0000:01:00.0"), "{error}");
}

/// Of other makers' GPUs nothing is read, and the PCI ID database has a name before the model's, or none.
#[test]
fn other_gpus_are_what_the_pci_id_database_says() {
    let check = |vendor, device, class, expect: Option<&str>| {
        let address = "0000:01:00.0".parse().unwrap();
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::new(address, vendor, device, class)).unwrap();
        let host = sim.plain_host();
        let report = report_chip(&host, &pci::read_function(&host, address).unwrap());
        assert_eq!(report.named, expect, "{vendor:04x}:{device:04x}");
        assert_eq!(report.boot, None);
        assert!(matches!(report.chip, Err(NoChip::NotNvidia)));
    };
    check(0x1002, 0x744c, 0x03_0000, Some("Navi 31"));
    check(0x8086, 0x56a0, 0x03_0000, Some("DG2"));
    check(0x144d, 0xa80a, 0x01_0802, None);
    check(0x1002, 0xfffe, 0x03_0000, None);
}
