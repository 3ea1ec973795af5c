//! Fixes suit the place that a function is in; consoles and displays are found by what sysfs shows of them.

use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use super::*;
use crate::host::SysfsWriter;
use crate::pci::BarKind;
use crate::sim::{SimFunction, SimHost};

const ROOT: &str = "0000:00:07.0";
const SWITCH: [&str; 2] = ["0000:30:00.0", "0000:31:01.0"];
const GPU: &str = "0000:32:00.0";

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn report(sim: &SimHost, function: &str) -> Readiness {
    explain(&sim.plain_host(), address(function), &ExplainOptions::default()).unwrap()
}

/// The fixes of these findings, all of which there must be.
fn fixes(sim: &SimHost, function: &str, codes: &[BlockerCode]) -> Vec<String> {
    let readiness = report(sim, function);
    let fix = |code: &BlockerCode| {
        let found = readiness.blockers.iter().find(|found| found.code == *code);
        found.unwrap_or_else(|| panic!("no {code}: {readiness}")).remedy.clone()
    };
    codes.iter().map(fix).collect()
}

/// A GPU behind a switch, with a BAR that has no address, memory that the firmware wants mapped, and no reset of its own.
fn behind_a_switch() -> SimHost {
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::root_port(address(ROOT)).group(7)).unwrap();
    let [upstream, downstream] = SWITCH.map(address);
    sim.add(&SimFunction::root_port(upstream).below(address(ROOT)).group(7)).unwrap();
    sim.add(&SimFunction::root_port(downstream).below(upstream).group(7)).unwrap();
    let gpu = SimFunction::gpu(address(GPU)).below(downstream).group(8).bar(
        4,
        BarKind::Memory64,
        true,
        0,
        256 << 20,
    );
    sim.add(&gpu).unwrap();
    sim.write("sys/kernel/iommu_groups/8/reserved_regions", "0x7d800000 0x7f7fffff direct\n").unwrap();
    sim
}

/// Linux before 5.14 has no `removable`, and a capture may lack it: the ports above tell that a card is in an enclosure.
#[test]
fn a_card_in_an_enclosure_is_not_moved_to_another_slot() {
    use BlockerCode::{BarUnassigned, FirmwareMemory};
    let check = |sim: &SimHost, is_enclosed: bool| {
        for fix in fixes(sim, GPU, &[BarUnassigned, FirmwareMemory]) {
            assert_eq!(fix.contains("connect the enclosure "), is_enclosed, "{fix}");
            assert!(!is_enclosed || !fix.contains("slot"), "{fix}");
        }
    };
    let sim = behind_a_switch();
    check(&sim, false);
    let vendor_specific = [0x0b, 0, 1, 0, 0x34, 0x12, 0xc0, 1];
    let path = sim.device_dir(address(SWITCH[0])).unwrap().join("config");
    let mut config = fs::read(&path).unwrap();
    config.resize(4096, 0);
    config[0x100..0x108].copy_from_slice(&vendor_specific);
    fs::write(&path, &config).unwrap();
    check(&sim, true);
    // What Linux says comes first.
    sim.set(address(GPU), "removable", "unknown\n").unwrap();
    check(&sim, false);
    let linked = behind_a_switch();
    linked.link(&format!("sys/bus/pci/devices/{ROOT}/supplier:pci:0000:00:0d.2"), "sys/bus/pci").unwrap();
    check(&linked, true);
}

#[test]
fn what_is_built_in_is_not_moved_to_another_slot() {
    let on_board = "0000:00:1f.3";
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::new(address(on_board), 0x8086, 0xa348, 0x04_0300).group(3)).unwrap();
    sim.write("sys/kernel/iommu_groups/3/reserved_regions", "0x7d800000 0x7f7fffff direct\n").unwrap();
    let other = "0000:00:14.3";
    sim.add(&SimFunction::new(address(other), 0x8086, 0xa370, 0x02_8000).no_group()).unwrap();
    let mut found = fixes(&sim, on_board, &[BlockerCode::FirmwareMemory]);
    found.extend(fixes(&sim, other, &[BlockerCode::NoIommu]));
    for fix in found {
        assert!(fix.contains("pass another device") && !fix.contains("slot"), "{fix}");
    }
}

#[test]
fn a_serial_console_is_a_use_by_the_host() {
    let card = "0000:05:00.0";
    for named_by in ["active", "cmdline"] {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::new(address(card), 0x13a8, 0x0352, 0x07_0002).group(5).driver("exar_serial"))
            .unwrap();
        // Since Linux 6.5 two devices of the serial core are between them.
        sim.add_child(address(card), "tty", "0000:05:00.0:0/0000:05:00.0:0.0/tty/ttyS4", &[]).unwrap();
        assert!(report(&sim, card).is_ready());
        match named_by {
            "active" => sim.write("sys/class/tty/console/active", "tty0 ttyS4\n").unwrap(),
            _ => sim.write("proc/cmdline", "root=/dev/sda1 console=tty0 console=ttyS4,115200n8\n").unwrap(),
        }
        let readiness = report(&sim, card);
        let found = readiness.first_blocker().unwrap();
        assert_eq!((found.code, found.code.is_host_use()), (BlockerCode::BootDisplay, true), "{readiness}");
        assert!(found.evidence.contains("ttyS4") && found.evidence.contains(named_by), "{readiness}");
        assert!(found.remedy.contains("without console=ttyS4"), "{readiness}");
    }
}

#[test]
fn consoles_are_reported_once_each() {
    let card = "0000:05:00.0";
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::new(address(card), 0x13a8, 0x0352, 0x07_0002).group(5)).unwrap();
    for tty in ["ttyS4", "ttyS5"] {
        sim.add_child(address(card), "tty", &format!("tty/{tty}"), &[]).unwrap();
    }
    sim.write("sys/class/tty/console/active", "tty0 ttyS4\n").unwrap();
    sim.write("proc/cmdline", "console=tty0 console=ttyS4,115200n8 console=ttyS5 console=../tty/ttyS5\n")
        .unwrap();
    let readiness = report(&sim, card);
    let [first, second] = &readiness.blockers[..] else { panic!("{readiness}") };
    assert!(first.evidence.contains("ttyS4") && first.evidence.contains("active"), "{readiness}");
    assert!(second.evidence.contains("ttyS5") && second.evidence.contains("cmdline"), "{readiness}");
}

#[test]
fn a_fix_has_no_placeholder_where_the_framebuffers_device_is_not_known() {
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::gpu(address("01:00.0")).group(1).driver("vfio-pci")).unwrap();
    sim.write("proc/iomem", "81000000-81ffffff : 0000:01:00.0\n  81000000-812fffff : simpledrm\n").unwrap();
    let [fix] = &fixes(&sim, "01:00.0", &[BlockerCode::BootDisplay])[..] else { panic!("one") };
    assert!(!fix.contains("NAME") && !fix.contains("echo"), "{fix}");
    assert!(fix.contains("find the one that has a device: simple-framebuffer, "), "{fix}");
    assert!(fix.contains("/sys/bus/platform/drivers"), "{fix}");
}

/// mgag200 names its resource `mgadrmfb_vram`.
#[test]
fn a_drivers_own_display_is_not_the_firmwares_framebuffer() {
    let iomem = "81000000-81ffffff : 0000:01:00.0\n  81000000-81ffffff : mgadrmfb_vram\n";
    let native = |has_display: bool| {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::gpu(address("01:00.0")).group(1).driver("mgag200")).unwrap();
        sim.write("proc/iomem", iomem).unwrap();
        if has_display {
            sim.add_child(address("01:00.0"), "drm", "drm/card0", &[]).unwrap();
        }
        sim
    };
    let is_blocked = |sim: &SimHost| {
        report(sim, "01:00.0").blockers.iter().any(|found| found.code == BlockerCode::BootDisplay)
    };
    assert!(!is_blocked(&native(true)));
    // A driver without a display has left the firmware's where it is.
    assert!(is_blocked(&native(false)));
    // So has one beside whose display the firmware's is there.
    let both = native(true);
    let device = "sys/devices/platform/efi-framebuffer.0";
    both.write(&format!("{device}/graphics/fb0/dev"), "29:0\n").unwrap();
    both.link("sys/class/graphics/fb0", &format!("{device}/graphics/fb0")).unwrap();
    both.write("sys/bus/platform/drivers/efi-framebuffer/unbind", "").unwrap();
    both.link("sys/bus/platform/devices/efi-framebuffer.0", device).unwrap();
    both.link(&format!("{device}/driver"), "sys/bus/platform/drivers/efi-framebuffer").unwrap();
    assert!(is_blocked(&both));
    // The firmware's display on another card is not this card's.
    let other = native(true);
    other.add(&SimFunction::gpu(address("02:00.0")).group(2)).unwrap();
    other.add_child(address("02:00.0"), "graphics", "efi-framebuffer.0/graphics/fb0", &[]).unwrap();
    let device = "sys/bus/pci/devices/0000:02:00.0/efi-framebuffer.0";
    other.write("sys/bus/platform/drivers/efi-framebuffer/unbind", "").unwrap();
    other.link("sys/bus/platform/devices/efi-framebuffer.0", device).unwrap();
    other.link(&format!("{device}/driver"), "sys/bus/platform/drivers/efi-framebuffer").unwrap();
    assert!(!is_blocked(&other));
}

#[derive(Debug)]
struct ReadOnly;

impl SysfsWriter for ReadOnly {
    fn write(&self, _: &Path, _: &str, _: Duration) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

#[test]
fn paths_of_a_tree_are_translated_once() {
    let check = |root: &str, text: &str, expect: &str| {
        let host = Host::at(root.as_ref(), std::sync::Arc::new(ReadOnly));
        assert_eq!(host.with_host_paths(text.into()), expect, "{root}");
    };
    check("/", "see /run/udev/data and /run/ledger", "see /run/udev/data and /run/vm-passthrough/ledger");
    check("/t", "/t/sys/a, /t/run/udev/b; /t/run/c", "/sys/a, /run/udev/b; /run/vm-passthrough/c");
    // A directory that is called as one of the host's.
    check("/sys", "/sys/sys/dev/block", "/sys/dev/block");
}
