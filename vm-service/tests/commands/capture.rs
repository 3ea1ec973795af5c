//! What the script `capture` takes from a host answers as the host does.

use std::path::{Path, PathBuf};
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

/// The tree that `capture` takes of a host.
fn capture(sim: &SimHost, folder: &Path) -> PathBuf {
    let (tar, copy) = (folder.join("host.tar"), folder.join("host"));
    let capture = concat!(env!("CARGO_MANIFEST_DIR"), "/capture");
    let ended = Command::new(capture).arg(&tar).env("ROOT", sim.root()).status().expect("a shell");
    assert!(ended.success(), "{ended}");
    std::fs::create_dir(&copy).expect("a folder");
    let ended = Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(&copy).status().expect("tar");
    assert!(ended.success(), "{ended}");
    copy
}

/// Asserts that a captured host answers as the host itself: for all of its functions, also `egpu` and `commands`.
#[track_caller]
pub(super) fn answers_alike(sim: &SimHost, commands: &[String]) {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = capture(sim, folder.path());
    let listed = vm_service(&sim.plain_host(), "list --json --all").out;
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let mut all = vec!["list --all".to_owned(), "list --json --all".to_owned(), "egpu info".to_owned()];
    for function in listed["functions"].as_array().expect("functions") {
        let address = function["address"].as_str().expect("an address");
        all.extend([format!("explain {address}"), format!("explain {address} --with-group")]);
        all.push(format!("info {address}"));
    }
    all.extend_from_slice(commands);
    for command in all {
        let here = vm_service(&sim.plain_host(), &command);
        // `egpu` has the option before its own commands.
        let at = if command.starts_with("egpu ") { "egpu".len() } else { command.len() };
        let (before, after) = command.split_at(at);
        let there = vm_service(&sim.plain_host(), &format!("{before} --root {}{after}", copy.display()));
        let named = |text: &str| text.replace(&sim.root().display().to_string(), &copy.display().to_string());
        assert_eq!((there.exit, &there.out), (here.exit, &named(&here.out)), "{command}: {}", there.err);
    }
}

#[test]
fn a_captured_host_answers_as_the_host() {
    let sim = busy();
    answers_alike(&sim, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let copy = capture(&sim, folder.path());
    let config =
        |root: &Path| std::fs::read(root.join("sys/bus/pci/devices/0000:04:00.0/config")).expect("config");
    let (whole, taken) = (config(sim.root()), config(&copy));
    let serial = whole.windows(SERIAL.len()).position(|bytes| bytes == SERIAL).expect("a serial number");
    let blanked = [&whole[..serial], &[0; 8], &whole[serial + 8..]].concat();
    assert!(taken == blanked, "all but the serial number is there");
}

/// With an enclosure whose tunnel is built, and each kind of device that `--sim` has.
#[test]
fn a_captured_example_host_answers_as_the_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("sim");
    let sim = SimHost::open(&dir).expect("a simulated host");
    answers_alike(&sim, &[]);
    let host = vm_passthrough::Host::system();
    let connected = vm_service(&host, &format!("egpu connect --sim {}", dir.display()));
    assert_eq!(connected.exit, 0, "{}", connected.err);
    let explained = vm_service(&sim.plain_host(), "explain 0000:32:00.0").out;
    assert!(explained.contains("tunnelled"), "{explained}");
    answers_alike(&sim, &["egpu diag".to_owned()]);
}

/// A card that shares its interrupt line, a vGPU, a MIG instance, errors of the link, exported disks, what limits memory, a platform device in a group,
/// and the driver of the firmware's framebuffer below a GPU.
#[test]
fn what_only_some_hosts_have_is_captured() {
    let sim = workstation();
    let write = |path: &str, text: &str| sim.write(path, text).expect("written");
    let card = SimFunction::new(address("0000:07:00.0"), 0x1131, 0x7146, 0x04_8000).group(30);
    let card = card.bar(0, BarKind::Memory32, false, 0x9000_0000, 512);
    let mut config = card.config_space();
    // Interrupt Pin: INTA.
    config[0x3d] = 1;
    sim.add(&card.config(config)).expect("a function");
    sim.set(address("0000:07:00.0"), "irq", "17\n").expect("an attribute");
    write("proc/interrupts", "  CPU0\n 17: 5 IR-IO-APIC 17-fasteoi uhci_hcd, snd_hda_intel\n");
    let gpu = "sys/bus/pci/devices/0000:01:00.0";
    write("proc/driver/nvidia/gpus/0000:01:00.0/information", "GPU UUID: GPU-1\nDevice Minor: \t 0\n");
    write("proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access", "DeviceFileMinor: 3\n");
    write(&format!("{gpu}/nvidia/creatable_vgpu_types"), "1414 : NVIDIA H200X-1-18C\n");
    write(&format!("{gpu}/aer_dev_correctable"), "RxErr 3\nTOTAL_ERR_COR 3\n");
    write(&format!("{gpu}/aer_dev_nonfatal"), "TOTAL_ERR_NONFATAL 0\n");
    write(&format!("{gpu}/aer_dev_fatal"), "TOTAL_ERR_FATAL 0\n");
    let (uart, driver) = ("sys/devices/platform/AMDI0020:00", "sys/bus/platform/drivers/dw-apb-uart");
    write(&format!("{uart}/uevent"), "");
    write(&format!("{driver}/unbind"), "");
    sim.link(&format!("{uart}/driver"), driver).expect("a link");
    sim.link("sys/kernel/iommu_groups/30/devices/AMDI0020:00", uart).expect("a link");
    let framebuffer = "sys/bus/platform/drivers/efi-framebuffer";
    write(&format!("{framebuffer}/unbind"), "");
    write(&format!("{gpu}/efi-framebuffer.0/uevent"), "");
    sim.link(&format!("{gpu}/efi-framebuffer.0/driver"), framebuffer).expect("a link");
    write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "64\n");
    write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n");
    write("proc/self/cgroup", "0::/a/b\n");
    write("sys/fs/cgroup/a/memory.max", "65536\n");
    write("proc/cmdline", "root=/dev/vda iommu=pt\n");
    write("lib/modules/6.12.0/modules.alias", "alias vfio_pci:v0000144Dd*sv*sd*bc*sc*i* nvme_vfio_pci\n");
    for (table, text) in [("DMAR", "D"), ("IVRS", "I"), ("IORT", "O")] {
        write(&format!("sys/firmware/acpi/tables/{table}"), &text.repeat(200));
    }
    let log = "4,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n6,2,3,-;usb 1-1: SerialNumber: 1234\n\
               12,3,4,-;login: Xid\n4,4,5,-;DMAR: [DMA Read] fault\n";
    write("dev/kmsg", log);
    let guest = sim.path("guest.toml");
    let text = "name = \"a\"\nmemory = \"64M\"\nhugepages = \"2M\"\nboot.kernel = \"k\"\n[[devices]]\naddress = \"02:00.0\"\n";
    std::fs::write(&guest, text).expect("written");
    let explain = format!("explain --guest {}", guest.display());
    let explained = vm_service(&sim.plain_host(), &explain).out;
    assert!(explained.contains("huge-pages-too-few"), "{explained}");
    let explained = vm_service(&sim.plain_host(), "explain 07:00.0").out;
    assert!(explained.contains("legacy-interrupt"), "{explained}");
    assert!(explained.contains("dw-apb-uart"), "{explained}");
    answers_alike(&sim, &[explain]);
    let folder = tempfile::tempdir().expect("a folder");
    let copy = capture(&sim, folder.path());
    let read = |path: &str| std::fs::read_to_string(copy.join(path)).expect(path);
    let target = std::fs::read_link(copy.join(gpu).join("efi-framebuffer.0/driver")).expect("a link");
    assert!(target.ends_with("efi-framebuffer"), "{}", target.display());
    assert_eq!(read("proc/cmdline"), "root=/dev/vda iommu=pt\n");
    assert_eq!(read("sys/firmware/acpi/tables/DMAR"), "D".repeat(200));
    assert_eq!(read("sys/firmware/acpi/tables/IVRS"), "I".repeat(200));
    assert_eq!(read("sys/firmware/acpi/tables/IORT"), "O".repeat(200));
    assert_eq!(read("proc/driver/nvidia/gpus/0000:01:00.0/information"), "Device Minor: \t 0\n", "no UUID");
    let kept: Vec<_> = log.lines().filter(|line| line.contains("NVRM") || line.contains("DMAR")).collect();
    assert_eq!(read("dev/kmsg").lines().collect::<Vec<_>>(), kept);
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

/// A user chooses the name of a file that he holds open. Each line of this one once was a link of the copy that root made, and
/// through which root then wrote.
#[test]
fn names_of_open_files_do_not_make_the_script_write_outside_its_output() {
    use std::os::unix::fs::symlink;

    let sim = workstation();
    let folder = tempfile::tempdir().expect("a folder");
    let victim = folder.path().join("victim");
    std::fs::create_dir(&victim).expect("a folder");
    std::fs::write(victim.join("passwd"), "precious").expect("written");
    let outside = victim.display();
    sim.write("proc/4242/comm", "/tmp/x.so\n").expect("written");
    sim.write("proc/77/comm", "tool\n").expect("written");
    let open = |pid: u32, descriptor: u32, target: String| {
        let dir = sim.path(&format!("proc/{pid}/fd"));
        std::fs::create_dir_all(&dir).expect("a folder");
        symlink(target, dir.join(descriptor.to_string())).expect("a link");
    };
    let dev = sim.path("dev").display().to_string();
    let lines = format!(
        "\nproc/4242/comm\t{outside}/ld.so.preload\nproc/4242/fd/5\t{outside}\nproc/4242/fd/5/passwd\t/home/user/passwd"
    );
    for (descriptor, name) in [(3, "shm/x"), (4, "dri/card0")] {
        open(4242, descriptor, format!("{dev}/{name}{lines}"));
    }
    open(77, 3, format!("{dev}/shm/../../../{outside}"));
    open(77, 4, format!("{dev}/with space"));
    let copy = capture(&sim, folder.path());
    let names = victim.read_dir().expect("a folder").map(|entry| entry.expect("an entry").file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["passwd"]);
    assert_eq!(std::fs::read_link(victim.join("passwd")).ok(), None);
    assert!(!copy.join("proc/4242").exists(), "names with control characters are left out");
    assert!(copy.join("proc/77/fd/3").symlink_metadata().is_err(), "names with `..` are left out");
    let other = std::fs::read_link(copy.join("proc/77/fd/4")).expect("a link");
    assert_eq!(other, Path::new("/dev/with space"));
}

/// Processes that have devices open, a claim of a guest that runs, and kernels on a shared GPU.
#[test]
fn who_holds_devices_is_captured() {
    use std::os::unix::fs::symlink;
    use vm_passthrough::PassthroughManager;
    use vm_passthrough::claim::ClaimOptions;
    use vm_passthrough::sim::SimDrivers;

    let sim = workstation();
    let gpu = "sys/bus/pci/devices/0000:01:00.0";
    let write = |path: &str, text: &str| sim.write(path, text).expect("written");
    write(&format!("{gpu}/drm/card0/dev"), "226:0\n");
    write(&format!("{gpu}/drm/card0/uevent"), "DEVNAME=dri/card0\n");
    write("dev/dri/card0", "");
    let open = |pid: u32, command: &str, descriptor: u32, target: PathBuf| {
        let dir = sim.path(&format!("proc/{pid}/fd"));
        std::fs::create_dir_all(&dir).expect("a folder");
        symlink(target, dir.join(descriptor.to_string())).expect("a link");
        write(&format!("proc/{pid}/comm"), &format!("{command}\n"));
    };
    open(4242, "Xorg", 7, sim.path("dev/dri/card0"));
    open(4242, "Xorg", 8, sim.path("dev/null"));
    let directory = |text: &str| sim.device_dir(address(text)).expect("a function");
    open(77, "tool", 3, directory("0000:01:00.0").join("resource1"));
    open(88, "editor", 3, PathBuf::from("/home/user/secret.txt"));

    let id = std::process::id();
    write(&format!("proc/{id}/comm"), "vm-service\n");
    write(&format!("proc/{id}/stat"), &format!("{id} (vm-service) S{} 77 0", " 0".repeat(18)));
    write("proc/self/comm", "vm-service\n");
    let drivers = SimDrivers::new(&sim);
    let mut manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    let claimed = manager.claim(address("0000:03:00.0"), &ClaimOptions::default()).expect("a claim");
    let lease = manager.share(address("0000:02:00.0")).expect("a lease");

    let folder = tempfile::tempdir().expect("a folder");
    let copy = capture(&sim, folder.path());
    let explain = |address: &str, root: &Path| {
        // Another process asks: this one has the claim itself.
        let program = env!("CARGO_BIN_EXE_vm-service");
        let mut command = Command::new(program);
        let ended = command.args(["explain", address, "--root"]).arg(root).output().expect("the program");
        String::from_utf8(ended.stdout).expect("text").replace(&root.display().to_string(), "ROOT")
    };
    for (address, expect) in [
        (
            "0000:01:00.0",
            vec!["process 4242 (Xorg) has /dev/dri/card0 open", "process 77 (tool) has", "resource1 open"],
        ),
        ("0000:02:00.0", vec!["in-use-shared", "(vm-service)"]),
        ("0000:03:00.0", vec!["blocker claimed", "(vm-service) has it"]),
    ] {
        let there = explain(address, &copy);
        for part in expect {
            assert!(there.contains(part), "no `{part}` in {there}");
        }
        assert_eq!(there, explain(address, sim.root()), "{address}");
    }
    assert!(!copy.join("proc/88").exists(), "what has no device open is left out");
    assert!(!copy.join("proc/4242/fd/8").exists());
    drop(lease);
    manager.release(&claimed).expect("released");
}
