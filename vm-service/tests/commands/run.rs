//! `run`, as far as it goes without KVM.

use std::path::PathBuf;

use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::host::{address, workstation};
use super::{check_error, vm_service};

/// Writes a guest file beside its kernel, and returns its path.
fn guest(sim: &SimHost, more: &str) -> PathBuf {
    let path = sim.path("guest.toml");
    std::fs::write(sim.path("kernel"), "not one").expect("written");
    let text = format!("name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"kernel\"\n{more}");
    std::fs::write(&path, text).expect("written");
    path
}

#[test]
fn tells_mistakes_in_the_guest_file() {
    let sim = workstation();
    let file = guest(&sim, "vcpus = 0\n");
    let message = format!(
        "{}:4:9: `vcpus` is 0; write a number from 1 to 255\n  4 | vcpus = 0\n    |         ^",
        file.display()
    );
    check_error(&sim.plain_host(), &format!("run {}", file.display()), 2, &message);
}

#[test]
fn tells_that_a_file_of_the_guest_is_missing() {
    let sim = workstation();
    let file = guest(&sim, "[[disks]]\npath = \"absent.raw\"\n");
    let message = format!(
        "{}: `disks[0].path` names {}: No such file or directory (os error 2); correct the path; relative paths \
         start at the guest file's directory",
        file.display(),
        sim.path("absent.raw").display()
    );
    check_error(&sim.plain_host(), &format!("run {}", file.display()), 2, &message);
}

#[test]
fn tells_that_there_are_too_many_devices() {
    let sim = workstation();
    let file = guest(&sim, "");
    let devices: String = (0..17).map(|i| format!(" --device {i:02x}:00.0")).collect();
    check_error(
        &sim.plain_host(),
        &format!("run {}{devices}", file.display()),
        2,
        "the guest a would get 17 devices; a guest has at most 16",
    );
}

#[test]
fn tells_every_blocker_of_every_device_and_touches_nothing() {
    let sim = workstation();
    // The disk's group gets a stranger, and the network card has no IOMMU.
    sim.add_driver("e1000e").expect("a driver");
    let stranger = SimFunction::network(address("0000:04:00.0")).group(14).driver("e1000e");
    sim.add(&stranger).expect("a function");
    sim.add(&SimFunction::network(address("0000:05:00.0")).no_group()).expect("a function");
    let drivers = SimDrivers::new(&sim);
    let file = guest(&sim, "[[devices]]\naddress = \"02:00.0\"\n");
    let got = vm_service(&drivers.host(), &format!("run {} --device 05:00.0", file.display()));
    assert_eq!((got.exit, got.out.as_str()), (3, ""), "{}", got.err);
    for part in ["0000:02:00.0", "group-not-viable", "e1000e", "0000:05:00.0", "no-iommu"] {
        assert!(got.err.contains(part), "{part} is not in: {}", got.err);
    }
    assert_eq!(drivers.writes(), []);
}

#[test]
fn leaves_the_devices_alone_when_the_machine_cant_be_made() {
    let sim = workstation();
    let drivers = SimDrivers::new(&sim);
    let file = guest(&sim, "[[devices]]\naddress = \"02:00.0\"\n");
    let got = vm_service(&drivers.host(), &format!("run {} --console none", file.display()));
    assert_eq!((got.exit, got.out.as_str()), (1, ""), "{}", got.err);
    let kvm = sim.path("dev/kvm").display().to_string();
    assert!(got.err.contains(&format!("{kvm} can't be opened")), "{}", got.err);
    assert_eq!(drivers.writes(), []);
}

#[test]
fn a_gpu_that_is_claimed_is_not_shared_and_one_that_is_not_there_neither() {
    let sim = workstation();
    let drivers = SimDrivers::new(&sim);
    let host = drivers.host();
    let share = |device: &str| {
        let more = format!("[[accelerators]]\ndevice = \"{device}\"\nmemory = \"64M\"\n");
        vm_service(&host, &format!("run {} --console none", guest(&sim, &more).display()))
    };
    let got = share("09:00.0");
    assert_eq!((got.exit, got.err.contains("0000:09:00.0")), (1, true), "{}", got.err);
    assert_eq!(vm_service(&host, "claim 01:00.0").exit, 0);
    let got = share("01:00.0");
    assert_eq!(got.exit, 1);
    assert!(got.err.contains("0000:01:00.0") && got.err.contains("claimed"), "{}", got.err);
    assert_eq!(vm_service(&host, "release 01:00.0").exit, 0);
    // It then comes as far as the machine, which the simulated host has no KVM for.
    let got = share("01:00.0");
    assert!(got.err.contains("can't be opened"), "{}", got.err);
}
