//! Functions that the host uses, except for disks.

use super::*;

#[test]
fn boot_display() {
    let gpu = || SimFunction::gpu(address(DISK)).below(address(PORT));
    Scene::with(gpu().driver("nouveau").boot_display(true)).check(
        Code::BootDisplay,
        Blocks,
        &["boot_vga is 1"],
        &["primary display", "claim --persist"],
    );
    // VFIO has it already, but the firmware's framebuffer is still there.
    let taken = || Scene::with(gpu().driver("vfio-pci").boot_display(true)).write("dev/vfio/1", "");
    assert_eq!(taken().explain().blockers, []);
    taken().write("proc/iomem", "81000000-81ffffff : 0000:01:00.0\n  81000000-812fffff : efifb\n").check(
        Code::BootDisplay,
        Blocks,
        &["0x81000000-0x812fffff", "efifb holds it"],
        &[],
    );
    // Any driver's, by its resource or by the parent of its DRM device.
    let resource = |names: &[&str]| {
        let lines: Vec<_> = names.iter().map(|name| format!("  81000000-812fffff : {name}\n")).collect();
        taken().write("proc/iomem", &format!("81000000-81ffffff : 0000:01:00.0\n{}", lines.concat()))
    };
    for driver in ["simpledrm", "efidrm", "vesadrm", "ofdrm", "a later one"] {
        let fix = &["unbind", "simple-framebuffer, efi-framebuffer", "/platform/drivers"];
        resource(&["BOOTFB", driver]).check(Code::BootDisplay, Blocks, &[driver], fix);
    }
    let refused = resource(&["BOOTFB", "simpledrm"]).write("proc/cmdline", "initcall_blacklist=sysfb_init\n");
    refused.check(
        Code::BootDisplay,
        Blocks,
        &["simpledrm"],
        &["sysfb_init on the kernel command line does not"],
    );
    assert!(!refused.explain().blockers[0].remedy.contains("ids="));
    assert_eq!(resource(&["vfio-pci"]).explain().blockers, []);
    // The window of the port above is as large as the BAR.
    let window = "81000000-81ffffff : PCI Bus 0000:01\n  81000000-81ffffff : 0000:01:00.0\n";
    assert_eq!(taken().write("proc/iomem", window).explain().blockers, []);
    let parent = taken();
    parent.sim.add_child(address(DISK), "drm", "efi-framebuffer.0/drm/card0", &[]).unwrap();
    let device = format!("sys/bus/pci/devices/{DISK}/efi-framebuffer.0");
    parent.sim.write("sys/bus/platform/drivers/efi-framebuffer/unbind", "").unwrap();
    parent.sim.link("sys/bus/platform/devices/efi-framebuffer.0", &device).unwrap();
    parent.sim.link(&format!("{device}/driver"), "sys/bus/platform/drivers/efi-framebuffer").unwrap();
    let fix = &["echo efi-framebuffer.0 > ", "platform/drivers/efi-framebuffer/unbind"];
    parent.check(Code::BootDisplay, Blocks, &["card0 belongs to efi-framebuffer.0"], fix);
    let own = Scene::with(gpu().driver("nouveau"));
    own.sim.add_child(address(DISK), "drm", "drm/card0", &[]).unwrap();
    assert_eq!(own.explain().blockers, []);
    // Elsewhere it is another's.
    let elsewhere = taken().write("proc/iomem", "91000000-912fffff : efifb\nzz : efifb\n1 : efifb\n");
    assert_eq!(elsewhere.explain().blockers, []);
}

/// A range in a BAR belongs to the function's driver by its name, and else to a driver of the firmware's framebuffer.
#[test]
fn holders_of_address_ranges() {
    for (driver, ranges, holder) in [
        ("nouveau", &["81000000-812fffff : nouveau"][..], None),
        ("nouveau", &["81000000-812fffff : nouveau_vram"], None),
        ("nouveau-x", &["81000000-812fffff : nouveau"], None),
        ("nouveau", &["81000000-812fffff : efifb"], Some("efifb")),
        ("nouveau", &["81000000-812fffff : vfio-pci"], Some("vfio-pci")),
        ("vfio-pci", &["81000000-812fffff : efifb"], Some("efifb")),
        ("mlx5-vfio-pci", &["81000000-812fffff : vfio-pci"], None),
        ("mlx5-vfio-pci", &["81000000-812fffff : mlx5_vfio_pci"], None),
        // A range of the driver's in that of the framebuffer.
        ("vfio-pci", &["81000000-812fffff : efifb", "81000000-810fffff : vfio-pci"], Some("efifb")),
        // The BAR is from 0x81000000 to 0x81ffffff.
        ("vfio-pci", &["81f00000-81ffffff : efifb"], Some("efifb")),
        ("vfio-pci", &["81f00000-82000000 : efifb"], None),
        ("vfio-pci", &["80ffffff-812fffff : efifb"], None),
    ] {
        let scene = Scene::with(SimFunction::gpu(address(DISK)).below(address(PORT)).driver(driver));
        let ranges = format!("81000000-81ffffff : 0000:01:00.0\n{}\n", ranges.join("\n"));
        let readiness = scene.write("proc/iomem", &ranges).explain();
        let found = readiness.blockers.iter().find(|found| found.code == Code::BootDisplay);
        assert_eq!(found.is_some(), holder.is_some(), "{driver}: {ranges}{readiness}");
        let Some((found, holder)) = found.zip(holder) else { continue };
        assert!(found.evidence.contains(&format!("and {holder} holds it")), "{driver}: {ranges}{readiness}");
    }
}

#[test]
fn default_route() {
    let card = || {
        let scene = Scene::with(SimFunction::network(address(DISK)).below(address(PORT)).driver("e1000e"));
        scene.sim.add_child(address(DISK), "net", "net/eth0", &[]).unwrap();
        scene
    };
    let header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n";
    let route = |name: &str, to: &str, mask: &str, flags: &str| {
        format!("{header}{name}\t{to}\t010200C0\t{flags}\t0\t0\t0\t{mask}\t0\t0\t0\n")
    };
    let path = "proc/net/route";
    card().write(path, &route("eth0", "00000000", "00000000", "0003")).check(
        Code::DefaultRoute,
        Blocks,
        &["eth0 has a default route", "/net/route"],
        &["ip route replace default"],
    );
    let virtual_function = "a virtual function of the card may do as well";
    let whole = card().write(path, &route("eth0", "00000000", "00000000", "0003")).explain();
    assert!(!whole.blockers[0].remedy.contains(virtual_function), "{whole}");
    let divisible = SimFunction::network(address(DISK)).below(address(PORT)).driver("e1000e").sriov(4);
    let divisible = Scene::with(divisible);
    divisible.sim.add_child(address(DISK), "net", "net/eth0", &[]).unwrap();
    divisible.write(path, &route("eth0", "00000000", "00000000", "0003")).check(
        Code::DefaultRoute,
        Blocks,
        &["eth0 has a default route"],
        &[virtual_function],
    );
    for (name, to, mask, flags) in [
        ("eth1", "00000000", "00000000", "0003"),
        ("eth0", "000200C0", "00FFFFFF", "0001"),
        ("eth0", "00000000", "00000001", "0001"),
        ("eth0", "00000000", "00000000", "0201"),
    ] {
        assert_eq!(card().write(path, &route(name, to, mask, flags)).explain().blockers, [], "{name} {to}");
    }
    // Through a VLAN on a bond.
    let scene = card();
    scene.sim.add_virtual("net", "bond0", &[]).unwrap();
    scene.sim.add_virtual("net", "bond0.7", &[]).unwrap();
    scene.sim.link("sys/class/net/eth0/upper_bond0", "sys/class/net/bond0").unwrap();
    scene.sim.link("sys/class/net/bond0/upper_bond0.7", "sys/class/net/bond0.7").unwrap();
    scene.write(path, &route("bond0.7", "00000000", "00000000", "0003")).check(
        Code::DefaultRoute,
        Blocks,
        &["bond0.7 on bond0 on eth0 has a default route"],
        &["bond"],
    );
    let zeros = "0".repeat(32);
    let route6 = |flags: &str| {
        format!("{zeros} 00 {zeros} 00 fe80{} 00000400 00000001 00000000 {flags} eth0\n", &zeros[4..])
    };
    let path = "proc/net/ipv6_route";
    card().write(path, &route6("00000003")).check(Code::DefaultRoute, Blocks, &["ipv6_route"], &[]);
    assert_eq!(card().write(path, &route6("00200200")).explain().blockers, []);
}
