//! What a guest needs for all of its devices together.

use super::*;
use crate::pci::placement::{self, BarRequest, FunctionRequest};

const HIGH: u64 = 0x100_0000_0000;

/// The disk with another BAR.
fn bar(kind: BarKind, prefetchable: bool, size: u64) -> Scene {
    Scene::with(Scene::disk().bar(2, kind, prefetchable, HIGH, size))
}

#[test]
fn bars_too_large() {
    let evidence = &["46 address bits", "BAR 2: 0x400000000000 bytes", "take 64 TiB"];
    bar(BarKind::Memory64, true, 64 << 40).check(Code::BarsTooLarge, Blocks, evidence, &["phys-bits=47"]);
    bar(BarKind::Memory32, true, 1 << 30).check(
        Code::BarsTooLarge,
        Blocks,
        &["0xc0000000 to 0xe0000000", "1 GiB"],
        &["window below 4 GiB"],
    );
    assert_eq!(bar(BarKind::Memory64, true, 32 << 40).explain().blockers, []);
    // The guest's CPU may have fewer bits than the host's.
    let mut narrow = bar(BarKind::Memory64, true, 256 << 30);
    assert_eq!(narrow.explain().blockers, []);
    narrow.options.physical_address_bits = Some(38);
    narrow.check(Code::BarsTooLarge, Blocks, &["the guest's CPU has 38"], &["phys-bits=39"]);
    // More than any CPU addresses.
    bar(BarKind::Memory64, true, 1 << 60).check(Code::BarsTooLarge, Blocks, &[], &["no CPU has"]);
    // Hostile: sizes that no BAR has.
    let resource = "0x1 0xfffffffffffffffe 0x140200\n".repeat(6);
    let scene = Scene::new();
    scene.sim.set(address(DISK), "resource", &resource).unwrap();
    scene.check(Code::BarsTooLarge, Blocks, &["which no BAR has"], &["can't be"]);
    let mut window = Scene::new();
    window.options.mmio32 = 0..=1 << 33;
    window.check(Code::BarsTooLarge, Blocks, &["above 4 GiB"], &["another window"]);
}

/// A port forwards above 4 GiB only what may be prefetched, so a 64-bit BAR alone is not enough.
#[test]
fn a_wide_bar_that_is_not_prefetchable_goes_below_4_gib() {
    let mut scene = bar(BarKind::Memory64, false, 2 << 30);
    let evidence = &["BAR 2: 0x80000000 bytes", "below 4 GiB", "a 64-bit BAR that is not prefetchable"];
    scene.check(Code::BarsTooLarge, Blocks, evidence, &["window below 4 GiB"]);
    // On a root bus there is no port.
    scene.options.behind_ports = false;
    assert_eq!(scene.explain().blockers, []);
    assert_eq!(bar(BarKind::Memory64, false, 256 << 20).explain().blockers, []);
}

/// The verdicts on these functions, in a guest that has them all.
fn together(scene: &Scene, functions: &[&str]) -> Vec<Readiness> {
    let host = scene.sim.plain_host();
    let read = |text: &&str| crate::pci::read_function(&host, address(text)).unwrap();
    let functions: Vec<_> = functions.iter().map(read).collect();
    let functions: Vec<_> = functions.iter().collect();
    let readiness = Explainer::new(&host).explain_guest(&functions, &scene.options).unwrap();
    // What is ready is placed, and what is not is not.
    let windows = scene.options.windows(Some(46));
    let mut requests = scene.options.emulated.clone();
    requests
        .extend(functions.iter().map(|function| FunctionRequest::of(function, scene.options.behind_ports)));
    let placed = placement::plan(&requests, &windows);
    assert_eq!(placed.is_ok(), readiness.iter().all(Readiness::is_ready), "{placed:?} {readiness:?}");
    readiness
}

/// Those that are blocked.
fn blocked(readiness: &[Readiness]) -> Vec<String> {
    let blocked = readiness.iter().filter(|readiness| !readiness.is_ready());
    blocked.map(|readiness| readiness.address.to_string()).collect()
}

#[test]
fn functions_that_fit_only_alone() {
    let scene = Scene::without_disk();
    let addresses: Vec<_> = (1..=9).map(|bus| format!("0000:{bus:02x}:00.0")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    for text in &addresses {
        let card = SimFunction::network(address(text)).driver("e1000e");
        scene.sim.add(&card.bar(0, BarKind::Memory32, false, 0x8000_0000, 64 << 20)).unwrap();
    }
    for text in &addresses {
        assert_eq!(blocked(&together(&scene, &[text])), [""; 0]);
    }
    assert_eq!(blocked(&together(&scene, &addresses[..8])), [""; 0]);
    let readiness = together(&scene, &addresses);
    assert_eq!(blocked(&readiness), ["0000:09:00.0"]);
    let first = readiness[8].first_blocker().unwrap();
    assert_eq!(first.code, Code::BarsTooLarge);
    for part in ["lacks 64 MiB", "beside those of 0000:01:00.0, 0000:02:00.0"] {
        assert!(first.evidence.contains(part), "no `{part}` in {first:?}");
    }
}

#[test]
fn ports_and_emulated_devices_take_room_too() {
    let mut scene = Scene::new();
    let other = "0000:02:00.0";
    scene.sim.add(&SimFunction::network(address(other)).driver("e1000e")).unwrap();
    // 16 KiB and 128 KiB, but a port forwards whole MiB.
    scene.options.mmio32 = 0xc000_0000..=0xc00f_ffff;
    assert_eq!(blocked(&together(&scene, &[DISK, other])), [other]);
    scene.options.behind_ports = false;
    assert_eq!(blocked(&together(&scene, &[DISK, other])), [""; 0]);
    let bar = |size| vec![BarRequest { index: 0, size, wide: false, prefetchable: false, io: false }];
    let emulated = |size| FunctionRequest { name: "a disk".into(), slot: None, bars: bar(size) };
    scene.options.emulated = vec![emulated(0x1000)];
    assert_eq!(blocked(&together(&scene, &[DISK, other])), [""; 0]);
    scene.options.emulated = vec![emulated(1 << 20)];
    assert_eq!(blocked(&together(&scene, &[DISK, other])), [other]);
    // What does not fit is the VMM's own: the first is reported.
    scene.options.emulated = vec![emulated(2 << 20)];
    let readiness = together(&scene, &[DISK, other]);
    assert_eq!(blocked(&readiness), [DISK]);
    assert!(readiness[0].blockers[0].evidence.contains("the BARs of a disk"), "{readiness:?}");
}

#[test]
fn companions_that_the_guest_does_not_get_take_no_room() {
    let scene = Scene::new();
    let companion = SimFunction::network(address("0000:01:00.1")).group(1).below(address(PORT));
    scene.sim.add(&companion.bar(0, BarKind::Memory32, false, 0x8000_0000, 1 << 30)).unwrap();
    let readiness = scene.explain();
    assert_eq!(readiness.blockers, [], "{readiness}");
    assert_eq!(readiness.functions.len(), 2);
    assert_eq!(blocked(&together(&scene, &[DISK, "0000:01:00.1"])), ["0000:01:00.1"]);
}

#[test]
fn open_files_too_low() {
    let limited = |files: u64| {
        let text = format!(
            "Max open files            {files}  524288  files\nMax locked memory  unlimited  x  bytes\n"
        );
        Scene::new().write("proc/self/limits", &text)
    };
    // The disk has 32 vectors.
    assert_eq!(limited(320).explain().blockers, []);
    limited(319).check(
        Code::OpenFilesTooLow,
        Blocks,
        &["32 interrupt vectors", "320 open files", "/self/limits allows 319"],
        &["* - nofile 320", "LimitNOFILE=320"],
    );
    let mut scene = limited(319);
    scene.options.open_files = 255;
    assert_eq!(scene.explain().blockers, []);
    // Those of all its devices count, and are reported once.
    let scene = limited(383);
    let other = "0000:02:00.0";
    scene.sim.add(&SimFunction::network(address(other)).driver("e1000e")).unwrap();
    let host = scene.sim.plain_host();
    let read = |text| crate::pci::read_function(&host, address(text)).unwrap();
    let readiness =
        Explainer::new(&host).explain_guest(&[&read(DISK), &read(other)], &scene.options).unwrap();
    assert_eq!(blocked(&readiness), [DISK]);
    assert!(readiness[0].blockers[0].evidence.contains("64 interrupt vectors"), "{readiness:?}");
    // MSI alone: 8 messages.
    let message = SimFunction::new(address(DISK), 0x8086, 1, 0x01_0802).capability(0x05, &[0x06; 8]).group(1);
    let limits = "Max open files            271  271  files\nMax locked memory  unlimited  x  bytes\n";
    let readiness = Scene::with(message.below(address(PORT))).write("proc/self/limits", limits).explain();
    let found = readiness.blockers.iter().find(|blocker| blocker.code == Code::OpenFilesTooLow);
    assert!(found.is_some_and(|found| found.evidence.contains("8 interrupt vectors")), "{readiness}");
}

/// The text on bridges is for a function with a 64-bit BAR that is not prefetchable, behind a port.
#[test]
fn other_bars_below_4_gib_are_not_explained_by_the_port() {
    let card = SimFunction::network(address(DISK)).below(address(PORT));
    let card = Scene::with(card.bar(0, BarKind::Memory32, false, 0x9000_0000, 1 << 30));
    // The disk has a 64-bit BAR that is not prefetchable.
    let mut disk = bar(BarKind::Memory32, false, 1 << 30);
    disk.options.behind_ports = false;
    for scene in [card, disk] {
        scene.check(Code::BarsTooLarge, Blocks, &["below 4 GiB"], &["window below 4 GiB"]);
        assert!(!scene.explain().blockers[0].evidence.contains("64-bit BAR"));
    }
}

/// The verdicts on two functions, in a guest that has both.
fn of_both(scene: &Scene, functions: [PciAddress; 2]) -> Vec<Readiness> {
    let host = scene.sim.plain_host();
    let [first, second] = functions.map(|function| crate::pci::read_function(&host, function).unwrap());
    Explainer::new(&host).explain_guest(&[&first, &second], &scene.options).unwrap()
}

/// Warnings of the disk about a BAR of another card that its IOMMU cannot address.
fn beyond_iommu(scene: &Scene, size: u64) -> Vec<String> {
    let other = SimFunction::network(address("0000:02:00.0")).bar(2, BarKind::Memory64, true, HIGH, size);
    scene.sim.add(&other).unwrap();
    let readiness = of_both(scene, [DISK, "0000:02:00.0"].map(address));
    let found = readiness[0].blockers.iter().filter(|found| found.code == Code::IovaTooWide);
    found.map(|found| found.evidence.clone()).collect()
}

#[test]
fn bars_of_peers_that_the_iommu_cannot_address() {
    // The IOMMU translates 39 bits: a BAR that ends at 512 GiB is within, one that begins there is not.
    assert_eq!(beyond_iommu(&Scene::new(), 256 << 30), [""; 0]);
    let [found] = &beyond_iommu(&Scene::new(), 512 << 30)[..] else { panic!("one") };
    assert!(
        found.contains("39 bits") && found.contains("BAR 2 of 0000:02:00.0 (at 0x8000000000)"),
        "{found}"
    );
    // AMD's translates 64.
    let wide = Scene::new()
        .delete("sys/devices/virtual/iommu/dmar0/intel-iommu")
        .write("sys/devices/virtual/iommu/dmar0/amd-iommu/features", "800\n");
    assert_eq!(beyond_iommu(&wide, 512 << 30), [""; 0]);
}

#[test]
fn full_vector_tables_take_open_files_of_all_functions() {
    for (files, is_enough) in [(8447, false), (8448, true)] {
        let scene = Scene::without_disk();
        let cards = ["0000:01:00.0", "0000:02:00.0"].map(address);
        for card in cards {
            // 2048 vectors.
            let table = [0xff, 0x07, 0x00, 0x20, 0x00, 0x00, 0x00, 0x30, 0x00, 0x00];
            let card = SimFunction::new(card, 0x8086, 0x1592, 0x02_0000).express(0).capability(0x11, &table);
            scene.sim.add(&card.group(1)).unwrap();
        }
        let limits =
            format!("Max open files  {files}  524288  files\nMax locked memory  unlimited  x  bytes\n");
        let scene = scene.write("proc/self/limits", &limits);
        let readiness = of_both(&scene, cards);
        let found = readiness[0].blockers.iter().find(|found| found.code == Code::OpenFilesTooLow);
        assert_eq!(found.is_none(), is_enough, "{files}");
        assert!(found.is_none_or(|found| found.evidence.contains("4096 interrupt vectors")), "{found:?}");
    }
}

/// A guest that runs has windows of fixed sizes, which it gets as it starts.
#[test]
fn functions_without_room_in_a_slot_are_for_the_start() {
    let mut scene = bar(BarKind::Memory32, false, 1 << 30);
    scene.options.slot = Some(Windows { low: 0xc000_0000..0xd000_0000, high: 0..0, io: 0..0 });
    let evidence = &["0xc0000000 to 0xd0000000", "1 GiB"];
    scene.check(Code::BarsTooLarge, Blocks, evidence, &["have the guest start with it"]);
}
