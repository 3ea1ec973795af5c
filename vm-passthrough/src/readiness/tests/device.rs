//! The function itself: its type, power state, resets and BARs.

use super::*;

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
    // Up to four are named.
    for (function, evidence) in [
        ("0000:01:00.3", "0000:01:00.1 (nvme), 0000:01:00.3 (nvme)"),
        ("0000:01:00.4", ""),
        (
            "0000:01:00.5",
            "with drivers: 0000:01:00.1 (nvme), 0000:01:00.3 (nvme), 0000:01:00.4 (nvme), 0000:01:00.5 (nvme)",
        ),
        ("0000:01:00.6", "0000:01:00.4 (nvme) and 2 more up to 0000:01:00.6 (nvme) have drivers"),
        ("0000:01:00.7", "0000:01:00.4 (nvme) and 3 more up to 0000:01:00.7 (nvme) have drivers"),
    ] {
        let virtual_function = SimFunction::nvme(address(function)).virtual_of(address(DISK)).group(50);
        scene.sim.add(&virtual_function.driver("nvme")).unwrap();
        scene.check(Code::VfsInUse, Blocks, &[evidence], &[]);
    }
}

#[test]
fn d3cold() {
    let scene = Scene::with(Scene::disk().power_state("D3cold"));
    let control = "echo on > ";
    scene.check(Code::D3cold, Warns, &["power_state is D3cold", "suspended"], &[control, "power/control"]);
    scene.sim.set(address(DISK), "power/runtime_status", "active\n").unwrap();
    scene.check(Code::D3cold, Blocks, &["runtime_status is active"], &[control]);
    assert_eq!(Scene::with(Scene::disk().power_state("D3hot")).explain().blockers, []);
    // vfio-pci suspends idle devices by default.
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
    let by_port = &["reset_method is missing or empty", "reset by its port 0000:00:01.0"];
    Scene::with(none()).check(Code::NoReset, Warns, by_port, &["nothing"]);
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
    // A BAR without a size needs no address.
    let host = Scene::new().sim.plain_host();
    let facts = HostFacts::read(&host);
    for (size, is_missing) in [(0, false), (0x4000, true)] {
        let bar = pci::Bar { index: 0, kind: BarKind::Memory32, prefetchable: false, address: 0, size };
        let found = crate::readiness::windows::judge(&host, &facts, address(DISK), &[bar]);
        assert_eq!(found.is_some(), is_missing, "{size}");
    }
}
