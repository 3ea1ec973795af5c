//! Drivers, device nodes and permissions.

use super::*;

#[test]
fn vfio_pci_unavailable() {
    let unloaded = || Scene::new().delete("sys/bus/pci/drivers/vfio-pci");
    unloaded().check(Code::VfioPciUnavailable, Blocks, &["drivers/vfio-pci is missing"], &["install"]);
    unloaded()
        .write("lib/modules/6.12.0/modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/x.ko\n")
        .check(Code::VfioPciUnavailable, Blocks, &["modules.dep has the module"], &["modprobe vfio-pci"]);
    let mut named = unloaded();
    named.options.driver = VfioDriver::Named("x_vfio_pci".into());
    named.check(
        Code::VfioPciUnavailable,
        Blocks,
        &["drivers/x_vfio_pci is missing"],
        &["modprobe x_vfio_pci"],
    );
    let mut named = Scene::new();
    named.options.driver = VfioDriver::Named("nvme".into());
    named.check(Code::VfioPciUnavailable, Blocks, &["nvme was asked for"], &["vfio-pci"]);
    // A core module of the same family is not the driver.
    unloaded()
        .write("lib/modules/6.12.0/modules.dep", "kernel/vfio-pci-core.ko.xz: kernel/vfio-pci.ko.xz\n")
        .check(Code::VfioPciUnavailable, Blocks, &["has no vfio-pci"], &["CONFIG_VFIO_PCI"]);
}

/// A variant that fits is named whether it is loaded or not.
#[test]
fn vfio_variant() {
    let alias = "alias vfio_pci:v0000144Dd*sv*sd*bc01sc08i* nvme_vfio_pci\n";
    let scene = Scene::new().write("lib/modules/6.12.0/modules.alias", alias);
    scene.check(
        Code::VfioVariantNotLoaded,
        Warns,
        &["vfio_pci:v0000144D", "modules.alias", "nvme_vfio_pci"],
        &["modprobe nvme_vfio_pci", "--vfio-driver"],
    );
    scene.sim.add_driver("nvme_vfio_pci").unwrap();
    let readiness = scene.explain();
    assert_eq!(readiness.blockers, []);
    assert!(readiness.to_string().contains("driver  nvme_vfio_pci, which is made for it"), "{readiness}");
}

#[test]
fn vfio_node_missing() {
    let scene = Scene::new().delete("dev/iommu").delete("dev/vfio");
    scene.check(Code::VfioNodeMissing, Blocks, &["/dev/vfio/vfio"], &["modprobe -a vfio", "--device"]);
    // One of the two back ends is enough.
    assert_eq!(Scene::new().delete("dev/iommu").explain().blockers, []);
    assert_eq!(Scene::new().delete("dev/vfio").explain().blockers, []);
}

#[test]
fn permission() {
    let as_user = |scene: Scene| {
        scene.sim.set_credentials(1000, 1000, 0).unwrap();
        scene
    };
    let mode = |scene: Scene, path: &str, mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(scene.sim.path(path), permissions).unwrap();
        scene
    };
    // The tree may belong to any user; what matters is that it is not 1000, whose bits the mode withholds.
    let open_nodes = |scene| mode(mode(scene, "dev/vfio/vfio", 0o666), "dev/iommu", 0o666);
    let closed_nodes = |scene| mode(mode(scene, "dev/vfio/vfio", 0o600), "dev/iommu", 0o600);
    let nodes_only = |driver: &str| as_user(Scene::with(Scene::disk().driver(driver)));
    // Bound to the host's driver: the nodes by which it would be reached are judged already, beside sysfs.
    let readiness = closed_nodes(as_user(Scene::new())).explain();
    let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
    assert_eq!(found, [(Code::Permission, Blocks), (Code::Permission, Blocks)], "{readiness}");
    for (blocker, part) in readiness.blockers.iter().zip(["may not write", "/dev/iommu (600"]) {
        assert!(blocker.evidence.contains(part), "no `{part}` in {readiness}");
    }

    // Bound to the host's driver: sysfs has to be written.
    open_nodes(as_user(Scene::new())).check(
        Code::Permission,
        Blocks,
        &["user 1000 may not write", "driver_override", "drivers/nvme/unbind"],
        &["persistent claim of 0000:01:00.0"],
    );
    // Bound to vfio-pci: the nodes are enough, the group's among them.
    let bound = |node: u32| {
        let scene = open_nodes(nodes_only("vfio-pci")).write("dev/vfio/1", "");
        mode(scene, "dev/vfio/1", node)
    };
    bound(0o600).check(Code::Permission, Blocks, &["/dev/vfio/1 (600"], &["udev"]);
    assert_eq!(bound(0o666).explain().blockers, []);
    // The character device does as well.
    let cdev = bound(0o600)
        .write("dev/vfio/devices/vfio0", "")
        .write("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio0/dev", "511:0\n");
    assert_eq!(mode(cdev, "dev/vfio/devices/vfio0", 0o666).explain().blockers, []);
    // sysfs in a container.
    let mounted = |mounts: &[(&str, &str)]| {
        let scene = Scene::new();
        let line = |(place, options): &(&str, &str)| {
            format!("24 1 0:21 / {} {options},nosuid - sysfs sysfs rw\n", scene.sim.path(place).display())
        };
        let lines: String = mounts.iter().map(line).collect();
        scene.write("proc/self/mountinfo", &lines)
    };
    let blocks = |mounts: &[(&str, &str)], which: &str| {
        mounted(mounts).check(Code::Permission, Blocks, &[which, "mounted read-only"], &["remount,rw"]);
    };
    blocks(&[("sys", "ro")], "sys/devices");
    blocks(&[("sys", "rw"), ("sys", "ro")], "sys/devices");
    // A unit of systemd with ProtectKernelTunables=, which lets devices be bound all the same, or only some of what that takes.
    blocks(&[("sys", "ro"), ("sys/devices", "rw")], "sys/bus/pci");
    blocks(&[("sys/bus/pci", "rw"), ("sys", "ro")], "sys/devices");
    let unit = mounted(&[("sys", "ro"), ("sys/devices", "rw"), ("sys/bus/pci", "rw"), ("sys/kernel", "ro")]);
    assert_eq!(unit.explain().blockers, []);
}
