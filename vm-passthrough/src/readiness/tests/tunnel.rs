//! Functions behind a USB4 tunnel.

use super::*;
use crate::usb4::Route;

/// A GPU behind a tunnel, in an authorised router.
fn scene(gpu: SimFunction, domain: &[(&str, &str)]) -> Scene {
    let scene = Scene::with(gpu.below(address(PORT))).write("proc/sys/kernel/osrelease", "6.18.0\n");
    scene.sim.set(address(DISK), "removable", "removable\n").unwrap();
    scene.sim.add_domain(0, None, domain).unwrap();
    let router = [
        ("authorized", "1\n"),
        ("vendor_name", "Core\n"),
        ("device_name", "Box\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    scene.sim.add_router(Route { domain: 0, path: 1 }, &router).unwrap();
    scene
}

fn gpu() -> SimFunction {
    SimFunction::gpu(address(DISK))
}

#[test]
fn it_may_be_pulled_out() {
    let evidence = ["Linux says so", "0-1 Core Box (inferred), whose link has 40 Gb/s", "the tunnel's own"];
    scene(gpu(), &[]).check(Code::Tunnelled, Warns, &evidence, &["egpu info"]);
    // Authorised, but by an older Linux.
    let old = scene(gpu(), &[]).write("proc/sys/kernel/osrelease", "6.12.1\n");
    let found: Vec<_> = old.explain().blockers.iter().map(|found| found.code).collect();
    assert!(found.iter().all(|code| *code == Code::Tunnelled), "{found:?}");
    // Any of two routers may lead to it.
    let two = scene(gpu(), &[]);
    two.sim.add_router(Route { domain: 0, path: 3 }, &[("authorized", "1\n")]).unwrap();
    two.check(Code::Tunnelled, Warns, &["in one of 2 routers; the link"], &["egpu info"]);
    // Plugged in by other means.
    let plain = Scene::with(gpu().below(address(PORT))).explain();
    assert!(!plain.blockers.iter().any(|found| found.code == Code::Tunnelled), "{plain}");
}

#[test]
fn what_else_it_suffers() {
    fn check(scene: &Scene, code: Code, evidence: &[&str], remedy: &[&str]) {
        let readiness = scene.explain();
        assert!(readiness.is_ready(), "{readiness}");
        let found: Vec<_> = readiness.blockers.iter().filter(|found| found.code != Code::Tunnelled).collect();
        let [found] = found[..] else { panic!("{readiness}") };
        assert_eq!((found.code, found.severity), (code, Warns));
        assert!(evidence.iter().all(|part| found.evidence.contains(part)), "{readiness}");
        assert!(remedy.iter().all(|part| found.remedy.contains(part)), "{readiness}");
    }
    let unprotected = scene(gpu(), &[("iommu_dma_protection", "0\n")]);
    check(&unprotected, Code::DmaUnprotected, &["domain0"], &["Kernel DMA Protection"]);
    let protected = scene(gpu(), &[("iommu_dma_protection", "1\n")]);
    protected.check(Code::Tunnelled, Warns, &[], &[]);
    // 2^8 to 2^14 MiB, of which it has the least.
    let small = gpu().bar(1, BarKind::Memory64, true, 0x40_0000_0000, 256 << 20).resizable(1, 0x7f << 8);
    check(&scene(small, &[]), Code::BarNotResized, &["BAR 1 has 256 MiB", "16 GiB"], &["host_reset=0"]);
    let large = gpu().bar(1, BarKind::Memory64, true, 0x40_0000_0000, 16 << 30).resizable(1, 0x7f << 8);
    scene(large, &[]).check(Code::Tunnelled, Warns, &[], &[]);
    let bound = scene(gpu().driver("nvidia"), &[]);
    let free = ["issue 894", "waited for 10 s", "no process of the host holds it now"];
    let instead = ["nvidia-persistenced", "options vfio-pci ids=10de:", "softdep nvidia pre: vfio-pci"];
    check(&bound, Code::UnbindMayHang, &free, &instead);
    // An identical card of the host would be taken too.
    let twin = scene(gpu().driver("nvidia"), &[]);
    twin.sim.add(&SimFunction::gpu(address("0000:05:00.0")).driver("nvidia").group(5)).unwrap();
    check(&twin, Code::UnbindMayHang, &[], &["0000:05:00.0 has the same ID 10de:2684", "driver_override"]);
    assert!(!twin.explain().to_string().contains("ids="));
    // Who holds it is named: the node is that of the driver's own number of the GPU.
    let information = format!("proc/driver/nvidia/gpus/{DISK}/information");
    let held = bound.write(&information, "Device Minor: \t 3\n").write("proc/4711/comm", "nvidia-persiste\n");
    std::fs::create_dir_all(held.sim.path("proc/4711/fd")).unwrap();
    std::os::unix::fs::symlink(held.sim.path("dev/nvidia3"), held.sim.path("proc/4711/fd/3")).unwrap();
    let found = held.explain().blockers;
    let evidence = &found.iter().find(|found| found.code == Code::UnbindMayHang).unwrap().evidence;
    assert!(evidence.contains("now process 4711 (nvidia-persiste) has "), "{evidence}");
}

/// A GPU without an address for BAR 1, behind a switch whose port has the windows.
fn unassigned(memory: (u64, u64), prefetchable: (u64, u64)) -> Scene {
    let scene = Scene::without_disk().write("proc/sys/kernel/osrelease", "6.18.0\n");
    let switch = SimFunction::root_port(address("0000:00:02.0")).below(address(PORT));
    scene.sim.add(&switch.windows(memory, prefetchable)).unwrap();
    let gpu = SimFunction::gpu(address(DISK)).bar(1, BarKind::Memory64, true, 0, 256 << 20);
    scene.sim.add(&gpu.below(address("0000:00:02.0"))).unwrap();
    scene.sim.set(address(DISK), "removable", "removable\n").unwrap();
    scene
}

/// The one blocker of a scene, as evidence and fix; diagnosis of the enclosure has the same.
fn unassigned_texts(scene: &Scene) -> (String, String) {
    let readiness = scene.explain();
    let found = readiness.blockers.iter().find(|found| found.code == Code::BarUnassigned).unwrap();
    assert_eq!((found.severity, found.function), (Blocks, address(DISK)), "{readiness}");
    let diagnosed = unassigned_bars(&scene.sim.plain_host(), address(DISK)).unwrap();
    assert_eq!((&diagnosed.evidence, &diagnosed.fix), (&found.evidence, &found.remedy));
    (diagnosed.evidence, diagnosed.fix)
}

#[test]
fn a_bar_without_a_window_names_the_port() {
    const MEMORY: (u64, u64) = (0x9000_0000, 128 << 20);
    // The GPU has 288 MiB of prefetchable BARs, of which BAR 1 has no address.
    let check = |prefetchable, evidence: &str| {
        let (found, fix) = unassigned_texts(&unassigned(MEMORY, prefetchable));
        assert!(found.contains("BAR 1 (256 MiB)") && found.contains(evidence), "{found}");
        assert!(!found.contains("above it also"), "{found}");
        assert!(fix.contains("another port of the host"), "{fix}");
        assert!(fix.contains("pci=realloc,hpmmioprefsize=256M"), "{fix}");
        assert!(!fix.contains("4G") && !fix.contains("hpmmiosize"), "{fix}");
    };
    check((0, 0), "port 0000:00:02.0 above it has no prefetchable window");
    check((0x40_0000_0000, 64 << 20), "port 0000:00:02.0 above it has a prefetchable window of 64 MiB");
    // The command line asks for enough, and the firmware has the last word.
    let tried = unassigned(MEMORY, (0, 0)).write("proc/cmdline", "pci=realloc,hpmmioprefsize=1G\n");
    let (found, fix) = unassigned_texts(&tried);
    assert!(found.contains("/proc/cmdline has pci=realloc,hpmmioprefsize=1G"), "{found}");
    assert!(fix.contains("update the firmware") && !fix.contains("pci="), "{fix}");
    // Too small an option is replaced.
    let less = unassigned(MEMORY, (0, 0)).write("proc/cmdline", "pci=realloc pci=hpmmioprefsize=8M\n");
    assert!(unassigned_texts(&less).1.ends_with("pci=hpmmioprefsize=256M"));
    // No port is to blame where the windows have room, if just enough.
    for room in [288 << 20, 64 << 30] {
        let (found, fix) = unassigned_texts(&unassigned(MEMORY, (0x40_0000_0000, room)));
        assert!(!found.contains("above it"), "{found}");
        assert!(fix.contains("before the host boots") && !fix.contains("4G"), "{fix}");
    }
    // The non-prefetchable window is another: for all but 64-bit prefetchable BARs.
    for (kind, prefetchable) in
        [(BarKind::Memory32, false), (BarKind::Memory32, true), (BarKind::Memory64, false)]
    {
        let low = unassigned((0, 0), (0x40_0000_0000, 64 << 30));
        let resource = SimFunction::gpu(address(DISK)).bar(0, kind, prefetchable, 0, 64 << 20).resource();
        low.sim.set(address(DISK), "resource", &resource).unwrap();
        let (found, fix) = unassigned_texts(&low);
        assert!(found.contains("port 0000:00:02.0 above it has no non-prefetchable window"), "{found}");
        assert!(fix.contains("pci=realloc,hpmmiosize=64M"), "{fix}");
    }
}

#[test]
fn options_of_the_kernel_command_line_that_suffice_are_not_repeated() {
    for (cmdline, wanted) in [
        ("pci=nomsi", "pci=realloc,hpmmioprefsize=256M"),
        ("pci=realloc=off", "pci=realloc,hpmmioprefsize=256M"),
        ("pci=realloc=on", "pci=hpmmioprefsize=256M"),
        ("pci=hpmmioprefsize=256M", "pci=realloc"),
        ("pci=hpmmioprefsize=255M", "pci=realloc,hpmmioprefsize=256M"),
        ("pci=realloc,hpmmioprefsize=256M", ""),
        ("pci=realloc=on pci=hpmmioprefsize=262144k", ""),
        ("pci=realloc,hpmmioprefsize=262143K", "pci=hpmmioprefsize=256M"),
        ("pci=realloc,hpmmioprefsize=268435456", ""),
    ] {
        let scene = unassigned((0x9000_0000, 128 << 20), (0, 0)).write("proc/cmdline", cmdline);
        let (_, fix) = unassigned_texts(&scene);
        let found = fix.find("pci=").map_or("", |at| &fix[at..]);
        assert_eq!(found, wanted, "{cmdline}: {fix}");
    }
}

#[test]
fn all_ports_with_too_little_are_named() {
    for (ports, evidence) in [
        (&["0000:00:01.0", "0000:00:02.0"][..], "(0000:00:01.0 above it also has too little)"),
        (
            &["0000:00:01.0", "0000:00:02.0", "0000:00:03.0"],
            "(0000:00:02.0, 0000:00:01.0 above it also have too little)",
        ),
    ] {
        let sim = SimHost::new().unwrap();
        let mut above = None;
        for port in ports {
            let port = SimFunction::root_port(address(port)).windows((0x9000_0000, 128 << 20), (0, 0));
            let port = above.into_iter().fold(port, SimFunction::below);
            sim.add(&port).unwrap();
            above = Some(port.address());
        }
        let gpu = gpu().bar(1, BarKind::Memory64, true, 0, 256 << 20);
        sim.add(&above.into_iter().fold(gpu, SimFunction::below)).unwrap();
        let (found, _) = unassigned_texts(&Scene { sim, options: ExplainOptions::default() });
        assert!(found.contains(evidence), "{found}");
    }
}
