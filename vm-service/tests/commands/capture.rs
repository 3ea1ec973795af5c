//! What the script `capture` takes from a host answers as the host does.

use std::path::Path;
use std::process::Command;

use vm_passthrough::pci::BarKind;
use vm_passthrough::sim::{SimFunction, SimHost};

use super::host::{address, workstation};
use super::vm_service;

/// A device's serial number.
const SERIAL: [u8; 8] = *b"\x01\x52\x54\xff\xfe\x00\x12\x34";

/// A host with something to say of each kind: a group that is not viable, a disk in use, a route, virtual functions.
fn busy() -> SimHost {
    let sim = workstation();
    let add = |function: SimFunction| drop(sim.add(&function).expect("a function"));
    sim.add_driver("e1000e").expect("a driver");
    add(SimFunction::network(address("0000:04:00.0"))
        .group(14)
        .driver("e1000e")
        .bar(0, BarKind::Memory32, false, 0, 4096)
        .extended_capability(3, 1, &SERIAL));
    add(SimFunction::nvme(address("0000:05:00.0")).group(20).sriov(8).power_state("D3cold"));
    add(SimFunction::nvme(address("0000:05:00.1")).group(21).virtual_of(address("0000:05:00.0")));
    sim.add_child(address("0000:02:00.0"), "block", "block/nvme0n1", &[]).expect("a disk");
    sim.add_child(address("0000:03:00.0"), "net", "net/eth0", &[]).expect("an interface");
    let write = |path: &str, text: &str| sim.write(path, text).expect("written");
    write("proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n1 partition 1 0 -2\n");
    write(
        "proc/net/route",
        "Iface Destination\neth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n",
    );
    write("proc/meminfo", "MemTotal: 524288 kB\nMemAvailable: 524288 kB\n");
    write("sys/kernel/iommu_groups/13/reserved_regions", "0x0000000020000000 0x00000000200fffff reserved\n");
    sim
}

#[test]
fn a_captured_host_answers_as_the_host() {
    let sim = busy();
    let folder = tempfile::tempdir().expect("a folder");
    let (tar, copy) = (folder.path().join("host.tar"), folder.path().join("host"));
    let capture = concat!(env!("CARGO_MANIFEST_DIR"), "/capture");
    let ended = Command::new(capture).arg(&tar).env("ROOT", sim.root()).status().expect("a shell");
    assert!(ended.success(), "{ended}");
    std::fs::create_dir(&copy).expect("a folder");
    let ended = Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(&copy).status().expect("tar");
    assert!(ended.success(), "{ended}");
    let config =
        |root: &Path| std::fs::read(root.join("sys/bus/pci/devices/0000:04:00.0/config")).expect("config");
    let (whole, taken) = (config(sim.root()), config(&copy));
    let serial = whole.windows(SERIAL.len()).position(|bytes| bytes == SERIAL).expect("a serial number");
    let blanked = [&whole[..serial], &[0; 8], &whole[serial + 8..]].concat();
    assert!(taken == blanked, "all but the serial number is there");
    let mut commands = vec!["list --all".to_owned(), "list --json --all".to_owned()];
    for address in ["01:00.0", "02:00.0", "03:00.0", "04:00.0", "05:00.0", "05:00.1", "00:01.0"] {
        commands.extend([
            format!("explain {address}"),
            format!("explain {address} --with-group"),
            format!("info {address}"),
        ]);
    }
    for command in commands {
        let here = vm_service(&sim.plain_host(), &command);
        let there = vm_service(&sim.plain_host(), &format!("{command} --root {}", copy.display()));
        let named = |text: &str| text.replace(&sim.root().display().to_string(), &copy.display().to_string());
        assert_eq!((there.exit, &there.out), (here.exit, &named(&here.out)), "{command}: {}", there.err);
    }
}

#[test]
fn what_is_no_file_is_answered_with_the_usage() {
    for args in [&[][..], &["--help"], &["-x.tar"], &[""], &["a", "b"]] {
        let folder = tempfile::tempdir().expect("a folder");
        let capture = concat!(env!("CARGO_MANIFEST_DIR"), "/capture");
        let ended = Command::new(capture).args(args).current_dir(&folder).output().expect("a shell");
        assert_eq!(ended.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&ended.stderr).contains("capture host.tar"), "{args:?}: {ended:?}");
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 0, "{args:?}");
    }
}

/// It runs as root, and others may write to the directory that is named, as to /tmp.
#[test]
fn an_output_that_is_a_link_is_not_followed_and_others_do_not_read_it() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    let sim = busy();
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let capture = |name: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 0; exec \"$@\"", "sh", concat!(env!("CARGO_MANIFEST_DIR"), "/capture")]);
        command.arg(path(name)).env("ROOT", sim.root()).output().expect("a shell")
    };
    std::fs::write(path("precious"), "precious").expect("written");
    symlink(path("precious"), path("link.tar")).expect("a link");
    symlink(path("none"), path("dangling.tar")).expect("a link");
    std::fs::create_dir(path("folder.tar")).expect("a folder");
    for name in ["link.tar", "dangling.tar", "folder.tar"] {
        let ended = capture(name);
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains("it is no regular file; "), "{name}: {said}");
    }
    assert_eq!(std::fs::read(path("precious")).expect("the file"), b"precious");
    assert!(!path("none").exists());
    for _ in 0..2 {
        assert!(capture("host.tar").status.success());
        assert_eq!(path("host.tar").metadata().expect("a file").permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(folder.path().read_dir().expect("a folder").count(), 5, "nothing else is left");
}
