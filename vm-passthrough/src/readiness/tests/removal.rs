//! Fixes take nothing from the host that it uses.

use super::*;

/// Uses of the function [`NEIGHBOUR`] by the host.
const USES: [&str; 5] = ["root disk", "default route", "console", "shared", "nothing"];

const NEIGHBOUR: &str = "0000:02:00.0";

fn use_it(scene: &Scene, function: &str, what: &str) {
    let sim = &scene.sim;
    match what {
        "root disk" => {
            sim.add_child(address(function), "block", "nvme/nvme0/nvme0n1", &[("dev", "259:0\n")]).unwrap();
            sim.write("proc/self/mountinfo", "29 1 259:0 / / rw,relatime - ext4 /dev/nvme0n1 rw\n").unwrap();
        }
        "default route" => {
            sim.add_child(address(function), "net", "net/eth0", &[]).unwrap();
            let route = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
            sim.write("proc/net/route", &format!("Iface Destination\n{route}")).unwrap();
        }
        "console" => {
            let uevent = "DRIVER=e1000e\nPCI_CLASS=30000\nPCI_ID=8086:10D3\nPCI_SUBSYS_ID=0000:0000\n";
            sim.set(address(function), "uevent", uevent).unwrap();
            sim.set(address(function), "class", "0x030000\n").unwrap();
            sim.set(address(function), "boot_vga", "1\n").unwrap();
        }
        "shared" => {
            std::fs::create_dir_all(sim.path("proc/4242/fd")).unwrap();
            sim.write("proc/4242/comm", "reader\n").unwrap();
            let file = sim.device_dir(address(function)).unwrap().join("resource0");
            std::os::unix::fs::symlink(file, sim.path("proc/4242/fd/3")).unwrap();
        }
        _ => {}
    }
}

/// Whether a fix of the report takes `function` from the host.
fn takes(readiness: &Readiness, function: &str) -> bool {
    let ways = ["/unbind", "--with-group", "same guest", "/remove", "numvfs", "pass "];
    let takes = |fix: &str| {
        // A reason to leave a function alone names it too.
        fix.contains("--with-group") || fix.contains(function) && !fix.contains("must stay with the host")
    };
    readiness
        .blockers
        .iter()
        .any(|found| ways.iter().any(|way| found.remedy.contains(way)) && takes(&found.remedy))
}

/// In each arrangement, a fix names another function only if the host does not use that function.
#[test]
fn a_fix_spares_what_the_host_uses() {
    let card = || {
        SimFunction::network(address(NEIGHBOUR)).driver("e1000e").bar(
            0,
            BarKind::Memory32,
            false,
            0x9000_0000,
            4096,
        )
    };
    let port = || SimFunction::root_port(address("0000:00:02.0"));
    // Each is a host, and the function that is explained.
    type Arrange<'a> = (&'a str, &'a dyn Fn(&Scene));
    let arrangements: [Arrange<'_>; 3] = [
        ("a shared group", &|scene| {
            scene.sim.add(&port().group(9)).unwrap();
            scene.sim.add(&card().group(1).below(address("0000:00:02.0"))).unwrap();
        }),
        ("a port without ACS", &|scene| {
            scene.sim.remove(address(DISK)).unwrap();
            scene.sim.remove(address(PORT)).unwrap();
            scene.sim.add(&SimFunction::root_port(address(PORT)).no_extended_capabilities()).unwrap();
            scene.sim.add(&Scene::disk()).unwrap();
            scene.sim.add(&card().group(1)).unwrap();
        }),
        ("a virtual function", &|scene| {
            scene.sim.remove(address(DISK)).unwrap();
            scene.sim.add(&Scene::disk().sriov(4)).unwrap();
            scene.sim.add(&card().virtual_of(address(DISK)).group(9)).unwrap();
        }),
    ];
    for (arrangement, arrange) in arrangements {
        for what in USES {
            let scene = Scene::new();
            arrange(&scene);
            use_it(&scene, NEIGHBOUR, what);
            let readiness = scene.explain();
            let named = takes(&readiness, NEIGHBOUR)
                || readiness
                    .blockers
                    .iter()
                    .any(|found| found.code == Code::VfsInUse && found.remedy.contains("echo 0 > "));
            assert_eq!(named, what == "nothing", "{arrangement}, {what}: {readiness}");
            let reason = readiness
                .blockers
                .iter()
                .any(|found| found.remedy.contains(&format!("{NEIGHBOUR} must stay with the host (")));
            assert_eq!(reason, what != "nothing", "{arrangement}, {what}: {readiness}");
        }
    }
    // A bus reset, and `explain` of a bridge.
    let beside = "0000:01:03.0";
    for what in ["root disk", "default route", "nothing"] {
        let scene = Scene::with(Scene::disk().resets(""));
        scene
            .sim
            .add(&SimFunction::nvme(address(beside)).group(9).driver("nvme").below(address(PORT)))
            .unwrap();
        use_it(&scene, beside, what);
        assert_eq!(takes(&scene.explain(), beside), what == "nothing", "{what}: {}", scene.explain());
        let bridge = explain(&scene.sim.plain_host(), address(PORT), &scene.options).unwrap();
        assert_eq!(takes(&bridge, beside), what == "nothing", "{what}: {bridge}");
    }
    // A dead function is not removed while its disk is mounted.
    for what in ["root disk", "nothing"] {
        let scene = Scene::with(Scene::disk().config(vec![0xff; 4096]));
        use_it(&scene, DISK, what);
        assert_eq!(takes(&scene.explain(), "/remove"), what == "nothing", "{what}: {}", scene.explain());
    }
}

/// A GPU that shares its group with the boot disk: no fix names the disk.
#[test]
fn the_root_disk_in_the_group_stays() {
    let scene = Scene::without_disk();
    scene.sim.remove(address(PORT)).unwrap();
    for (port, function) in [
        (PORT, SimFunction::gpu(address(DISK)).driver("vfio-pci")),
        ("0000:00:02.0", SimFunction::nvme(address(NEIGHBOUR)).driver("nvme")),
    ] {
        let port = SimFunction::root_port(address(port)).no_extended_capabilities().group(0);
        scene.sim.add(&port).unwrap();
        scene.sim.add(&function.group(0).below(port.address())).unwrap();
    }
    let mut scene = scene.write("dev/vfio/0", "");
    use_it(&scene, NEIGHBOUR, "root disk");
    let readiness = scene.explain();
    let [viable, acs] = &readiness.blockers[..] else { panic!("{readiness}") };
    assert_eq!((viable.code, acs.code), (Code::GroupNotViable, Code::AcsMissing));
    for fix in [&viable.remedy, &acs.remedy] {
        for part in ["0000:02:00.0 must stay", "nvme0n1 is mounted on /", "enable ACS", "another root port"] {
            assert!(fix.contains(part), "no `{part}` in {readiness}");
        }
    }
    scene.options.with_group = true;
    scene.check(
        Code::MountedDisk,
        Blocks,
        &["nvme0n1 is mounted on /"],
        &["leave it with the host", "another"],
    );
}

/// A platform device that a disk is behind.
#[test]
fn a_platform_device_with_a_disk_stays() {
    let scene = Scene::new();
    let device = "sys/devices/platform/80860F14:00";
    scene.sim.link("sys/kernel/iommu_groups/1/devices/80860F14:00", device).unwrap();
    scene.sim.write("sys/bus/platform/drivers/sdhci-acpi/unbind", "").unwrap();
    scene.sim.write(&format!("{device}/mmc_host/mmc0/block/mmcblk0/dev"), "179:0\n").unwrap();
    scene.sim.link(&format!("{device}/driver"), "sys/bus/platform/drivers/sdhci-acpi").unwrap();
    scene.sim.link("sys/class/block/mmcblk0", &format!("{device}/mmc_host/mmc0/block/mmcblk0")).unwrap();
    let scene = scene.write("proc/self/mountinfo", "29 1 179:0 / /home rw - ext4 /dev/mmcblk0 rw\n");
    scene.check(
        Code::GroupNotViable,
        Blocks,
        &["sdhci-acpi"],
        &["80860F14:00 must stay", "mounted on /home"],
    );
    assert!(!scene.explain().blockers[0].remedy.contains("unbind"));
}

const VMD: &str = "0000:00:0e.0";
const BEHIND: [&str; 2] = ["10000:e1:00.0", "10000:e2:00.0"];

/// Two disks behind Intel's Volume Management Device.
fn vmd() -> SimHost {
    let sim = SimHost::new().unwrap();
    let raid = SimFunction::new(address(VMD), 0x8086, 0x467f, 0x01_0400).driver("vmd").group(9).resets("flr");
    sim.add(&raid).unwrap();
    for (port, disk) in ["10000:e0:06.0", "10000:e0:06.2"].into_iter().zip(BEHIND) {
        let port = SimFunction::root_port(address(port)).below(address(VMD)).group(9);
        sim.add(&port.driver("pcieport")).unwrap();
        let port = address(if disk == BEHIND[0] { "10000:e0:06.0" } else { "10000:e0:06.2" });
        sim.add(&SimFunction::nvme(address(disk)).below(port).driver("nvme").group(9)).unwrap();
    }
    sim
}

#[test]
fn disks_behind_vmd() {
    let explained = |sim: &SimHost, function: &str, with_group| {
        let options = ExplainOptions { with_group, ..ExplainOptions::default() };
        explain(&sim.plain_host(), address(function), &options).unwrap()
    };
    let sim = vmd();
    for with_group in [false, true] {
        let readiness = explained(&sim, BEHIND[1], with_group);
        let blocks: Vec<_> = readiness.blockers.iter().filter(|found| found.severity == Blocks).collect();
        let [found] = blocks[..] else { panic!("{readiness}") };
        assert_eq!(found.code, Code::GroupNotViable, "{readiness}");
        for part in ["can't be passed alone", "firmware setup", "VMD", "pass 0000:00:0e.0 with all"] {
            assert!(found.remedy.contains(part), "no `{part}` in {readiness}");
        }
        assert!(!readiness.functions.contains(&address(VMD)), "{readiness}");
    }
    // The controller itself is free, and takes its disks along.
    assert!(explained(&sim, VMD, false).is_ready(), "{}", explained(&sim, VMD, false));
    let drivers = crate::sim::SimDrivers::new(&sim);
    let mut manager = crate::PassthroughManager::with_host(drivers.host()).unwrap();
    let refused = manager.claim(address(BEHIND[1]), &ClaimOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("can't be passed alone"), "{refused}");
    manager.claim(address(VMD), &ClaimOptions::default()).unwrap();
    assert!(pci::scan(&drivers.host()).unwrap().iter().all(|function| function.address.domain() == 0));

    // The controller has the root disk.
    let sim = vmd();
    sim.add_child(address(BEHIND[0]), "block", "nvme/nvme0/nvme0n1", &[("dev", "259:0\n")]).unwrap();
    sim.write("proc/self/mountinfo", "29 1 259:0 / / rw,relatime - ext4 /dev/nvme0n1 rw\n").unwrap();
    let readiness = explained(&sim, BEHIND[1], false);
    let fix = &readiness.first_blocker().unwrap().remedy;
    assert!(fix.contains("do not pass the controller, as 0000:00:0e.0 must stay"), "{readiness}");
    assert!(!readiness.to_string().contains("unbind") && !readiness.to_string().contains("with-group"));
    let readiness = explained(&sim, VMD, false);
    let found: Vec<_> = readiness.blockers.iter().filter(|found| found.severity == Blocks).collect();
    assert_eq!(found.iter().map(|found| found.code).collect::<Vec<_>>(), [Code::MountedDisk], "{readiness}");
    assert!(found[0].remedy.contains("leave it with the host"), "{readiness}");
}

/// Functions of one slot are assigned together, so a default route on one keeps them all on the host.
#[test]
fn ethernet_in_the_slot_of_the_audio_function_keeps_it() {
    let sim = SimHost::new().unwrap();
    let (audio, ethernet) = ("0000:00:1f.3", "0000:00:1f.6");
    let function = SimFunction::new(address(audio), 0x8086, 0x51c8, 0x04_0380).group(14).resets("flr");
    sim.add(&function.driver("snd_hda_intel")).unwrap();
    sim.add(&SimFunction::network(address(ethernet)).group(14).driver("e1000e")).unwrap();
    let scene = Scene { sim, options: ExplainOptions::default() };
    use_it(&scene, ethernet, "default route");
    for function in [audio, ethernet] {
        let readiness = explain(&scene.sim.plain_host(), address(function), &scene.options).unwrap();
        let [found] = &readiness.blockers[..] else { panic!("{readiness}") };
        assert_eq!((found.code, found.function), (Code::DefaultRoute, address(ethernet)), "{readiness}");
        assert!(!found.remedy.contains("virtual function"), "it has none: {readiness}");
    }
}

/// The functions of a processor's GPU: a guest gets the virtual ones.
#[test]
fn virtual_functions_of_the_boot_display_are_ready() {
    let physical = "0000:00:02.0";
    let gpu = |text| SimFunction::gpu(address(text)).resets("flr");
    let sim = SimHost::new().unwrap();
    sim.add(&gpu(physical).driver("i915").group(2).boot_display(true).sriov(7)).unwrap();
    sim.add(&gpu("0000:00:02.1").virtual_of(address(physical)).group(15)).unwrap();
    sim.add(&gpu("0000:00:02.2").virtual_of(address(physical)).group(16).driver("i915")).unwrap();
    let host = sim.plain_host();
    let explained = |text| explain(&host, address(text), &ExplainOptions::default()).unwrap();
    for ready in ["0000:00:02.1", "0000:00:02.2"] {
        assert!(explained(ready).is_ready(), "{}", explained(ready));
    }
    let codes: Vec<_> = explained(physical).blockers.iter().map(|found| found.code).collect();
    assert_eq!(codes, [Code::BootDisplay, Code::VfsInUse]);
}
