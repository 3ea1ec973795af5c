//! What a driver in the guest may lack: INTx on a shared line, port I/O.

use super::*;
use crate::pci::regs::{CAP_ID_EXP, CAP_ID_MSI, CAP_ID_MSIX};

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
    let on = |row: &str, function: SimFunction| {
        let scene = Scene::with(function).write(&format!("sys/bus/pci/devices/{DISK}/irq"), "16\n");
        let other = "  6:  1  1  IR-IO-APIC    6-edge      floppy\n";
        scene.write(
            "proc/interrupts",
            &format!("  CPU0 CPU1\n{other}  16:  7  0  IR-IO-APIC   16-fasteoi   {row}\n"),
        )
    };
    let intx = |pin, capabilities: &[u8]| function(0x02_0000, &[Memory32], pin, capabilities);
    for pin in 1..=4 {
        on("ehci_hcd:usb1, ahci[0000:00:1f.2]", intx(pin, &[])).check(
            Code::LegacyInterrupt,
            Warns,
            &["line 16", "ehci_hcd:usb1, ahci"],
            &["PCI 2.3", "another slot"],
        );
        on("eth0, ehci_hcd:usb1", intx(pin, &[]).driver("e1000")).check(
            Code::LegacyInterrupt,
            Warns,
            &["eth0"],
            &[],
        );
        assert_eq!(on("", intx(pin, &[])).explain().blockers, []);
        assert_eq!(on("eth0", intx(pin, &[]).driver("e1000")).explain().blockers, []);
        for other in [CAP_ID_MSI, CAP_ID_MSIX, CAP_ID_EXP] {
            assert_eq!(on("ehci_hcd:usb1", intx(pin, &[other])).explain().blockers, [], "{other}");
        }
        assert_eq!(Scene::with(intx(pin, &[])).explain().blockers, []);
    }
    // It raises none, or says nonsense.
    for pin in [0, 5, 0xff] {
        assert_eq!(on("ehci_hcd:usb1", intx(pin, &[])).explain().blockers, [], "{pin}");
    }
    // Without privilege no capability can be read.
    let mut header = intx(1, &[]).config_space();
    header.truncate(64);
    assert_eq!(on("ehci_hcd:usb1", intx(1, &[]).config(header)).explain().blockers, []);
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
    // In a slot of a guest that runs, which has no ports.
    let without = |class, bars: &[BarKind]| {
        let mut scene = with(class, bars);
        scene.options.slot = Some(Windows { low: 0xc000_0000..0xd000_0000, high: 0..0, io: 0..0 });
        scene
    };
    for (class, bars, why) in [
        (0x04_0100, &[Io, Io][..], "no memory BAR"),
        (0x07_0002, &[Io], "no memory BAR"),
        (0x01_018a, &[Io, Io, Io, Io, Io], "PCI IDE Controller"),
        (0x01_018a, &[Io, Memory32], "class 01018a is programmed through it"),
        (0x0c_0300, &[Memory32, Io], "Universal Host Controller"),
    ] {
        without(class, bars).check(Code::PortIo, Blocks, &["port I/O", "/resource", why], &["fewer devices"]);
        assert_eq!(with(class, bars).explain().blockers, [], "{class:06x}");
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
        assert_eq!(without(class, bars).explain().blockers, [], "{class:06x} {bars:?}");
    }
}
