//! What the guest does not give a driver: INTx, port I/O, an expansion ROM.

use super::*;
use crate::pci::regs::{CAP_ID_MSI, CAP_ID_MSIX};

/// A function with these BARs, an interrupt pin and these capabilities.
fn function(class: u32, bars: &[BarKind], pin: u8, capabilities: &[u8]) -> SimFunction {
    let mut function = SimFunction::new(address(DISK), 0x1002, 0x5159, class).group(1).below(address(PORT));
    for (index, &kind) in (0..).zip(bars) {
        function = function.bar(index, kind, false, 0x8000_0000 + u64::from(index) * 0x1000, 0x100);
    }
    for &id in capabilities {
        function = function.capability(id, &[0; 10]);
    }
    let mut config = function.config_space();
    config[0x3d] = pin;
    function.config(config)
}

#[test]
fn interrupts() {
    use BarKind::Memory32;
    let intx = |pin, capabilities: &[u8]| Scene::with(function(0x02_0000, &[Memory32], pin, capabilities));
    for pin in 1..=4 {
        let name = format!("INT{}", char::from(b'@' + pin));
        intx(pin, &[]).check(Code::LegacyInterrupt, Blocks, &[&name, "neither MSI nor MSI-X"], &["QEMU"]);
        assert_eq!(intx(pin, &[CAP_ID_MSI]).explain().blockers, []);
        assert_eq!(intx(pin, &[CAP_ID_MSIX]).explain().blockers, []);
    }
    // It raises none, or says nonsense.
    for pin in [0, 5, 0xff] {
        assert_eq!(intx(pin, &[]).explain().blockers, [], "{pin}");
    }
    // Who may read the header alone can't tell.
    let short = function(0x02_0000, &[Memory32], 1, &[]);
    let header = short.config_space()[..64].to_vec();
    Scene::with(short.config(header)).check(Code::Unchecked, Warns, &["/config ends before"], &["root"]);
    // Companions stay with the host.
    let scene = Scene::new();
    let audio = SimFunction::new(address("0000:01:00.1"), 0x8086, 0x2415, 0x04_0100).group(1);
    let mut config = audio.config_space();
    config[0x3d] = 1;
    scene.sim.add(&audio.config(config).bar(0, BarKind::Io, false, 0x1000, 0x100)).unwrap();
    assert_eq!(scene.explain().blockers, []);
}

#[test]
fn port_io() {
    use BarKind::{Io, Memory32, Memory64};
    let with = |class, bars: &[BarKind]| Scene::with(function(class, bars, 0, &[CAP_ID_MSI]));
    for (class, bars, why) in [
        (0x04_0100, &[Io, Io][..], "no memory BAR"),
        (0x07_0002, &[Io], "no memory BAR"),
        (0x01_018a, &[Io, Io, Io, Io, Io], "PCI IDE Controller"),
        (0x01_018a, &[Io, Memory32], "class 01018a is programmed through it"),
        (0x0c_0300, &[Memory32, Io], "Universal Host Controller"),
    ] {
        with(class, bars).check(Code::PortIo, Blocks, &["port I/O", "/resource", why], &["QEMU"]);
    }
    for (class, bars) in [
        // A GPU, a network controller, AHCI, xHCI; a disk behind memory alone.
        (0x03_0000, &[Memory32, Io][..]),
        (0x02_0000, &[Memory32, Memory32, Io]),
        (0x01_0601, &[Io, Io, Io, Io, Io, Memory32]),
        (0x0c_0330, &[Memory32]),
        (0x01_018a, &[Memory32]),
        (0x01_0802, &[Memory64]),
        (0x05_0000, &[]),
    ] {
        assert_eq!(with(class, bars).explain().blockers, [], "{class:06x} {bars:?}");
    }
}

#[test]
fn rom() {
    let with = |class, rom| Scene::with(function(class, &[BarKind::Memory32], 0, &[]).rom(rom));
    with(0x03_0000, 128 << 10).check(Code::RomHidden, Warns, &["128 KiB"], &["amdgpu", "radeon"]);
    // Not a display, or no ROM; and others than AMD's don't look there.
    assert_eq!(with(0x12_0000, 128 << 10).explain().blockers, []);
    assert_eq!(with(0x03_0000, 0).explain().blockers, []);
    assert_eq!(Scene::with(SimFunction::gpu(address(DISK)).below(address(PORT))).explain().blockers, []);
}
