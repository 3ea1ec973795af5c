//! What isolates a function from the host and its neighbors.

use super::*;

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

#[test]
fn group_not_viable() {
    let scene = shared_group(neighbour().driver("e1000e"));
    scene.check(
        Code::GroupNotViable,
        Blocks,
        &["0000:02:00.0 (Intel", "driver e1000e", "group 1"],
        &["--with-group", "echo 0000:02:00.0 > ", "drivers/e1000e/unbind"],
    );
    assert!(!scene.explain().blockers[0].remedy.contains("bridge"));
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

/// A claim of the whole group leaves bridges with the host, so devices behind them are no obstacle.
#[test]
fn the_whole_group_may_be_given_though_the_host_uses_what_is_behind_its_bridge() {
    let scene = shared_group(neighbour().driver("e1000e"));
    let (bridge, nic) = (address("0000:00:03.0"), address("0000:03:00.0"));
    scene.sim.add(&SimFunction::root_port(bridge).group(1)).unwrap();
    scene.sim.add(&SimFunction::network(nic).below(bridge).group(9).driver("e1000e")).unwrap();
    scene.sim.add_child(nic, "net", "net/eth0", &[]).unwrap();
    let route = "Iface Destination\neth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
    let scene = scene.write("proc/net/route", route);
    scene.check(Code::GroupNotViable, Blocks, &["0000:02:00.0"], &["--with-group", "drivers/e1000e/unbind"]);
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
