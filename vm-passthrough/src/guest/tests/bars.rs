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

    for (bar, offset, len) in [(4, 0xf9, 8), (4, u64::MAX, 1), (1, 0, 1), (3, 0, 1), (6, 0, 4), (255, 0, 1)] {
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
