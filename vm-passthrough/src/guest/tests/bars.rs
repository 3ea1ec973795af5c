//! BARs in the guest's memory.

use super::*;
use crate::guest::DeviceError;
use crate::sim::Fault;

impl Rig {
    /// Gives the BARs addresses and turns decoding on.
    fn place(&self) {
        self.write32(0x10, 0x8000_0000);
        self.write32(0x14, 0x10);
        self.write32(0x18, 0xc000_0000);
        self.write32(0x20, 0xc010_0000);
        self.write16(0x04, 0x2);
    }
}

const BAR0: u64 = 0x10_8000_0000;

#[test]
fn decoding_maps_all_but_the_trapped_pages() {
    let rig = Rig::new();
    assert_eq!(rig.vmm.maps(), []);
    rig.place();
    let mapped = [(0xc000_0000, 0x2000), (0xc000_4000, 0xc000), (BAR0, 0x10_0000)];
    assert_eq!(rig.vmm.maps(), mapped);
    // Before the guest reaches a BAR, the device decodes.
    let log = rig.log.take();
    let on = log.iter().position(|line| line.starts_with("config 0x4")).unwrap();
    let map = log.iter().position(|line| line.starts_with("guest map")).unwrap();
    assert!(on < map, "{log:#?}");

    // Off: first the guest loses it, then the device stops.
    rig.write16(0x04, 0);
    assert_eq!(rig.vmm.maps(), []);
    let log = rig.log.take();
    let off = log.iter().position(|line| line.starts_with("config 0x4")).unwrap();
    let unmap = log.iter().rposition(|line| line.starts_with("guest unmap")).unwrap();
    assert!(unmap < off, "{log:#?}");

    // Moved while it decodes.
    rig.write16(0x04, 0x2);
    rig.write32(0x18, 0xd000_0000);
    let mapped = [(0xd000_0000, 0x2000), (0xd000_4000, 0xc000), (BAR0, 0x10_0000)];
    assert_eq!(rig.vmm.maps(), mapped);
}

#[test]
fn a_write_that_cannot_take_effect_is_not_read_back() {
    let rig = Rig::new();
    rig.place();
    let maps = rig.vmm.maps();
    rig.vmm.fail(Fault::UnmapGuest);
    rig.write16(0x04, 0);
    rig.write32(0x10, 0x9000_0000);
    // The guest reads what the device does: it decodes where it did.
    assert_eq!((rig.read16(0x04) & 2, rig.hardware16(0x04) & 2), (2, 2));
    assert_eq!((rig.read32(0x10) & !0xf, rig.find_bar(BAR0)), (0x8000_0000, Some((0, 0))));
    assert_eq!(rig.vmm.maps(), maps);
    // Once the VMM unmaps again, the BARs are mapped as before, and leave the guest when it asks.
    rig.vmm.heal();
    rig.write16(0x04, 2);
    assert_eq!(rig.vmm.maps(), maps);
    rig.write16(0x04, 0);
    assert_eq!((rig.vmm.maps(), rig.read16(0x04) & 2, rig.hardware16(0x04) & 2), (vec![], 0, 0));
}

#[test]
fn finds_what_decodes() {
    let rig = Rig::new();
    assert_eq!(rig.find_bar(0xc000_2000), None);
    rig.place();
    let check = |address, expect| assert_eq!(rig.find_bar(address), expect, "{address:#x}");
    check(0xc000_2000, Some((2, 0x2000)));
    check(0xc000_ffff, Some((2, 0xffff)));
    check(0xc001_0000, None);
    check(0xc010_00ff, Some((4, 0xff)));
    check(0xc010_0100, None);
    check(BAR0, Some((0, 0)));
    check(0, None);
    check(u64::MAX, None);
    rig.write16(0x04, 0);
    check(0xc000_2000, None);
}

#[test]
fn a_sleeping_device_is_not_in_the_guests_memory() {
    let rig = Rig::new();
    rig.place();
    rig.write16(PM + 4, 3);
    assert_eq!(rig.vmm.maps(), []);
    assert_eq!(rig.find_bar(0xc000_2000), None);
    assert_eq!(rig.hardware16(PM + 4) & 3, 3);
    // D1 and D2 are not offered.
    rig.write16(PM + 4, 1);
    assert_eq!(rig.read16(PM + 4) & 3, 3);
    assert_eq!(rig.hardware16(PM + 4) & 3, 3);
    rig.write16(PM + 4, 0);
    assert_eq!(rig.vmm.maps().len(), 3);
}

#[test]
fn trapped_accesses_reach_the_device() {
    let rig = Rig::new();
    rig.place();
    let read = |bar, offset, len: usize| {
        let mut data = vec![0; len];
        let result = rig.device.bar_read(bar, offset, &mut data);
        (data, result)
    };
    rig.device.bar_write(4, 0xf8, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(read(4, 0xf8, 8).0, [1, 2, 3, 4, 5, 6, 7, 8]);
    // The rest of the page that holds the MSI-X table.
    rig.device.bar_write(2, 0x2ff8, &[9; 4]).unwrap();
    assert_eq!(read(2, 0x2ff8, 4).0, [9; 4]);
    // An access across the end of the table: 4 entries are 64 bytes.
    rig.device.bar_write(2, 0x203e, &[0xaa; 4]).unwrap();
    assert_eq!(read(2, 0x203e, 4).0, [0, 0, 0xaa, 0xaa]);
    // Pending bits can't be written, what follows them can.
    rig.device.bar_write(2, 0x3004, &[0xbb; 8]).unwrap();
    assert_eq!(read(2, 0x3004, 8).0, [0, 0, 0, 0, 0xbb, 0xbb, 0xbb, 0xbb]);

    for (bar, offset, len) in [(4, 0xf9, 8), (4, u64::MAX, 1), (1, 0, 1), (3, 32, 1), (6, 0, 4), (255, 0, 1)]
    {
        let (data, result) = read(bar, offset, len);
        assert!(matches!(result, Err(DeviceError::OutOfRange { .. })), "{bar} {offset:#x}");
        assert!(data.iter().all(|&byte| byte == 0xff));
        assert!(rig.device.bar_write(bar, offset, &data).is_err());
    }
}

#[test]
fn what_cannot_be_mapped_is_served_by_exits() {
    let rig = Rig::new();
    // Over the guest's RAM.
    rig.write32(0x18, 0x0001_0000);
    rig.write16(0x04, 0x2);
    assert_eq!(rig.vmm.maps(), []);
    assert_eq!(rig.find_bar(0x0001_2000), Some((2, 0x2000)));
    // Not even mapped into this process.
    let rig = Rig::new();
    rig.sim.fail(Fault::MapBar);
    rig.write32(0x18, 0xc000_0000);
    rig.write16(0x04, 0x2);
    assert_eq!(rig.vmm.maps(), []);
    rig.device.bar_write(2, 0, &[1, 2]).unwrap();
    // And once it works again.
    rig.sim.heal();
    rig.write16(0x04, 0);
    rig.write16(0x04, 0x2);
    assert_eq!(rig.vmm.maps().len(), 2);
    // At the end of the address space: no overflow, nothing decodes.
    rig.write32(0x10, 0xfff0_0000);
    rig.write32(0x14, 0xffff_ffff);
    assert_eq!(rig.find_bar(u64::MAX), None);
}

#[test]
fn ports_decode_where_and_while_the_guest_wants_them() {
    let rig = Rig::new();
    let find = |port| rig.vmm.bars().find_port(port).map(|hit| (hit.bar, hit.offset));
    rig.write32(0x1c, 0xc047);
    assert_eq!((rig.read32(0x1c), find(0xc040)), (0xc041, None));
    // Memory decoding is another bit.
    rig.write16(0x04, 0x2);
    assert_eq!(find(0xc040), None);
    rig.write16(0x04, 0x1);
    assert_eq!(rig.hardware16(4) & 3, 1);
    assert_eq!((find(0xc040), find(0xc05f), find(0xc060)), (Some((3, 0)), Some((3, 0x1f)), None));
    assert_eq!((rig.vmm.maps(), rig.find_bar(0xc040)), (vec![], None));
    // Every size, aligned or not, within the BAR.
    rig.device.bar_write(3, 4, &[1, 2, 3, 4]).unwrap();
    for (offset, len, expect) in
        [(4, 4, &[1, 2, 3, 4][..]), (5, 2, &[2, 3]), (7, 1, &[4]), (6, 4, &[3, 4, 0, 0])]
    {
        let mut data = vec![0; len];
        rig.device.bar_read(3, offset, &mut data).unwrap();
        assert_eq!(data, expect, "{offset}");
    }
    for (offset, len) in [(0x1d, 4), (0x1f, 2), (0x20, 1), (u64::MAX, 2)] {
        let mut data = vec![0; len];
        assert!(rig.device.bar_read(3, offset, &mut data).is_err());
        assert!(rig.device.bar_write(3, offset, &data).is_err());
        assert!(data.iter().all(|&byte| byte == 0xff));
    }
    // Beyond what ports there are, at 0, while it is sized: nowhere.
    for register in [0x1_c040, 0, u32::MAX] {
        rig.write32(0x1c, register);
        assert_eq!(find(0xc040), None, "{register:#x}");
    }
    rig.write32(0x1c, 0xd000);
    assert_eq!(find(0xd000), Some((3, 0)));
    rig.device.reset().unwrap();
    assert_eq!((find(0xd000), rig.read32(0x1c)), (None, 1));
}

#[test]
fn the_rom_is_shown_while_it_is_enabled_and_is_never_written() {
    let rig = Rig::with(builder(&config(4), 4, false).bar(6, 4096, &[(0, 4096)]));
    rig.sim.set_memory(6, 0, &[0x55, 0xaa, 2, 3]).unwrap();
    rig.device.attach().unwrap();
    rig.write32(0x30, 0xffff_fffe);
    assert_eq!(rig.read32(0x30), 0xffff_f000);
    rig.write32(0x30, 0xc020_0000);
    rig.write16(0x04, 0x2);
    assert_eq!(rig.find_bar(0xc020_0000), None);
    rig.write32(0x30, 0xc020_0001);
    assert_eq!((rig.find_bar(0xc020_0ffc), rig.find_bar(0xc020_1000)), (Some((6, 0xffc)), None));
    // Each access exits, and its own registers in sysfs keep what the host has there.
    assert_eq!((rig.vmm.maps(), rig.hardware16(0x30)), (vec![], 1));
    let read = |offset, len: usize| {
        let mut data = vec![0; len];
        rig.device.bar_read(6, offset, &mut data).map(|()| data)
    };
    rig.device.bar_write(6, 0, &[1, 1]).unwrap();
    assert_eq!((read(0, 4).unwrap(), read(1, 2).unwrap()), (vec![0x55, 0xaa, 2, 3], vec![0xaa, 2]));
    assert!(read(0xffd, 4).is_err() && read(u64::MAX, 1).is_err());
    // It was read once.
    rig.sim.set_memory(6, 0, &[0; 4]).unwrap();
    assert_eq!(read(0, 1).unwrap(), [0x55]);
    rig.write16(0x04, 0);
    assert_eq!(rig.find_bar(0xc020_0000), None);

    // None, or one of a size that none has, is hidden.
    for size in [0, 1024, 3000, 32 << 20] {
        let mut builder = builder(&config(4), 4, false);
        if size != 0 {
            builder = builder.bar(6, size, &[]);
        }
        let rig = Rig::with(builder);
        rig.device.attach().unwrap();
        rig.write32(0x30, u32::MAX);
        assert_eq!(rig.read32(0x30), 0, "{size}");
    }
}

#[test]
fn a_rom_of_the_vmm_takes_the_place_of_the_devices() {
    use crate::guest::{DeviceOptions, Rom};
    use crate::pci::RomImage;
    let mut bytes = vec![0x22; 3 * 512];
    bytes[..2].copy_from_slice(&[0x55, 0xaa]);
    bytes[0x18..0x1c].copy_from_slice(&[0x1c, 0, 0, 0]);
    bytes[0x1c..0x34].copy_from_slice(b"PCIR\x34\x12\x78\x56\0\0\x18\0\0\0\0\0\x03\0\0\0\0\x80\0\0");
    let image = || Rom::Image(RomImage::parse(bytes.clone()).unwrap());
    // With a ROM of its own, and without.
    for own in [0, 1 << 20] {
        let check = |rom: Rom, size: u32| {
            let builder = builder(&config(4), 4, false);
            let rig = Rig::with(if own == 0 { builder } else { builder.bar(6, own, &[]) });
            let options = DeviceOptions::default().rom(rom);
            let device = VfioPciDevice::with_options(rig.sim.clone(), rig.vmm.clone(), options).unwrap();
            let rig = Rig { device, ..rig };
            rig.device.attach().unwrap();
            rig.write32(0x30, 0xffff_fffe);
            assert_eq!(rig.read32(0x30), if size == 0 { 0 } else { !(size - 1) }, "{own:#x}");
            rig
        };
        check(Rom::Hidden, 0);
        check(Rom::Device, own as u32);
        let rig = check(image(), 2048);
        rig.write32(0x30, 0xc020_0001);
        rig.write16(0x04, 0x2);
        assert_eq!(rig.find_bar(0xc020_0400), Some((6, 0x400)));
        let mut read = vec![0; 2048];
        for (at, piece) in (0..).step_by(8).zip(read.chunks_mut(8)) {
            rig.device.bar_read(6, at, piece).unwrap();
        }
        assert_eq!((&read[..1536], &read[1536..]), (&bytes[..], &[0xff; 512][..]));
        rig.device.bar_write(6, 0, &[0; 4]).unwrap();
        assert_eq!(
            rig.sim.config()[0x30],
            config(4).bytes()[0x30],
            "the device's own register is not touched"
        );
    }
}

#[test]
fn a_rom_that_cannot_be_read_reads_all_ones() {
    let rig = Rig::with(builder(&config(4), 4, false).bar(6, 4096, &[]));
    rig.device.attach().unwrap();
    // Memory is not decoded yet.
    let mut data = [0; 4];
    assert!(rig.device.bar_read(6, 0, &mut data).is_err());
    assert_eq!(data, [0xff; 4]);
}

#[test]
fn a_read_that_fails_behind_the_msix_table_shows_nothing_of_it() {
    let rig = Rig::msix(64, false);
    let (table, len) = (0x2000, 64 * 16);
    rig.place();
    // The device decodes no memory any more: it is in D3, say.
    rig.write16(0x04, 0);
    for before in 0..8 {
        let mut data = [0; 8];
        let result = rig.device.bar_read(2, table + len - before, &mut data);
        assert!(result.is_err(), "{before}");
        assert_eq!(data, [0xff; 8], "{before}");
    }
}

#[test]
fn a_region_of_a_size_that_no_bar_has_is_refused() {
    const MEMORY: u8 = 0x0;
    const IO: u8 = 0x1;
    const WIDE: u8 = 0x4;
    #[track_caller]
    fn check(register: u8, size: u64, accepted: bool) {
        let mut config = SimConfig::new(1, 2, 3);
        config.put(0x10, &[register]);
        let log = SimLog::default();
        let sim = SimDeviceBuilder::new(config.bytes()).bar(0, size, &[]);
        let sim = sim.build("65:00.0".parse().unwrap(), SimSpace::new(vec![], &log)).unwrap();
        let error = VfioPciDevice::new(sim, SimVmm::new(&[], &log).unwrap()).err();
        let error = error.map(|error| error.to_string());
        assert_eq!(error.is_none(), accepted, "{error:?}");
        assert!(error.iter().all(|error| error.contains(&format!("BAR 0 of {size:#x} bytes"))), "{error:?}");
    }
    // Memory: 16 bytes to 2 GiB, or more with 64 address bits.
    check(MEMORY, 8, false);
    check(MEMORY, 16, true);
    check(MEMORY, 24, false);
    check(MEMORY, 1 << 31, true);
    check(MEMORY, 1 << 32, false);
    check(WIDE, 8, false);
    check(WIDE, 16, true);
    check(WIDE, 1 << 32, true);
    // Ports: 4 bytes to 64 KiB.
    check(IO, 2, false);
    check(IO, 4, true);
    check(IO, 1 << 16, true);
    check(IO, 1 << 17, false);
}

/// The last BAR has no register left for the upper half of an address.
#[test]
fn the_last_bar_has_32_address_bits_whatever_it_states() {
    let mut config = SimConfig::new(1, 2, 3);
    config.put(0x24, &[0x4]);
    let rig = Rig::with(SimDeviceBuilder::new(config.bytes()).bar(5, 1 << 12, &[]));
    rig.device.attach().unwrap();
    assert_eq!(rig.read32(0x24), 0);
    rig.write32(0x24, u32::MAX);
    assert_eq!((rig.read32(0x24), rig.read32(0x28)), (0xffff_f000, 0));
    rig.write32(0x24, 0xc000_0000);
    rig.write16(0x04, 0x2);
    assert_eq!((rig.find_bar(0xc000_0fff), rig.find_bar(0xc000_1000)), (Some((5, 0xfff)), None));
}
