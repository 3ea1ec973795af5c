use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;

use super::BlockerCode as Code;
use super::Severity::{Blocker as Blocks, Warning as Warns};
use super::*;
use crate::claim::{self, ClaimOptions};
use crate::ledger;
use crate::pci::BarKind;
use crate::sim::{SimFunction, SimHost};

mod disks;
mod guest;
mod iommu_setup;
mod removal;
mod reports;
mod tunnel;
mod usable;

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// A healthy host with an NVMe disk at 0000:01:00.0 behind a root port, driven by nvme, to which `cause` happens.
struct Scene {
    sim: SimHost,
    options: ExplainOptions,
}

const PORT: &str = "0000:00:01.0";
const DISK: &str = "0000:01:00.0";

impl Scene {
    fn new() -> Self {
        let scene = Self::without_disk();
        scene.sim.add(&Self::disk()).unwrap();
        scene
    }

    fn without_disk() -> Self {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::root_port(address(PORT))).unwrap();
        Self { sim, options: ExplainOptions::default() }
    }

    fn disk() -> SimFunction {
        SimFunction::nvme(address(DISK)).below(address(PORT)).driver("nvme")
    }

    fn with(function: SimFunction) -> Self {
        let scene = Self::without_disk();
        scene.sim.add(&function).unwrap();
        scene
    }

    fn explain(&self) -> Readiness {
        explain(&self.sim.plain_host(), address(DISK), &self.options).unwrap()
    }

    /// Asserts that there is exactly this one finding, and that its texts have these parts.
    fn check(&self, code: Code, severity: Severity, evidence: &[&str], remedy: &[&str]) {
        let readiness = self.explain();
        let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
        assert_eq!(found, [(code, severity)], "{readiness}");
        let blocker = &readiness.blockers[0];
        for part in evidence {
            assert!(blocker.evidence.contains(part), "no `{part}` in {readiness}");
        }
        for part in remedy {
            assert!(blocker.remedy.contains(part), "no `{part}` in {readiness}");
        }
        assert_eq!(readiness.is_ready(), severity == Warns);
    }

    fn write(self, path: &str, text: &str) -> Self {
        self.sim.write(path, text).unwrap();
        self
    }

    fn delete(self, path: &str) -> Self {
        self.sim.delete(path).unwrap();
        self
    }
}

#[test]
fn a_healthy_function_has_no_blocker() {
    let readiness = Scene::new().explain();
    assert_eq!(readiness.blockers, [], "{readiness}");
    assert!(readiness.is_ready() && readiness.first_blocker().is_none());
    assert!(readiness.to_string().starts_with("0000:01:00.0 Samsung"), "{readiness}");
    assert!(readiness.to_string().contains(": ready\n  driver  vfio-pci, as no variant"), "{readiness}");
}

#[test]
fn not_an_endpoint() {
    let scene = Scene::new();
    let readiness = explain(&scene.sim.plain_host(), address(PORT), &scene.options).unwrap();
    assert_eq!(readiness.blockers.len(), 1, "{readiness}");
    assert_eq!(readiness.blockers[0].code, Code::NotAnEndpoint);
    assert!(readiness.blockers[0].remedy.contains(DISK), "{readiness}");
    let host_bridge = SimFunction::new(address(DISK), 0x8086, 0x29c0, 0x06_0000).group(1);
    Scene::with(host_bridge).check(Code::NotAnEndpoint, Blocks, &["060000"], &["not a bridge"]);
    // A switch of NVIDIA's own fabric is a bridge in name only.
    let nvswitch = SimFunction::new(address(DISK), 0x10de, 0x22a3, 0x06_8000).group(1);
    assert!(Scene::with(nvswitch).explain().is_ready());
}

#[test]
fn cxl_devices_are_named() {
    let with = |body: &[u8]| Scene::with(Scene::disk().extended_capability(0x0023, 1, body));
    let device = [0x98, 0x1e, 0xc2, 0x03, 0, 0, 0x1e, 0];
    with(&device).check(Code::Cxl, Warns, &["0000:01:00.0/config", "at 0x100"], &["stay the host's"]);
    // Another of CXL's, which no device has alone, another vendor's, and one that is cut off.
    assert_eq!(with(&[0x98, 0x1e, 0xc2, 0x03, 8, 0, 0, 0]).explain().blockers, []);
    assert_eq!(with(&[0x86, 0x80, 0xc2, 0x03, 0, 0, 0, 0]).explain().blockers, []);
    let mut cut = Scene::disk().config_space();
    cut[0x100..0x104].copy_from_slice(&0xffc1_0023u32.to_le_bytes());
    cut[0xffc..].copy_from_slice(&0x0001_0023u32.to_le_bytes());
    assert_eq!(Scene::with(Scene::disk().config(cut)).explain().blockers, []);
    let memory = SimFunction::new(address(DISK), 0x1af4, 1, 0x05_0210).group(1);
    Scene::with(memory).check(Code::Cxl, Warns, &["0000:01:00.0/class is 050210"], &["nothing"]);
}

#[test]
fn not_responding() {
    let dead = Scene::disk().config(vec![0xff; 4096]);
    Scene::with(dead).check(Code::NotResponding, Blocks, &["0000:01:00.0/config"], &["/remove", "rescan"]);
    // Parts of its config space, and the bytes that are repeated there.
    let check = |parts: &[(std::ops::Range<usize>, &[u8])], evidence: &str, remedy: &str| {
        let mut config = Scene::disk().config_space();
        for (range, bytes) in parts {
            let bytes = bytes.iter().cycle().take(range.len()).copied().collect::<Vec<_>>();
            config[range.clone()].copy_from_slice(&bytes);
        }
        let scene = Scene::with(Scene::disk().config(config));
        scene.check(Code::NotResponding, Blocks, &["0000:01:00.0/config", evidence], &[remedy, "rescan"]);
    };
    let retry: &[u8] = &[1, 0, 0xff, 0xff];
    check(&[(0..4096, &[0xff]), (0..4, retry)], "vendor ID 0x0001", "wait for the end of its reset");
    check(&[(0..4, retry)], "vendor ID 0x0001", "wait for the end of its reset");
    check(&[(0..4096, &[0])], "reads zeros", "cable");
    check(&[(4..64, &[0xff])], "reads ones in part", "cable");
    check(&[(2..4, &[0xff])], "reads ones in part", "cable");
}

#[test]
fn no_iommu() {
    let ungrouped = || Scene::with(Scene::disk().no_group());
    ungrouped().check(Code::NoIommu, Blocks, &["though the host has an IOMMU"], &["another slot"]);
    let without = |cpuinfo: &str| {
        let scene = ungrouped().delete("sys/class/iommu").delete("sys/kernel/iommu_groups");
        scene.write("proc/cpuinfo", cpuinfo).write("proc/interrupts", "0: 1 IO-APIC timer\n")
    };
    let check = |cpu: &str, remedy: &str| {
        without(cpu).check(Code::NoIommu, Blocks, &["iommu_groups are empty"], &[remedy]);
    };
    check("vendor_id : GenuineIntel\n", "intel_iommu=on");
    check("vendor_id : AuthenticAMD\n", "AMD-Vi");
    check("CPU part : 0xd0c\n", "SMMU");
    Scene::new().write("sys/kernel/iommu_groups/1/name", "vfio-noiommu\n").check(
        Code::NoIommu,
        Blocks,
        &["made without an IOMMU"],
        &["enable_unsafe_noiommu_mode"],
    );
}

/// Behind a port that isolates, but with another card in the group.
fn shared_group(neighbour: SimFunction) -> Scene {
    let scene = Scene::new();
    scene.sim.add(&neighbour.group(1)).unwrap();
    scene
}

fn neighbour() -> SimFunction {
    SimFunction::network(address("0000:02:00.0"))
}

#[test]
fn group_not_viable() {
    let scene = shared_group(neighbour().driver("e1000e"));
    scene.check(
        Code::GroupNotViable,
        Blocks,
        &["0000:02:00.0 (Intel", "driver e1000e", "group 1"],
        &["--with-group", "echo 0000:02:00.0 > ", "drivers/e1000e/unbind"],
    );
    // Given away as a whole it is no longer in the way, and goes with it.
    let options = ExplainOptions { with_group: true, ..ExplainOptions::default() };
    let readiness = explain(&scene.sim.plain_host(), address(DISK), &options).unwrap();
    assert_eq!(readiness.blockers, [], "{readiness}");
    assert_eq!(readiness.functions, [address(DISK), address("0000:02:00.0")]);
    assert!(readiness.to_string().contains("goes with 0000:02:00.0"), "{readiness}");
    // What leaves DMA alone is not in the way.
    for driver in [None, Some("vfio-pci"), Some("mlx5_vfio_pci"), Some("pci-stub")] {
        let neighbour = driver.map_or(neighbour(), |driver| neighbour().driver(driver));
        assert_eq!(shared_group(neighbour).explain().blockers, [], "{driver:?}");
    }
    // Nor are the functions of the same slot, which are taken along, nor bridges.
    let audio = SimFunction::new(address("0000:01:00.1"), 0x10de, 0x22ba, 0x04_0300).driver("snd_hda_intel");
    let readiness = shared_group(audio).explain();
    assert_eq!(readiness.blockers, [], "{readiness}");
    assert_eq!(readiness.functions.len(), 2);
    let bridge = |driver: Option<&str>| {
        let bridge = SimFunction::root_port(address("0000:00:02.0"));
        shared_group(driver.into_iter().fold(bridge, SimFunction::driver))
    };
    for driver in [None, Some("pcieport")] {
        assert_eq!(bridge(driver).explain().blockers, [], "{driver:?}");
    }
    // A bridge's driver is as much in the way as any other.
    let unbind = "echo 0000:00:02.0 > ";
    let slots = bridge(Some("shpchp"));
    slots.check(
        Code::GroupNotViable,
        Blocks,
        &["0000:00:02.0", "driver shpchp", "group 1"],
        &["--with-group", unbind, "drivers/shpchp/unbind", "hot-plugged"],
    );
    let readiness = explain(&slots.sim.plain_host(), address(DISK), &options).unwrap();
    assert!(readiness.is_ready(), "{readiness}");
    assert_eq!(readiness.functions, [address(DISK)]);
    // What giving the group away does not change is not said to help.
    let mut other = bridge(Some("other"));
    for with_group in [false, true] {
        other.options.with_group = with_group;
        other.check(Code::GroupNotViable, Blocks, &["driver other"], &["take 0000:00:02.0 from", unbind]);
        assert!(!other.explain().blockers[0].remedy.contains("--with-group"));
    }
}

/// Otherwise what all functions of a group of thousands take grows with its square.
#[test]
fn a_group_is_read_once() {
    let scene = shared_group(neighbour().driver("e1000e"));
    let host = scene.sim.plain_host();
    let count = |explainer: &Explainer<'_>| {
        let readiness = explainer.explain(address(DISK), &scene.options).unwrap();
        readiness.blockers.iter().filter(|blocker| blocker.code == Code::GroupNotViable).count()
    };
    let explainer = Explainer::new(&host);
    assert_eq!(count(&explainer), 1);
    scene.sim.set_driver(address("0000:02:00.0"), None).unwrap();
    assert_eq!((count(&explainer), count(&Explainer::new(&host))), (1, 0));
}

/// The firmware puts platform devices into groups too.
#[test]
fn what_is_no_pci_function_is_in_the_way_too() {
    let scene = |driver: Option<&str>| {
        let scene = Scene::new();
        let device = "sys/devices/platform/AMDI0020:00";
        scene.sim.write("sys/devices/platform/AMDI0020:00/uevent", "").unwrap();
        scene.sim.link("sys/kernel/iommu_groups/1/devices/AMDI0020:00", device).unwrap();
        if let Some(driver) = driver {
            scene.sim.write(&format!("sys/bus/platform/drivers/{driver}/unbind"), "").unwrap();
            let driver = format!("sys/bus/platform/drivers/{driver}");
            scene.sim.link("sys/devices/platform/AMDI0020:00/driver", &driver).unwrap();
        }
        scene
    };
    for driver in [None, Some("vfio-platform")] {
        assert_eq!(scene(driver).explain().blockers, [], "{driver:?}");
    }
    let mut scene = scene(Some("dw-apb-uart"));
    for with_group in [false, true] {
        scene.options.with_group = with_group;
        scene.check(
            Code::GroupNotViable,
            Blocks,
            &["AMDI0020:00", "group 1", "driver dw-apb-uart"],
            &["echo AMDI0020:00 > ", "sys/bus/platform/drivers/dw-apb-uart/unbind"],
        );
    }
}

#[test]
fn acs_missing() {
    let behind = |port: SimFunction, neighbour: SimFunction| {
        let sim = SimHost::new().unwrap();
        sim.add(&port).unwrap();
        sim.add(&Scene::disk()).unwrap();
        sim.add(&neighbour.group(1)).unwrap();
        Scene { sim, options: ExplainOptions::default() }
    };
    let no_acs = || SimFunction::root_port(address(PORT)).no_extended_capabilities();
    // Nothing drives the neighbour, so the group is viable.
    behind(no_acs(), neighbour()).check(
        Code::AcsMissing,
        Warns,
        &["port 0000:00:01.0", "has no ACS", "0000:02:00.0"],
        &["root port", "--with-group"],
    );
    // A soldered device cannot be moved.
    let soldered = behind(no_acs().without_slot(), neighbour());
    soldered.check(Code::AcsMissing, Warns, &["has no ACS"], &["enable ACS", "device of another group"]);
    assert!(!soldered.explain().blockers[0].remedy.contains("slot"));
    let off = no_acs().extended_capability(0x000d, 1, &[0x1f, 0, 0x00, 0]);
    behind(off, neighbour()).check(Code::AcsMissing, Warns, &["switched off: source validation"], &[]);
    // With a driver both are blockers: the group is not viable, and the port is why.
    let readiness = behind(no_acs(), neighbour().driver("e1000e")).explain();
    let found: Vec<_> = readiness.blockers.iter().map(|b| (b.code, b.severity)).collect();
    assert_eq!(found, [(Code::GroupNotViable, Blocks), (Code::AcsMissing, Blocks)]);
    // Alone in its group it needs none.
    let alone = Scene::without_disk();
    alone.sim.remove(address(PORT)).unwrap();
    alone.sim.add(&no_acs()).unwrap();
    alone.sim.add(&Scene::disk()).unwrap();
    assert_eq!(alone.explain().blockers, []);
}

#[test]
fn interrupt_remapping_off() {
    let off = || Scene::new().write("proc/interrupts", "  0:  42  IO-APIC  2-edge  timer\n");
    off().check(Code::InterruptRemappingOff, Blocks, &["/interrupts"], &["VT-d", "echo Y > "]);
    off().write("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y\n").check(
        Code::InterruptRemappingOff,
        Warns,
        &["allow_unsafe_interrupts of vfio_iommu_type1"],
        &["trusted guests only"],
    );
}

#[test]
fn firmware_memory() {
    let regions = "sys/kernel/iommu_groups/1/reserved_regions";
    Scene::new().write(regions, "0x00000000bf000000 0x00000000bf7fffff direct\n").check(
        Code::FirmwareMemory,
        Blocks,
        &["0xbf000000-0xbf7fffff", "platform RMRR requirement", "1:1 IOMMU mapping"],
        &["firmware setup"],
    );
    let relaxed = Scene::new().write(regions, "0x00000000000e8000 0x00000000000effff direct-relaxable\n");
    assert_eq!(relaxed.explain().blockers, []);
}

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

#[test]
fn in_use() {
    let open = |path: &str| {
        let scene = Scene::new();
        scene.sim.write("proc/4242/comm", "reader\n").unwrap();
        let node = if path.starts_with("dev") {
            scene.sim.path(path)
        } else {
            scene.sim.device_dir(address(DISK)).unwrap().join(path)
        };
        std::fs::create_dir_all(scene.sim.path("proc/4242/fd")).unwrap();
        std::os::unix::fs::symlink(node, scene.sim.path("proc/4242/fd/3")).unwrap();
        let directory = format!("sys/bus/pci/devices/{DISK}");
        for (path, name) in [
            ("nvme/nvme0", "nvme0"),
            ("nvme/nvme0/nvme0n1", "nvme0n1"),
            ("nvme/nvme0/nvme0n1/nvme0n1p1", "nvme0n1p1"),
            ("drm/card0", "dri/card0"),
            ("accel/accel0", "accel/accel0"),
            ("sound/card1/controlC1", "snd/controlC1"),
            ("sound/card1/input7/event7", "input/event7"),
            ("input/input8/event8", "input/event8"),
            ("usb1/1-1/1-1:1.0/0003:046D:C31C.0001/hidraw/hidraw0", "hidraw0"),
        ] {
            scene.sim.write(&format!("{directory}/{path}/dev"), "1:1\n").unwrap();
            scene.sim.write(&format!("{directory}/{path}/uevent"), &format!("DEVNAME={name}\n")).unwrap();
        }
        scene.write(&format!("proc/driver/nvidia/gpus/{DISK}/information"), "Model: x\nDevice Minor: \t 2\n")
    };
    for path in [
        "dev/nvme0",
        "dev/nvme0n1",
        "dev/nvme0n1p1",
        "dev/dri/card0",
        "dev/accel/accel0",
        "dev/snd/controlC1",
        "dev/nvidia2",
        "dev/vfio/1",
        "resource0",
    ] {
        open(path).check(Code::InUse, Blocks, &["process 4242 (reader) has", path, "open"], &["kill 4242"]);
    }
    // Keyboards and the like let go when they are unplugged.
    for path in ["dev/nvme1", "dev/null", "dev/nvidia20", "config", "dev/input/event8", "dev/hidraw0"] {
        assert_eq!(open(path).explain().blockers, [], "{path}");
    }
    let mut unchecked = open("dev/nvme0");
    unchecked.options.check_open_files = false;
    assert_eq!(unchecked.explain().blockers, []);
}

#[test]
fn in_use_shared() {
    let scene = Scene::new()
        .write("proc/self/comm", "worker\n")
        .write(&format!("proc/{}/stat", std::process::id()), &format!("1 (a) b) S{} 77 0", " 0".repeat(18)));
    let manager = crate::PassthroughManager::with_host(scene.sim.plain_host()).unwrap();
    let lease = manager.share(address(DISK)).unwrap();
    let pid = std::process::id().to_string();
    let owner = format!("process {pid} (worker), by ");
    scene.check(
        Code::InUseShared,
        Blocks,
        &[&owner, ".shared"],
        &["wait until they have ended", &format!("kill {pid}")],
    );
    let sharers = manager.sharers(address(DISK)).unwrap();
    assert_eq!((sharers.len(), sharers[0].started), (1, Some(77)));
    // Another process has the ID by now, and a child of the owner the lease.
    let scene = scene.write(&format!("proc/{pid}/stat"), &format!("1 (a) S{} 78 0", " 0".repeat(18)));
    scene.check(Code::InUseShared, Blocks, &["has ended, but a child of it lives"], &[]);
    drop(lease);
    assert_eq!(scene.explain().blockers, []);
}

#[test]
fn claimed() {
    let scene = Scene::new().write("proc/self/comm", "vm-service\n");
    let host = crate::sim::SimDrivers::new(&scene.sim).host();
    let codes = || {
        let blockers = explain(&host, address(DISK), &scene.options).unwrap().blockers;
        blockers.iter().map(|found| found.code.as_str()).collect::<Vec<_>>().join(" ")
    };
    let mut manager = crate::PassthroughManager::with_host(host.clone()).unwrap();
    let claim = |persistent| ClaimOptions { persistent, ..ClaimOptions::default() };
    let own = manager.claim(address(DISK), &claim(false)).unwrap();
    assert_eq!(codes(), "", "this process has it");
    manager.release(&own).unwrap();
    manager.claim(address(DISK), &claim(true)).unwrap();
    assert_eq!(codes(), "", "no process has it");

    // Another process takes it up.
    let path = scene.sim.path(&format!("run/ledger/{DISK}.claim"));
    let (_, mut entry) = ledger::read_record(&host, &path).unwrap();
    entry.user = Some(ledger::Owner { pid: 4242, guest: Some("web1".into()), ..entry.owner.clone() });
    std::fs::write(&path, entry.text()).unwrap();
    assert_eq!(codes(), "", "it has died");
    let record = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&record, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let evidence =
        format!("process 4242 (vm-service, guest web1) has it, by /run/vm-passthrough/ledger/{DISK}.claim");
    scene.check(Code::Claimed, Blocks, &[&evidence], &["wait until that process has ended", "kill 4242"]);
    // While somebody writes the ledger, locks of records tell nothing.
    let writer = ledger::Ledger::lock(&host, claim::DEADLINE).unwrap();
    scene.check(Code::Unchecked, Warns, &["whether another process has claimed it"], &["run this again"]);
    drop(writer);
    assert_eq!(codes(), "claimed");
    drop(record);
    assert_eq!(codes(), "");
}

#[test]
fn vfs_in_use() {
    let scene = Scene::with(Scene::disk().sriov(8));
    assert_eq!(scene.explain().blockers, []);
    for (function, driver) in [("0000:01:00.1", Some("nvme")), ("0000:01:00.2", None)] {
        let virtual_function = SimFunction::nvme(address(function)).virtual_of(address(DISK)).group(50);
        scene.sim.add(&driver.into_iter().fold(virtual_function, SimFunction::driver)).unwrap();
    }
    scene.check(
        Code::VfsInUse,
        Blocks,
        &["sriov_numvfs is 2", "with drivers: 0000:01:00.1 (nvme)"],
        &["echo 0 > ", "sriov_numvfs"],
    );
}

/// Devices that are divided. No such hardware was at hand: the trees are made by its vendor's documents.
#[test]
fn divided_devices() {
    const UUID: &str = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
    let types = format!("sys/bus/pci/devices/{DISK}/mdev_supported_types");
    let scene = Scene::new().write(&format!("{types}/nvidia-63/name"), "GRID P4-1Q\n");
    assert_eq!(scene.explain().blockers, [], "it could be divided, and is not");
    scene
        .sim
        .link(&format!("sys/bus/pci/devices/{DISK}/{UUID}/mdev_type"), &format!("{types}/nvidia-63"))
        .unwrap();
    let remove = format!("bus/mdev/devices/{UUID}/remove");
    scene.check(Code::VgpusInUse, Blocks, &[UUID, "GRID P4-1Q"], &["echo 1 > ", &remove]);

    let information = format!("proc/driver/nvidia/gpus/{DISK}/information");
    let mut scene = Scene::new().write(&information, "Device Minor: \t 0\n");
    assert_eq!(scene.explain().blockers, []);
    for number in 0..6 {
        let path = format!("proc/driver/nvidia/capabilities/gpu0/mig/gi{number}/ci0/access");
        scene = scene.write(&path, "DeviceFileMinor: 3\n");
    }
    scene.check(Code::MigInUse, Blocks, &["gi0/ci0", "and 2 more"], &["nvidia-smi mig -i 0000:01:00.0 -dci"]);

    let dir = format!("sys/bus/pci/devices/{DISK}/nvidia");
    let scene = Scene::new()
        .write(&format!("{dir}/creatable_vgpu_types"), "ID    : vGPU Name\n1428 : NVIDIA H200X-141C\n")
        .write(&format!("{dir}/current_vgpu_type"), "0\n");
    scene.check(Code::VgpuFunction, Blocks, &["is 0", "NVIDIA H200X-141C"], &["whole GPU", "libvirt"]);
    let scene = scene.write(&format!("{dir}/current_vgpu_type"), "1428\n");
    scene.check(Code::VgpuFunction, Blocks, &["makes it NVIDIA H200X-141C"], &["whole GPU"]);
    let mut manager = crate::PassthroughManager::with_host(scene.sim.plain_host()).unwrap();
    let refused = manager.claim(address(DISK), &ClaimOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("vgpu-function"), "{refused}");
}

#[test]
fn d3cold() {
    let scene = Scene::with(Scene::disk().power_state("D3cold"));
    let control = "echo on > ";
    scene.check(Code::D3cold, Warns, &["power_state is D3cold", "suspended"], &[control, "power/control"]);
    scene.sim.set(address(DISK), "power/runtime_status", "active\n").unwrap();
    scene.check(Code::D3cold, Blocks, &["runtime_status is active"], &[control]);
    assert_eq!(Scene::with(Scene::disk().power_state("D3hot")).explain().blockers, []);
    // vfio-pci put it to sleep, unless it is told not to.
    let asleep = Scene::with(
        SimFunction::nvme(address(DISK)).below(address(PORT)).driver("vfio-pci").power_state("D3cold"),
    );
    let parameter = "sys/module/vfio_pci/parameters/disable_idle_d3";
    let asleep = asleep.write("dev/vfio/1", "").write(parameter, "N\n");
    asleep.sim.set(address(DISK), "power/runtime_status", "error\n").unwrap();
    asleep.check(
        Code::D3cold,
        Blocks,
        &["runtime_status is error"],
        &["vfio-pci.disable_idle_d3=1", control],
    );
    let asleep = asleep.write(parameter, "Y\n");
    assert!(!asleep.explain().blockers[0].remedy.contains("disable_idle_d3"));
}

#[test]
fn no_reset() {
    let none = || Scene::disk().resets("");
    // The port above resets what is below it, when all of that is given away.
    Scene::with(none()).check(Code::NoReset, Warns, &["reset by its port 0000:00:01.0"], &["nothing"]);
    const NEIGHBOUR: &str = "0000:01:03.0";
    let neighbour = |group| SimFunction::nvme(address(NEIGHBOUR)).group(group).below(address(PORT));
    let beside = |group| {
        let scene = Scene::with(none());
        scene.sim.add(&neighbour(group)).unwrap();
        scene
    };
    let scene = beside(9);
    scene.check(
        Code::NoReset,
        Blocks,
        &["reset_method", "also reset 0000:01:03.0"],
        &["give 0000:01:03.0 to the same guest, move the card", "own root port", "accept no-reset"],
    );
    // Which it is, when the guest gets both.
    let functions = pci::scan(&scene.sim.plain_host()).unwrap();
    let both: Vec<_> = functions
        .iter()
        .filter(|function| [DISK, NEIGHBOUR].map(address).contains(&function.address))
        .collect();
    let judged = Explainer::new(&scene.sim.plain_host()).explain_guest(&both, &scene.options).unwrap();
    let found: Vec<_> = judged[0].blockers.iter().filter(|blocker| blocker.code == Code::NoReset).collect();
    assert_eq!((found.len(), found[0].severity), (1, Warns), "{found:?}");
    assert!(
        found[0].evidence.contains("along with 0000:01:03.0")
            && found[0].remedy.contains("to the same guest")
    );
    // What Linux found while it was alone there.
    let scene = Scene::with(Scene::disk().resets("bus"));
    scene.sim.add(&neighbour(9)).unwrap();
    scene.check(Code::NoReset, Blocks, &["only its bus", "also reset 0000:01:03.0"], &["to the same guest"]);
    // In the same group, of which all is given away on request.
    let mut scene = beside(1);
    scene.check(Code::NoReset, Blocks, &["also reset 0000:01:03.0"], &["as --with-group does"]);
    scene.options.with_group = true;
    scene.check(Code::NoReset, Warns, &["port 0000:00:01.0, along with 0000:01:03.0"], &["the same guest"]);
    // Nobody can give a bridge.
    let scene = Scene::with(none());
    scene.sim.add(&SimFunction::root_port(address(NEIGHBOUR)).below(address(PORT))).unwrap();
    scene.check(Code::NoReset, Blocks, &["also reset 0000:01:03.0"], &["move the card"]);
    let on_root_bus = Scene::with(SimFunction::nvme(address(DISK)).resets(""));
    on_root_bus.check(Code::NoReset, Blocks, &["no port above"], &["newer Linux kernel", "accept no-reset"]);
    // It is soldered in.
    assert!(!on_root_bus.explain().blockers[0].remedy.contains("slot"));
    let mut accepted = Scene::with(SimFunction::nvme(address(DISK)).resets(""));
    accepted.options.accept = vec![Code::NoReset, Code::D3cold];
    accepted.check(Code::NoReset, Warns, &["no port above", "(accepted)"], &["newer Linux kernel"]);
    for method in ["flr", "pm", "bus", "device_specific"] {
        assert_eq!(Scene::with(Scene::disk().resets(method)).explain().blockers, []);
    }
}

#[test]
fn bar_unassigned() {
    let bar = |address, kind| Scene::disk().bar(0, kind, false, address, 0x4000);
    Scene::with(bar(0, BarKind::Memory64)).check(
        Code::BarUnassigned,
        Blocks,
        &["BAR 0 (16 KiB)", "/resource"],
        &["Above 4G Decoding", "pci=realloc"],
    );
    // The kernel command line has it already.
    let tried = Scene::with(bar(0, BarKind::Memory64)).write("proc/cmdline", "quiet pci=nomsi,realloc\n");
    tried.check(
        Code::BarUnassigned,
        Blocks,
        &["/proc/cmdline has pci=nomsi,realloc"],
        &["Above 4G Decoding"],
    );
    assert!(!tried.explain().blockers[0].remedy.contains("pci=realloc"));
    // Arm's firmware has no such option.
    let arm = Scene::with(bar(0, BarKind::Memory64)).write("proc/cpuinfo", "CPU part : 0xd0c\n");
    arm.check(Code::BarUnassigned, Blocks, &["BAR 0 (16 KiB)"], &["_CRS", "pci=realloc"]);
    assert!(!arm.explain().blockers[0].remedy.contains("4G"));
    // Port I/O is rarely needed, and often not assigned.
    let ports = Scene::disk().bar(5, BarKind::Io, false, 0, 0x20);
    assert_eq!(Scene::with(ports).explain().blockers, []);
}

#[test]
fn iova_reserved() {
    let regions = "sys/kernel/iommu_groups/1/reserved_regions";
    let scene = |line: &str| Scene::new().write(regions, line);
    scene("0x0000000020000000 0x00000000200fffff reserved\n").check(
        Code::IovaReserved,
        Blocks,
        &["0x20000000-0x200fffff (reserved)", "RAM 0x0-0x3fffffff"],
        &["below 512 MiB"],
    );
    scene("0x0000000008000000 0x00000000080fffff msi\n").check(Code::IovaReserved, Blocks, &["(msi)"], &[]);
    for line in [
        "0x0000000040000000 0x00000000400fffff reserved\n",
        "0x00000000000e8000 0x00000000000effff direct-relaxable\n",
    ] {
        assert_eq!(scene(line).explain().blockers, [], "{line}");
    }
}

#[test]
fn iova_too_wide() {
    let mut scene = Scene::new();
    scene.options = ExplainOptions::for_memory(600 << 30);
    scene.check(Code::IovaTooWide, Blocks, &["translates 39 bits"], &["below 512 GiB"]);
    scene.options = ExplainOptions::for_memory(511 << 30);
    assert_eq!(scene.explain().blockers, []);
}

/// As much as a large host has, around what AMD's IOMMUs never translate.
#[test]
fn ram_lies_around_what_hypertransport_has() {
    let hypertransport = "0x000000fd00000000 0x000000ffffffffff reserved\n";
    for gib in [1012u64, 1013, 1500, 4096] {
        let mut scene = Scene::new()
            .write("sys/kernel/iommu_groups/1/reserved_regions", hypertransport)
            .write("proc/meminfo", "MemTotal: 8589934592 kB\n")
            .write("sys/devices/virtual/iommu/dmar0/intel-iommu/cap", "2f0000\n");
        scene.options = ExplainOptions::for_memory(gib << 30);
        assert_eq!(scene.options.memory(), gib << 30);
        assert_eq!(scene.explain().blockers, [], "{gib} GiB");
    }
}

#[test]
fn host_memory_too_low() {
    let scene = |total: &str, available: &str| {
        let mut scene = Scene::new();
        scene.options = ExplainOptions::for_memory(24 << 30);
        scene
            .write("proc/meminfo", &format!("MemTotal: {total}\nMemFree: 1 kB\nMemAvailable:  {available}\n"))
    };
    let small = &["24 GiB of RAM", "/meminfo gives 23 GiB in all"];
    scene("24117248 kB", "1048576 kB").check(Code::HostMemoryTooLow, Blocks, small, &["less memory"]);
    let busy = &["24 GiB of RAM", "/meminfo gives 1 GiB available now"];
    scene("33554432 kB", "1048576 kB").check(
        Code::HostMemoryTooLow,
        Warns,
        busy,
        &["less memory", "end what"],
    );
    // A cgroup has less, or one around it.
    let group = |limits: [&str; 3]| {
        let mut scene =
            scene("33554432 kB", "33554432 kB").write("proc/self/cgroup", "0::/a.slice/b.service\n");
        for (place, limit) in ["", "a.slice/", "a.slice/b.service/"].into_iter().zip(limits) {
            scene = scene.write(&format!("sys/fs/cgroup/{place}memory.max"), limit);
        }
        scene
    };
    let remedies = &["less memory", "MemoryMax="];
    let own = &["24 GiB of RAM", "a.slice/b.service/memory.max allows 8 GiB"];
    group(["max\n", "17179869184\n", "8589934592\n"]).check(Code::HostMemoryTooLow, Blocks, own, remedies);
    let outer = &["a.slice/memory.max allows 8 GiB"];
    group(["max\n", "8589934592\n", "max\n"]).check(Code::HostMemoryTooLow, Blocks, outer, remedies);
    assert_eq!(group(["max\n", "25769803776\n", "x"]).explain().blockers, []);
    let outside = group(["1\n", "1\n", "1\n"]).write("proc/self/cgroup", "0::/../../b\n1:memory:/a.slice\n");
    assert_eq!(outside.explain().blockers, []);
    // Nobody has asked for 1 GiB.
    let mut assumed = scene("524288 kB", "1 kB");
    assumed.options = ExplainOptions::default();
    assert_eq!(assumed.explain().blockers, []);
    for (total, available) in
        [("25165824 kB", "25165824 kB"), ("", "x"), ("99999999999999999999 kB", "18446744073709551615 kB")]
    {
        assert_eq!(scene(total, available).explain().blockers, [], "{total} {available}");
    }
}

/// A fault, a host that has it, and what a virtual machine's remedy for it says.
type Fault = (&'static str, fn() -> Scene, &'static str);

/// Who has rented a virtual machine has no firmware setup, and moves no cards.
#[test]
fn remedies_in_a_virtual_machine() {
    let signs = [
        ("proc/cpuinfo", "vendor_id : GenuineIntel\nflags : fpu hypervisor vme\n"),
        ("sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009) QEMU\n"),
        ("sys/hypervisor/type", "xen\n"),
    ];
    let faults: [Fault; 8] = [
        (
            "no IOMMU",
            || {
                Scene::with(Scene::disk().no_group())
                    .delete("sys/class/iommu")
                    .delete("sys/kernel/iommu_groups")
            },
            "iommu model='intel'",
        ),
        ("not behind it", || Scene::with(Scene::disk().no_group()), "bypass_iommu"),
        (
            "no ACS",
            || {
                let scene = Scene::without_disk();
                scene.sim.remove(address(PORT)).unwrap();
                scene.sim.add(&SimFunction::root_port(address(PORT)).no_extended_capabilities()).unwrap();
                scene.sim.add(&Scene::disk()).unwrap();
                scene.sim.add(&neighbour().group(1)).unwrap();
                scene
            },
            "-device pcie-root-port",
        ),
        (
            "interrupts",
            || Scene::new().write("proc/interrupts", " 0: 42 IO-APIC 2-edge timer\n"),
            "intremap=on",
        ),
        (
            "reserved",
            || {
                Scene::new()
                    .write("sys/kernel/iommu_groups/1/reserved_regions", "0xbf000000 0xbf7fffff direct\n")
            },
            "without memory reserved",
        ),
        ("dead", || Scene::with(Scene::disk().config(vec![0xff; 4096])), "add it again"),
        ("BAR", || Scene::with(Scene::disk().bar(0, BarKind::Memory64, false, 0, 0x4000)), "pref64-reserve"),
        (
            "no reset",
            || {
                let scene = Scene::with(Scene::disk().resets(""));
                let other = SimFunction::nvme(address("0000:01:03.0")).group(9).below(address(PORT));
                scene.sim.add(&other).unwrap();
                scene
            },
            "root port of its own in this virtual machine",
        ),
    ];
    for (fault, scene, expect) in faults {
        for (sign, text) in signs {
            let scene = scene();
            assert!(!scene.explain().blockers[0].remedy.contains(expect), "{fault}");
            let readiness = scene.write(sign, text).explain();
            let remedy = &readiness.blockers[0].remedy;
            assert!(remedy.contains(expect), "{fault}, {sign}: no `{expect}` in {remedy}");
            for absent in ["firmware setup", "card", "slot"] {
                assert!(!remedy.contains(absent), "{fault}: `{absent}` in {remedy}");
            }
        }
    }
}

#[test]
fn huge_pages_too_few() {
    const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let scene = |pages: RamPages, pool: &[(&str, u64)]| {
        let mut scene = Scene::new().write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1 kB\n");
        scene.options = ExplainOptions::for_memory(1 << 30);
        scene.options.pages = pages;
        pool.iter()
            .fold(scene, |scene, (name, pages)| scene.write(&format!("{POOL}/{name}"), &pages.to_string()))
    };
    let huge = RamPages::Huge(2 << 20);
    let check = |pool: &[(&str, u64)], has: &str, make: &str| {
        let evidence = &["1 GiB of RAM take 512 huge pages of 2 MiB", has];
        scene(huge, pool).check(
            Code::HugePagesTooFew,
            Blocks,
            evidence,
            &[make, "hugepages-2048kB/nr_hugepages"],
        );
    };
    check(&[("nr_hugepages", 0), ("free_hugepages", 0)], "has 0 that are free", "echo 512 >");
    check(&[("nr_hugepages", 600), ("free_hugepages", 511)], "has 511 that are free", "echo 601 >");
    let reserved = [("nr_hugepages", 600), ("free_hugepages", 600), ("resv_hugepages", 100)];
    check(&reserved, "has 500 that are free", "echo 612 >");
    let enough = [("nr_hugepages", 512), ("free_hugepages", 512), ("resv_hugepages", 0)];
    assert_eq!(scene(huge, &enough).explain().blockers, []);
    let more = [
        ("nr_hugepages", 0),
        ("free_hugepages", 0),
        ("nr_overcommit_hugepages", 600),
        ("surplus_hugepages", 88),
    ];
    assert_eq!(scene(huge, &more).explain().blockers, []);
    assert_eq!(scene(RamPages::HugeReserved, &[]).explain().blockers, []);
    let none = &["there is no", "hugepages-1048576kB", "1 GiB"];
    scene(RamPages::Huge(1 << 30), &enough).check(Code::HugePagesTooFew, Blocks, none, &["another size"]);
}

#[test]
fn memlock_too_low() {
    let limited = |limit, capabilities| {
        let scene = Scene::new();
        scene.sim.set_memlock(Some(limit)).unwrap();
        scene.sim.set_credentials(0, 0, capabilities).unwrap();
        scene
    };
    const DAC_OVERRIDE: u64 = 1 << 1;
    const IPC_LOCK: u64 = 1 << 14;
    limited(8 << 20, DAC_OVERRIDE).check(
        Code::MemlockTooLow,
        Blocks,
        &["needs 1 GiB locked", "allows 8 MiB", "iommufd counts"],
        &["ulimit -l 1048576", "LimitMEMLOCK=infinity"],
    );
    assert_eq!(limited(1 << 30, DAC_OVERRIDE).explain().blockers, []);
    assert_eq!(limited(8 << 20, IPC_LOCK | DAC_OVERRIDE).explain().blockers, []);
    // What is locked already counts too.
    let scene = limited(1 << 30, DAC_OVERRIDE);
    let status = format!("Uid: 0 0 0 0\nVmLck:\t 1024 kB\nCapEff:\t{DAC_OVERRIDE:016x}\n");
    scene.write("proc/self/status", &status).check(
        Code::MemlockTooLow,
        Blocks,
        &["1 MiB locked already"],
        &[],
    );
}

#[test]
fn unchecked() {
    for path in ["proc/self/mountinfo", "proc/net/route", "proc/self/limits", "proc/cpuinfo"] {
        Scene::new().delete(path).check(Code::Unchecked, Warns, &[path, "no such file"], &["as root"]);
    }
    // A Linux kernel that can't swap has no such file.
    assert_eq!(Scene::new().delete("proc/swaps").explain().blockers, []);
}

#[test]
fn all_at_once() {
    let gpu = SimFunction::gpu(address(DISK)).driver("nouveau").boot_display(true).resets("");
    let scene =
        Scene::with(gpu).delete("sys/bus/pci/drivers/vfio-pci").delete("dev/vfio").delete("dev/iommu");
    let audio = SimFunction::new(address("0000:01:00.1"), 0x10de, 0x22ba, 0x04_0300);
    scene.sim.add(&audio.group(1).power_state("D3cold").driver("snd_hda_intel")).unwrap();
    scene.sim.add(&neighbour().group(1).driver("e1000e")).unwrap();
    let readiness = scene.explain();
    let codes: Vec<_> = readiness.blockers.iter().map(|blocker| blocker.code.as_str()).collect();
    assert_eq!(
        codes,
        [
            "group-not-viable",
            "vfio-pci-unavailable",
            "vfio-node-missing",
            "boot-display",
            "no-reset",
            "d3cold"
        ],
        "{readiness}"
    );
    let text = readiness.to_string();
    for part in [
        ": not ready, 5 blockers, 1 warning\n  goes with 0000:01:00.1\n  driver  vfio-pci, as no variant",
        "\n  blocker boot-display: the host's console is on it\n    found   ",
        "\n  warning d3cold of 0000:01:00.1: it is switched off\n    found   ",
        "\n    remedy  ",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn text_is_of_as_many_lines_as_there_are_findings() {
    let blocker = Blocker {
        code: Code::InUse,
        severity: Blocks,
        function: address(DISK),
        evidence: "process 7 (\x1b[2J\n  ready) has it".into(),
        remedy: "kill 7".into(),
    };
    let line = "process 7 (\u{fffd}[2J\u{fffd}  ready) has it";
    assert_eq!(blocker.to_string(), format!("{DISK} in-use: {line}; kill 7"));
    let name = "a\tdisk".into();
    let readiness = Readiness {
        address: address(DISK),
        name,
        functions: vec![address(DISK)],
        drivers: vec![],
        blockers: vec![blocker],
    };
    assert_eq!(
        readiness.to_string(),
        format!(
            "{DISK} a\u{fffd}disk: not ready, 1 blocker\n  blocker in-use: processes have it open\n    \
             found   {line}\n    remedy  kill 7"
        )
    );
}

/// What a claim heeds without `force`; what only a guest minds is reported again when it gets one.
#[test]
fn what_keeps_from_a_claim() {
    let kept: Vec<_> =
        Code::ALL.iter().filter(|code| code.keeps_from_claim()).map(|code| code.as_str()).collect();
    assert_eq!(
        kept,
        [
            "not-an-endpoint",
            "not-responding",
            "no-iommu",
            "group-not-viable",
            "vfio-pci-unavailable",
            "permission",
            "boot-display",
            "mounted-disk",
            "default-route",
            "in-use",
            "in-use-shared",
            "claimed",
            "vfs-in-use",
            "vgpu-function",
            "vgpus-in-use",
            "mig-in-use",
        ]
    );
}

#[test]
fn codes_are_stable_names() {
    let names: BTreeSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(names.len(), Code::ALL.len());
    for name in names {
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'));
    }
}

#[test]
fn missing_functions_are_an_error() {
    let scene = Scene::new();
    let missing = address("0000:77:00.0");
    let error = explain(&scene.sim.plain_host(), missing, &scene.options).unwrap_err().to_string();
    assert!(error.contains("0000:77:00.0"), "{error}");
}

#[test]
fn memory_is_laid_around_the_hole() {
    for (bytes, expect) in [
        (0, vec![]),
        (1 << 30, vec![0..=0x3fff_ffff]),
        (3 << 30, vec![0..=0xbfff_ffff]),
        (4 << 30, vec![0..=0xbfff_ffff, 0x1_0000_0000..=0x1_3fff_ffff]),
    ] {
        let options = ExplainOptions::for_memory(bytes);
        assert_eq!(options.ram, expect);
        assert_eq!(options.memory(), bytes);
    }
    ExplainOptions::for_memory(u64::MAX).memory();
}

#[test]
fn this_machine() {
    let host = Host::system();
    for function in crate::pci::scan(&host).unwrap_or_default() {
        let readiness = Explainer::new(&host).explain_function(function, &ExplainOptions::default()).unwrap();
        assert!(readiness.blockers.iter().all(|b| !b.evidence.is_empty() && !b.remedy.is_empty()));
    }
}
