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

/// A passed device pins all of it, so that more than the host has can't be.
#[test]
fn refuses_more_memory_than_the_host_has_for_a_guest_with_devices() {
    let sim = workstation();
    sim.write("proc/meminfo", "MemTotal: 24117248 kB\nMemAvailable: 24117248 kB\n").expect("written");
    let drivers = SimDrivers::new(&sim);
    let file = guest(&sim, "[[devices]]\naddress = \"02:00.0\"\n");
    let text = std::fs::read_to_string(&file).expect("text").replace("64M", "900G");
    std::fs::write(&file, text).expect("written");
    for command in ["run", "explain --guest"] {
        let got = vm_service(&drivers.host(), &format!("{command} {}", file.display()));
        let told = got.out + &got.err;
        assert_eq!(got.exit, 3, "{told}");
        for part in ["host-memory-too-low", "900 GiB of RAM", "gives 23 GiB in all", "less memory"] {
            assert!(told.contains(part), "{part} is not in: {told}");
        }
    }
    assert_eq!(drivers.writes(), []);
}

#[test]
fn memory_on_the_command_line_goes_before_the_file() {
    let sim = workstation();
    sim.set_memlock(Some(128 << 20)).expect("written");
    sim.set_credentials(1000, 0, 0).expect("written");
    let drivers = SimDrivers::new(&sim);
    let file = guest(&sim, "[[devices]]\naddress = \"02:00.0\"\n");
    for (memory, expect) in [("64M", false), ("256M", true)] {
        let got =
            vm_service(&drivers.host(), &format!("run {} --console none --memory {memory}", file.display()));
        assert_eq!(got.err.contains("memlock-too-low"), expect, "{memory}: {}", got.err);
    }
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

/// The beginning of a bzImage whose setup header speaks of `kernel` bytes, and of `packed` that are packed in it.
fn bzimage(kernel: u32, packed: u32) -> Vec<u8> {
    let mut file = vec![0; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[7]);
    put(0x1f4, &(kernel / 16).to_le_bytes());
    put(0x202, b"HdrS");
    put(0x206, &0x20fu16.to_le_bytes());
    put(0x211, &[1]);
    put(0x236, &1u16.to_le_bytes());
    put(0x24c, &packed.to_le_bytes());
    file
}

#[test]
fn a_kernel_that_is_none_or_was_cut_off_is_told_before_a_device_is_touched() {
    if !std::path::Path::new("/dev/kvm").exists() {
        println!("skipped: there is no /dev/kvm");
        return;
    }
    let sim = workstation();
    std::os::unix::fs::symlink("/dev/kvm", sim.path("dev/kvm")).expect("a link");
    let drivers = SimDrivers::new(&sim);
    let file = guest(&sim, "[[devices]]\naddress = \"02:00.0\"\n");
    let check = |kernel: &[u8], expect: &str| {
        std::fs::write(sim.path("kernel"), kernel).expect("written");
        let got = vm_service(&drivers.host(), &format!("run {} --console none", file.display()));
        assert_eq!((got.exit, got.out.as_str()), (2, ""), "{}", got.err);
        assert!(got.err.contains("kernel is not") && got.err.contains(expect), "{}", got.err);
        assert_eq!(drivers.writes(), []);
    };
    check(&[0; 0x1000], "neither the ELF magic number");
    check(b"", "neither the ELF magic number");
    check(&bzimage(0x10, 0), "it was cut off: by its setup header it has 4112 bytes, and 4096 are there");
    check(&bzimage(0, 1), "it was cut off");
    check(&bzimage(u32::MAX, u32::MAX), "it was cut off");
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
