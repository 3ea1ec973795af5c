//! The virtual config space, register by register.

use super::*;
use crate::pci::placement;
use crate::sim::Fault;
use crate::vfio::{ErrorSeverity, MSI_IRQ, MSIX_IRQ};

/// All capabilities that the guest finds by the plain list.
fn capabilities(rig: &Rig) -> Vec<(u8, u8)> {
    let mut found = Vec::new();
    let mut offset = rig.read8(0x34);
    while offset != 0 {
        assert!(found.len() < 48, "the list is endless: {found:x?}");
        found.push((rig.read8(offset.into()), offset));
        offset = rig.read8(u16::from(offset) + 1);
    }
    found
}

/// All capabilities that the guest finds by the extended list.
fn extended(rig: &Rig) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let mut offset = 0x100;
    while offset != 0 {
        assert!(found.len() < 960, "the list is endless: {found:x?}");
        let header = rig.read32(offset);
        if header as u16 != 0 {
            found.push((header as u16, offset));
        }
        offset = (header >> 20) as u16;
    }
    found
}

#[test]
fn registers_read_what_the_guest_may_see() {
    let rig = Rig::new();
    let check = |offset, expect| assert_eq!(rig.read32(offset), expect, "register {offset:#x}");
    check(0x00, 0x5678_1234);
    // Command off, capability list there, nothing else.
    check(0x04, 0x0010_0000);
    check(0x08, 0x0108_0201);
    // No multifunction bit, no self test.
    check(0x0c, 0);
    check(0x10, 0xc);
    check(0x14, 0);
    check(0x18, 0);
    // The I/O BAR.
    check(0x1c, 1);
    check(0x20, 0);
    check(0x28, 0);
    check(0x2c, 0x5678_1234);
    // No ROM.
    check(0x30, 0);
    // No interrupt pin that leads anywhere; latencies are conventional PCI's and gone.
    check(0x3c, 0);
    // PM: no PME, no D1, no D2; No Soft Reset is kept.
    check(PM, 0x0003_0001 | 0x5000);
    check(PM + 4, 0x0000_0008);
    // MSI: 8 vectors, 64 bits, maskable.
    check(MSI, 0x0186_0005 | 0x7000);
    check(MSI + 4, 0);
    // PCI Express: an endpoint, version 2; function level reset is offered.
    check(EXPRESS, 0x0002_0010 | 0xb400);
    check(EXPRESS + 4, 0x1000_8fff);
    // Device Control as the host set it.
    check(EXPRESS + 8, 0x0000_2810);
    // MSI-X: 4 vectors.
    check(MSIX, 0x0003_0011 | 0xc000);
    check(MSIX + 4, 0x2002);
    check(MSIX + 8, 0x3002);
    // Vendor-specific: the device's.
    check(VENDOR, 0x2210_0009);
    check(VENDOR + 4, 0x4433);
    // The header at 0x100 is hidden but carries the link.
    check(0x100, 0x1400_0000);
    check(0x104, 0);
    // Advanced error reporting is virtual: no error, none masked, default severities.
    check(0x144, 0);
    check(0x148, 0);
    check(0x14c, 0x0046_2030);
    check(0x154, 0x2000);
    check(0x1a4, 0x0403_0201);
    check(0x308, 0x99);
    check(0x344, 0);
    check(0x348, 0);
    // Hidden bodies, and registers outside any capability.
    for offset in [0xac, 0xb0, 0xd4, 0xd8, 0x184, 0x194, 0x1b4, 0x1d4, 0x204, 0x400, 0xffc] {
        check(offset, 0);
    }
}

#[test]
fn hides_what_acts_on_the_host() {
    let rig = Rig::new();
    assert_eq!(capabilities(&rig), [(0x01, 0x40), (0x05, 0x50), (0x10, 0x70), (0x11, 0xb4), (0x09, 0xc0)]);
    assert_eq!(extended(&rig), [(0x0001, 0x140), (0x0003, 0x1a0), (0x000b, 0x300)]);
}

/// Whatever its ID, a capability that is not on the list has no byte that the guest sees, and takes none of its writes.
#[test]
fn hides_capabilities_that_it_does_not_know() {
    const SHOWN: [u16; 3] = [0x0001, 0x0003, 0x000b];
    for id in (1..=0x40).chain([0x7fff, 0xffff]).filter(|id| !SHOWN.contains(id)) {
        let mut config = config(4);
        config.extended(id, 0x400, &[0x77; 0x3c]);
        let rig = Rig::with(builder(&config, 4, false));
        rig.device.attach().unwrap();
        assert_eq!(extended(&rig), [(0x0001, 0x140), (0x0003, 0x1a0), (0x000b, 0x300)], "{id:#x}");
        let before = rig.sim.config();
        for offset in (0x400..0x440).step_by(4) {
            rig.write32(offset, u32::MAX);
            assert_eq!(rig.read32(offset), 0, "{id:#x} at {offset:#x}");
        }
        assert!(rig.sim.config() == before, "{id:#x}");
    }
}

/// Writes all ones to every register, one by one, and says what reads differently and what reached the device.
#[test]
fn writes_are_filtered() {
    // Register, width in bytes, bits that read differently afterwards, bits that differ in the device.
    let table: &[(u16, usize, u32, u32)] = &[
        (0x00, 4, 0, 0),
        (0x04, 2, 0x0547, 0x0147),
        (0x08, 4, 0, 0),
        (0x0c, 4, 0x0000_00ff, 0),
        (0x10, 4, 0xfff0_0000, 0),
        (0x14, 4, 0xffff_ffff, 0),
        (0x18, 4, 0xffff_0000, 0),
        (0x1c, 4, 0xffff_ffe0, 0),
        (0x20, 4, 0xffff_ff00, 0),
        (0x24, 4, 0, 0),
        (0x28, 4, 0, 0),
        (0x2c, 4, 0, 0),
        (0x30, 4, 0, 0),
        (0x34, 4, 0, 0),
        (0x38, 4, 0, 0),
        (0x3c, 4, 0x0000_00ff, 0),
        (PM, 4, 0, 0),
        // The power state; PME is not the guest's, and its status bit is left alone.
        (PM + 4, 4, 0x0000_0003, 0x0000_0003),
        (MSI, 4, 0x0071_0000, 0),
        (MSI + 4, 4, 0xffff_fffc, 0),
        (MSI + 8, 4, 0xffff_ffff, 0),
        (MSI + 12, 4, 0x0000_ffff, 0),
        (MSI + 16, 4, 0x0000_00ff, 0),
        (MSI + 20, 4, 0, 0),
        (EXPRESS, 4, 0, 0),
        (EXPRESS + 4, 4, 0, 0),
        (EXPRESS + 0x0c, 4, 0, 0),
        (EXPRESS + 0x10, 2, 0x0040, 0),
        (EXPRESS + 0x12, 2, 0, 0),
        (EXPRESS + 0x14, 4, 0, 0),
        (EXPRESS + 0x18, 4, 0, 0),
        (EXPRESS + 0x1c, 4, 0, 0),
        (EXPRESS + 0x20, 4, 0, 0),
        (EXPRESS + 0x24, 4, 0, 0),
        (EXPRESS + 0x28, 2, 0x001f, 0),
        (EXPRESS + 0x2c, 4, 0, 0),
        (EXPRESS + 0x30, 2, 0, 0),
        (EXPRESS + 0x34, 4, 0, 0),
        (MSIX, 4, 0xc000_0000, 0),
        (MSIX + 4, 4, 0, 0),
        (MSIX + 8, 4, 0, 0),
        // The device's own registers.
        (VENDOR + 4, 4, 0xffff_bbcc, 0xffff_bbcc),
        // Those of the extended capability are only read.
        (0x304, 4, 0, 0),
        (0x308, 4, 0, 0),
        (0x30c, 4, 0, 0),
        // CXL's, which is hidden.
        (0x340, 4, 0, 0),
        (0x344, 4, 0, 0),
        (0x348, 4, 0, 0),
        (0x34c, 4, 0, 0),
        // Past the vendor-specific length.
        (0x310, 4, 0, 0),
        (VENDOR + 0x10, 4, 0, 0),
        // Of advanced error reporting, masks and severities, which stay here.
        (0x144, 4, 0, 0),
        (0x148, 4, 0x07ff_f030, 0),
        (0x14c, 4, 0x07b9_d000, 0),
        (0x150, 4, 0, 0),
        (0x154, 4, 0x0000_d1c1, 0),
        (0x158, 4, 0, 0),
        (0x1a4, 4, 0, 0),
        // Hidden capabilities, and registers outside any.
        (0xac, 4, 0, 0),
        (0xd4, 4, 0, 0),
        (0x100, 4, 0, 0),
        (0x108, 4, 0, 0),
        (0x184, 4, 0, 0),
        (0x190, 4, 0, 0),
        (0x1b4, 4, 0, 0),
        (0x1d4, 4, 0, 0),
        (0x208, 4, 0, 0),
        (0x400, 4, 0, 0),
        (0xffc, 4, 0, 0),
    ];
    for &(offset, width, seen, reached) in table {
        let rig = Rig::new();
        let read = || {
            let mut data = [0; 4];
            rig.device.config_read(offset, &mut data[..width]);
            u32::from_le_bytes(data)
        };
        let hardware = || {
            let mut data = [0; 4];
            let start = usize::from(offset);
            data[..width].copy_from_slice(&rig.sim.config()[start..start + width]);
            u32::from_le_bytes(data)
        };
        let before = (read(), hardware());
        rig.log.take();
        rig.device.config_write(offset, &[0xff; 4][..width]);
        // A register that stays here is not written in the device, not even with what it has.
        let written = format!("config {offset:#x} =");
        assert_eq!(rig.log.take().iter().any(|line| line.starts_with(&written)), reached != 0, "{offset:#x}");
        assert_eq!(read() ^ before.0, seen, "what the guest reads at {offset:#x}");
        assert_eq!(hardware() ^ before.1, reached, "what the device has at {offset:#x}");
    }
}

#[test]
fn errors_are_shown_until_the_guest_clears_them_and_sent_as_it_wants() {
    const AER: u16 = 0x140;
    const INTERNAL: u32 = 1 << 22;
    // Device Control, Command, the mask, the severity; whether a message is sent.
    fn check(control: u16, command: u16, mask: u32, severity: ErrorSeverity, sent: bool) {
        let rig = Rig::new();
        rig.write16(EXPRESS + 8, control);
        rig.write16(4, command);
        rig.write32(AER + 8, mask);
        let case = format!("{control:#x} {command:#x} {mask:#x} {severity}");
        assert_eq!(rig.device.report_error(severity), sent, "{case}");
        // Shown, in any case, with the number of the bit.
        assert_eq!((rig.read32(AER + 4), rig.read32(AER + 0x18)), (INTERNAL, 22), "{case}");
        let is_fatal = rig.read32(AER + 0xc) & INTERNAL != 0;
        assert_eq!(is_fatal, severity == ErrorSeverity::Fatal, "{case}");
        rig.write32(AER + 4, !INTERNAL);
        assert_eq!(rig.read32(AER + 4), INTERNAL, "{case}");
        rig.write32(AER + 4, INTERNAL);
        assert_eq!(rig.read32(AER + 4), 0, "{case}");
        assert_eq!(rig.sim.config()[0x144..0x168], [0x66; 0x24], "{case}: the device has seen nothing of it");
    }
    use ErrorSeverity::{Fatal, NonFatal};
    check(0, 0, 0, NonFatal, false);
    check(1 << 1, 0, 0, NonFatal, true);
    check(1 << 1, 0, 0, Fatal, false);
    check(1 << 2, 0, 0, Fatal, true);
    check(0, 1 << 8, 0, NonFatal, true);
    check(0, 1 << 8, 0, Fatal, true);
    check(6, 1 << 8, INTERNAL, Fatal, false);
    check(6, 0, !INTERNAL, NonFatal, true);
}

#[test]
fn device_control_keeps_payload_size_from_the_device() {
    let rig = Rig::new();
    // No-snoop off, read requests of 4096 bytes, payload of 4096 bytes, errors reported.
    rig.write16(EXPRESS + 8, 0x50af);
    assert_eq!(rig.read16(EXPRESS + 8), 0x50af);
    // Only relaxed ordering, no-snoop and the read request size reach the device.
    assert_eq!(rig.hardware16(EXPRESS + 8), 0x5000);
}

#[test]
fn error_bits_are_cleared_by_writing_one_and_not_by_a_neighbour() {
    let rig = Rig::new();
    rig.sim.set_config(6, &[0x18, 0xf9]);
    assert_eq!(rig.read16(6), 0xf918);
    // A write of the command register alone, and one of all four bytes with zeroes above.
    rig.write16(4, 0x2);
    rig.write32(4, 0x6);
    assert_eq!(rig.read16(6), 0xf918);
    rig.write16(6, 0x2100);
    assert_eq!(rig.read16(6), 0xd818);
    rig.write32(4, 0xffff_0006);
    assert_eq!(rig.read16(6), 0x0018);
    // vfio-pci drops the writes: an error is new once the device has had none.
    assert_eq!(rig.hardware16(6), 0xf918);
    rig.sim.set_config(6, &[0x18, 0x78]);
    assert_eq!(rig.read16(6), 0x0018);
    rig.sim.set_config(6, &[0x18, 0xf8]);
    assert_eq!(rig.read16(6), 0x8018);
    assert_eq!(rig.read16(4), 0x6);
}

#[test]
fn any_access_is_answered() {
    let rig = Rig::new();
    for offset in [0u16, 1, 3, 0xfd, 0xff, 0xffd, 0xfff, 0x1000, 0xfffe, 0xffff] {
        for len in [0, 1, 2, 3, 4, 8, 64] {
            let mut data = vec![0x77; len];
            rig.device.config_write(offset, &data);
            rig.device.config_read(offset, &mut data);
            let outside = usize::from(offset) + len;
            if outside > 0x1000 {
                let first = 0x1000usize.saturating_sub(offset.into());
                assert!(data[first..].iter().all(|&byte| byte == 0xff), "{offset:#x} {len}");
            }
        }
    }
}

#[test]
fn an_integrated_endpoint_becomes_one_with_a_link() {
    let mut config = SimConfig::new(0x8086, 1, 0x03_00_00);
    config.capability(0x10, EXPRESS as u8, &express(0x92));
    let rig = Rig::with(SimDeviceBuilder::new(config.bytes()).without_reset());
    // It has no reset, so it can't be attached, and shows nothing.
    assert!(rig.device.attach().is_err());
    assert_eq!(rig.read32(EXPRESS), u32::MAX);

    let rig = Rig::with(SimDeviceBuilder::new(config.bytes()));
    rig.device.attach().unwrap();
    assert_eq!(rig.read32(EXPRESS), 0x0002_0010);
    assert_eq!(rig.read32(EXPRESS + 0x0c), 0x11);
    assert_eq!(rig.read16(EXPRESS + 0x12), 0x11);
    // Bridges and ports are no endpoints.
    for kind in [0x42, 0x52, 0x62, 0x72, 0x82, 0xa2, 0xf2] {
        let mut config = SimConfig::new(0x8086, 1, 0x03_00_00);
        config.capability(0x10, EXPRESS as u8, &express(kind));
        let rig = Rig::with(SimDeviceBuilder::new(config.bytes()));
        rig.device.attach().unwrap();
        assert_eq!(capabilities(&rig), []);
    }
}

/// An attached device with these bytes, 32 vectors of MSI, 4 of MSI-X, and a BAR 0 of 64 KiB.
fn patched(patch: impl Fn(&mut SimConfig)) -> Rig {
    let mut config = SimConfig::new(1, 2, 3);
    patch(&mut config);
    let sim = SimDeviceBuilder::new(config.bytes()).bar(0, 1 << 16, &[]).msi(32).msix(4, false);
    let rig = Rig::with(sim);
    rig.device.attach().unwrap();
    rig
}

#[test]
fn hostile_lists_end() {
    #[track_caller]
    fn check(patch: impl Fn(&mut SimConfig), plain: &[(u8, u8)], more: &[(u16, u16)]) {
        let rig = patched(patch);
        assert_eq!(capabilities(&rig), plain);
        assert_eq!(extended(&rig), more);
    }
    let pm = (0x01, 0x40);
    check(|_| {}, &[], &[]);
    // Links to itself, in a circle, into the header, to the last bytes.
    check(|c| _ = c.capability(1, 0x40, &[]).put(0x41, &[0x40]), &[pm], &[]);
    check(
        |c| _ = c.capability(1, 0x40, &[]).capability(9, 0x50, &[4]).put(0x51, &[0x40]),
        &[pm, (9, 0x50)],
        &[],
    );
    check(|c| _ = c.capability(1, 0x40, &[]).put(0x41, &[0x3c]), &[pm], &[]);
    check(|c| _ = c.capability(1, 0xfc, &[]), &[], &[]);
    check(|c| _ = c.capability(1, 0x43, &[]), &[], &[]);
    // Lengths that overlap, overflow or are too short; twice the same capability.
    check(|c| _ = c.capability(9, 0x48, &[0xff]).capability(1, 0x40, &[]), &[pm], &[]);
    check(|c| _ = c.capability(9, 0x48, &[0x20]).capability(1, 0x50, &[]), &[(9, 0x48)], &[]);
    check(|c| _ = c.capability(9, 0x48, &[0x01]).capability(1, 0x40, &[]), &[pm], &[]);
    check(|c| _ = c.capability(1, 0x40, &[]).capability(1, 0x50, &[]), &[pm], &[]);
    // MSI-X in a BAR that is not there, with its structures over each other.
    check(|c| _ = c.capability(0x11, 0x40, &[0xff, 7, 7, 0, 0, 0, 7, 0x80, 0, 0]), &[], &[]);
    // MSI at the very end.
    check(|c| _ = c.capability(5, 0xf4, &[0x80, 1]), &[], &[]);
    check(|c| _ = c.capability(5, 0xe8, &[0x8e, 1]), &[(5, 0xe8)], &[]);
    // Extended: circle, all ones, vendor-specific past the end, into the first 256 bytes.
    check(|c| _ = c.extended(3, 0x100, &[]).put(0x102, &[1, 0x10]), &[], &[(3, 0x100)]);
    check(|c| _ = c.put(0x100, &[0xff; 4]), &[], &[]);
    check(|c| _ = c.extended(0xb, 0xff0, &[0, 0, 1, 2]), &[], &[]);
    check(
        |c| _ = c.extended(3, 0x100, &[]).extended(0xb, 0xff0, &[0, 0, 1, 2]).extended(3, 0x200, &[]),
        &[],
        &[(3, 0x100), (3, 0x200)],
    );
    check(|c| _ = c.extended(3, 0x100, &[]).put(0x102, &[1, 0x04]), &[], &[(3, 0x100)]);
    check(|c| _ = c.extended(3, 0xffc, &[]).put(0x100, &[0x10, 0, 1, 0xff]), &[], &[]);
}

/// A capability that ends with config space is shown, and one that would end after it is hidden.
#[test]
fn capabilities_end_in_config_space() {
    #[track_caller]
    fn check(id: u8, body: &[u8], last: u8) {
        let rig = patched(|c| _ = c.capability(id, last, body));
        assert_eq!(capabilities(&rig), [(id, last)], "{body:x?} at {last:#x}");
        let rig = patched(|c| _ = c.capability(id, last + 4, body));
        assert_eq!(capabilities(&rig), [], "{body:x?} at {:#x}", last + 4);
    }
    check(0x01, &[], 0xf8);
    // MSI: with an address of 32 or 64 bits, without and with mask bits.
    check(0x05, &[0x00, 0x00], 0xf4);
    check(0x05, &[0x80, 0x00], 0xf0);
    check(0x05, &[0x00, 0x01], 0xec);
    check(0x05, &[0x80, 0x01], 0xe8);
    // PCI Express: version 1, version 2.
    check(0x10, &[0x01], 0xec);
    check(0x10, &[0x02], 0xc4);
    check(0x11, &[3, 0, 0, 0, 0, 0, 0, 0x10], 0xf4);

    #[track_caller]
    fn check_extended(id: u16, body: &[u8], last: u16) {
        let rig = patched(|c| _ = c.extended(2, 0x100, &[]).extended(id, last, body));
        assert_eq!(extended(&rig), [(id, last)]);
        let rig = patched(|c| _ = c.extended(2, 0x100, &[]).extended(id, last + 4, body));
        assert_eq!(extended(&rig), []);
    }
    check_extended(0x0001, &[], 0xfd4);
    check_extended(0x0003, &[], 0xff4);
    check_extended(0x000b, &[0, 0, 0x81, 0], 0xff8);
}

#[test]
fn vendor_specific_capabilities_are_as_long_as_they_state() {
    const FILL: u8 = 0x5a;
    // Reads 8 bytes as the guest, writes zeros to them, and checks which zeros reached the device.
    #[track_caller]
    fn check(rig: &Rig, offset: u16, seen: [u8; 8], left: [u8; 8]) {
        assert_eq!(std::array::from_fn(|index| rig.read8(offset + index as u16)), seen);
        rig.device.config_write(offset, &[0; 8]);
        assert_eq!(rig.sim.config()[offset.into()..][..8], left);
    }
    let plain = |len: u8| {
        patched(move |c| _ = c.capability(9, 0x40, &[len, FILL, FILL, FILL, FILL, FILL, FILL, FILL]))
    };
    assert_eq!(capabilities(&plain(1)), []);
    let rig = plain(2);
    assert_eq!(capabilities(&rig), [(9, 0x40)]);
    check(&rig, 0x42, [0; 8], [2, FILL, FILL, FILL, FILL, FILL, FILL, FILL]);
    check(&plain(5), 0x42, [5, FILL, FILL, 0, 0, 0, 0, 0], [0, 0, 0, FILL, FILL, FILL, FILL, FILL]);

    let long = |len: u16| {
        let [low, high] = (len << 4).to_le_bytes();
        let body = [FILL, FILL, low, high, FILL, FILL, FILL, FILL];
        patched(move |c| _ = c.extended(0xb, 0x100, &body))
    };
    // The header and the length take 8 bytes.
    assert_eq!(extended(&long(4)), []);
    assert_eq!(extended(&long(7)), []);
    let rig = long(8);
    assert_eq!(extended(&rig), [(0xb, 0x100)]);
    let raw = |len| [FILL, FILL, len, 0, FILL, FILL, FILL, FILL];
    check(&rig, 0x104, [FILL, FILL, 0x80, 0, 0, 0, 0, 0], raw(0x80));
    check(&long(10), 0x104, [FILL, FILL, 0xa0, 0, FILL, FILL, 0, 0], raw(0xa0));
}

#[test]
fn the_first_of_two_capabilities_is_shown() {
    for (id, body) in [(0x01, &[][..]), (0x05, &[]), (0x10, &[0x02]), (0x11, &[3, 0, 0, 0, 0, 0, 0, 0x10])] {
        let rig = patched(|c| _ = c.capability(id, 0x40, body).capability(id, 0x80, body));
        assert_eq!(capabilities(&rig), [(id, 0x40)]);
    }
    let rig = patched(|c| _ = c.extended(1, 0x100, &[]).extended(1, 0x200, &[]));
    assert_eq!(extended(&rig), [(1, 0x100)]);
}

/// The guest sees no more vectors than VFIO has.
#[test]
fn interrupts_that_vfio_lacks_are_hidden() {
    let mut config = SimConfig::new(1, 2, 3);
    config.capability(5, 0x40, &[0x8e, 1]).capability(0x11, 0x60, &[3, 0, 0, 0, 0, 0, 0, 0x10]);
    let shown = |msi: u32, msix: u32| {
        let sim = SimDeviceBuilder::new(config.bytes()).bar(0, 1 << 16, &[]).msi(msi).msix(msix, false);
        let rig = Rig::with(sim);
        rig.device.attach().unwrap();
        let control = |offset| rig.read16(offset);
        (capabilities(&rig), control(0x42), control(0x62))
    };
    assert_eq!(shown(0, 0), (vec![], 0, 0));
    assert_eq!(shown(0, 1), (vec![(0x11, 0x60)], 0, 0));
    // 2 vectors of the device's 4; as many as the device has.
    assert_eq!(shown(0, 2), (vec![(0x11, 0x60)], 0, 1));
    assert_eq!(shown(0, 9), (vec![(0x11, 0x60)], 0, 3));
    // 64 bits, mask bits, and 1, 2 or 32 vectors: those of VFIO, in powers of two.
    assert_eq!(shown(1, 0), (vec![(5, 0x40)], 0x180, 0));
    assert_eq!(shown(3, 0), (vec![(5, 0x40)], 0x182, 0));
    assert_eq!(shown(64, 0), (vec![(5, 0x40)], 0x18a, 0));
}

/// Multiple Message Capable is the binary logarithm of the number of vectors; 6 and 7 are reserved.
#[test]
fn msi_has_as_many_vectors_as_the_device_states() {
    for (stated, shown) in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 5), (7, 5)] {
        let rig = patched(|c| _ = c.capability(5, 0x40, &[0x80 | stated << 1, 1]));
        assert_eq!(rig.read16(0x42), 0x180 | shown << 1, "{stated}");
    }
}

#[test]
fn msi_messages_are_what_the_guest_programs() {
    // Vector 2 of 4.
    #[track_caller]
    fn check(control: u8, registers: &[(u16, u32)], expect: MsiMessage) {
        let rig = patched(|c| _ = c.capability(5, 0x40, &[control | 2 << 1, 0]));
        for &(offset, value) in registers {
            rig.write32(0x40 + offset, value);
        }
        rig.write16(0x42, 0x0021);
        assert!(rig.sim.fire(MSI_IRQ, 2));
        // The two lowest bits of the data are the vector.
        assert_eq!(rig.vmm.delivered(), [expect]);
    }
    check(0x00, &[(4, 0xfee0_3000), (8, 0x5b59)], MsiMessage { address: 0xfee0_3000, data: 0x5b5a });
    check(
        0x80,
        &[(4, 0xfee0_3000), (8, 0x1234_5678), (12, 0x5b59)],
        MsiMessage { address: 0x1234_5678_fee0_3000, data: 0x5b5a },
    );
}

/// After a failure, only a write to the interrupt's own registers enables its vectors again.
#[test]
fn only_writes_of_its_capability_program_an_interrupt() {
    // Writes back the `len` bytes at `offset`.
    #[track_caller]
    fn check(index: u32, (control, enable): (u16, u16), (offset, len): (u16, usize), enabled: usize) {
        let rig = Rig::new();
        rig.sim.fail(Fault::SetTriggers);
        rig.write16(control, enable);
        rig.sim.heal();
        assert_eq!(rig.sim.enabled(index), 0);
        let mut data = [0; 4];
        rig.device.config_read(offset, &mut data[..len]);
        rig.device.config_write(offset, &data[..len]);
        assert_eq!(rig.sim.enabled(index), enabled);
    }
    // MSI: all 24 bytes of the capability.
    let msi = (MSI + 2, 0x0031);
    check(MSI_IRQ, msi, (MSI - 4, 4), 0);
    check(MSI_IRQ, msi, (MSI, 4), 8);
    check(MSI_IRQ, msi, (MSI + 23, 1), 8);
    check(MSI_IRQ, msi, (MSI + 24, 4), 0);
    // MSI-X: the control register.
    let msix = (MSIX + 2, 0x8000);
    check(MSIX_IRQ, msix, (MSIX, 2), 0);
    check(MSIX_IRQ, msix, (MSIX + 2, 1), 1);
    check(MSIX_IRQ, msix, (MSIX + 3, 1), 1);
    check(MSIX_IRQ, msix, (MSIX + 4, 4), 0);
}

/// The MSI-X table and the pending bits lie inside a BAR and do not overlap.
#[test]
fn msix_structures_lie_apart_in_a_bar() {
    // 4 vectors: 64 bytes of table, 8 bytes of pending bits, in a BAR of 64 KiB.
    #[track_caller]
    fn check(table: u32, pending: u32, shown: bool) {
        let mut body = vec![3, 0];
        body.extend(table.to_le_bytes().into_iter().chain(pending.to_le_bytes()));
        let rig = patched(|c| _ = c.capability(0x11, 0x40, &body));
        assert_eq!(!capabilities(&rig).is_empty(), shown, "{table:#x} {pending:#x}");
    }
    check(0x1000, 0x2000, true);
    check(0x2000, 0x1000, true);
    // A structure ends with the BAR, or after it.
    check(0xffc0, 0x0000, true);
    check(0xffc8, 0x0000, false);
    check(0x0000, 0xfff8, true);
    check(0x0000, 0x1_0000, false);
    check(0xffff_fff8, 0x0000, false);
    check(0x0000, 0xffff_fff8, false);
    // Adjacent structures, and overlapping ones.
    check(0x1000, 0x1040, true);
    check(0x1000, 0x1038, false);
    check(0x1000, 0x1000, false);
    check(0x1008, 0x1000, true);
    check(0x1008, 0x1008, false);
    // BARs that do not exist.
    check(0x1001, 0x2000, false);
    check(0x1000, 0x2006, false);
    check(0x1007, 0x2007, false);
}

#[test]
fn express_of_version_1_has_no_more_registers() {
    #[track_caller]
    fn check(flags: u8, header: u32, controls: [u16; 4]) {
        let rig = patched(|c| _ = c.capability(0x10, 0x40, &express(flags)));
        assert_eq!(rig.read32(0x40), header);
        let found = [0x10, 0x28, 0x2c, 0x30].map(|register| {
            rig.write16(0x40 + register, u16::MAX);
            rig.read16(0x40 + register)
        });
        assert_eq!(found, controls);
    }
    // Link Control, Device Control 2, Link Capabilities 2, Link Control 2.
    check(0x02, 0x0002_0010, [0x0040, 0x001f, 0x00fe, 0x000f]);
    check(0x01, 0x0001_0010, [0x0040, 0, 0, 0]);
    // Legacy endpoints are endpoints, and versions to come are version 2.
    check(0x12, 0x0012_0010, [0x0040, 0x001f, 0x00fe, 0x000f]);
    check(0x03, 0x0002_0010, [0x0040, 0x001f, 0x00fe, 0x000f]);
    // An integrated endpoint shows a link that the device does not have.
    check(0x92, 0x0002_0010, [0, 0x001f, 0, 0]);
    // The interrupt message number is the host's.
    let rig = patched(|c| _ = c.capability(0x10, 0x40, &express(0x02)).put(0x43, &[0x3e]));
    assert_eq!(rig.read32(0x40), 0x0002_0010);
}

#[test]
fn severities_are_the_guests_but_for_the_reported_error() {
    const AER: u16 = 0x140;
    let rig = Rig::new();
    for _ in 0..2 {
        rig.device.report_error(ErrorSeverity::NonFatal);
        assert_eq!((rig.read32(AER + 4), rig.read32(AER + 0xc)), (1 << 22, 0x0006_2030));
    }
    for _ in 0..2 {
        rig.device.report_error(ErrorSeverity::Fatal);
        assert_eq!((rig.read32(AER + 4), rig.read32(AER + 0xc)), (1 << 22, 0x0046_2030));
    }
    // Without the capability nothing is shown, and no message sent.
    let rig = patched(|c| _ = c.capability(0x10, 0x40, &express(0x02)));
    rig.write16(0x48, 0x7);
    assert!(!rig.device.report_error(ErrorSeverity::Fatal));
    assert_eq!(extended(&rig), []);
    // Without PCI Express only SERR asks for messages.
    let rig = patched(|c| _ = c.extended(1, 0x100, &[]));
    assert!(!rig.device.report_error(ErrorSeverity::Fatal));
    rig.write16(4, 1 << 8);
    assert!(rig.device.report_error(ErrorSeverity::Fatal));
}

#[test]
fn bridges_and_dead_devices_are_refused() {
    fn check(patch: impl Fn(&mut SimConfig), len: usize, expect: &str) {
        let mut config = SimConfig::new(1, 2, 3);
        patch(&mut config);
        let log = SimLog::default();
        let config = config.bytes()[..len].to_vec();
        let space = SimSpace::new(vec![], &log);
        let sim = SimDeviceBuilder::new(config).bar(0, 4097, &[]);
        let sim = sim.build("65:00.0".parse().unwrap(), space).unwrap();
        let vmm = SimVmm::new(&[], &log).unwrap();
        let error = VfioPciDevice::new(sim, vmm).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
    check(|c| _ = c.put(0x0e, &[0x81]), 4096, "header type 1");
    check(|c| _ = c.put(0, &[0xff; 64]), 256, "all ones");
    check(|_| {}, 8, "8 bytes");
    check(|_| {}, 256, "BAR 0 of 0x1001 bytes");
}

#[test]
fn linux_sizes_the_bars() {
    let rig = Rig::new();
    let bars = placement::probe(&*rig.device);
    let found: Vec<_> = bars.iter().map(|b| (b.index, b.size, b.wide, b.prefetchable, b.io)).collect();
    assert_eq!(
        found,
        [
            (0, 1 << 20, true, true, false),
            (2, 1 << 16, false, false, false),
            (3, 32, false, false, true),
            (4, 256, false, false, false)
        ]
    );
}
