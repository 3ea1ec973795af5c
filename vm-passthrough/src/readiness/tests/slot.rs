//! Functions of one slot in several IOMMU groups.

use super::*;

const AUDIO: &str = "0000:01:00.1";

/// A GPU in group 14, and an audio function of the same slot in group 15.
fn divided(gpu: SimFunction) -> Scene {
    let scene = Scene::with(gpu);
    let audio = SimFunction::new(address(AUDIO), 0x10de, 0x22ba, 0x04_0300).express(0).group(15);
    scene.sim.add(&audio.below(address(PORT)).driver("snd_hda_intel")).unwrap();
    scene
}

fn gpu() -> SimFunction {
    SimFunction::gpu(address(DISK)).below(address(PORT)).group(14)
}

/// Functions that a claim of `function` leaves with the host, where those of `claimed` are claimed too.
fn left(scene: &Scene, function: &str, claimed: &[&str]) -> Vec<String> {
    let host = scene.sim.plain_host();
    let function = pci::read_function(&host, address(function)).unwrap();
    let claimed: Vec<_> = claimed.iter().map(|text| address(text)).collect();
    left_with_host(&host, &function, &claimed).iter().map(|other| other.address.to_string()).collect()
}

#[test]
fn a_claim_leaves_functions_of_other_groups_with_the_host() {
    let scene = divided(gpu().sriov(4));
    for (function, group) in [
        (SimFunction::new(address("0000:01:00.2"), 0x10de, 0x1ad8, 0x0c_0330), 14),
        (SimFunction::new(address("0000:01:00.3"), 0x10de, 0x1ad9, 0x0c_8000), 16),
        (SimFunction::root_port(address("0000:01:00.5")), 18),
        (SimFunction::nvme(address("0000:01:03.0")), 19),
        (neighbour(), 20),
    ] {
        scene.sim.add(&function.group(group).below(address(PORT))).unwrap();
    }
    let virtual_function = SimFunction::nvme(address("0000:01:00.4")).virtual_of(address(DISK));
    scene.sim.add(&virtual_function.group(17).below(address(PORT))).unwrap();
    let check = |function, claimed: &[&str], expect: &[&str]| {
        assert_eq!(left(&scene, function, claimed), expect, "{function} with {claimed:?}");
    };
    check(DISK, &[], &[AUDIO, "0000:01:00.3"]);
    check(DISK, &[AUDIO, "0000:02:00.0"], &["0000:01:00.3"]);
    check(AUDIO, &[], &[DISK, "0000:01:00.2", "0000:01:00.3"]);
    check("0000:01:00.4", &[], &[]);
    check("0000:01:03.0", &[], &[]);
    // A function without a group has no IOMMU.
    assert_eq!(left(&divided(gpu().no_group()), DISK, &[]), [""; 0]);
}

/// Each function on a root bus is a device by itself.
#[test]
fn a_slot_of_a_root_bus_is_not_divided() {
    let scene = Scene::new();
    let (audio, ethernet) = ("0000:00:1f.3", "0000:00:1f.6");
    scene.sim.add(&SimFunction::new(address(audio), 0x8086, 0x51c8, 0x04_0380).group(14)).unwrap();
    scene.sim.add(&SimFunction::network(address(ethernet)).group(15)).unwrap();
    assert_eq!(left(&scene, audio, &[]), [""; 0]);
}

#[test]
fn a_divided_slot_is_reported() {
    let evidence = &[
        "a claim of 0000:01:00.0, in IOMMU group 14, leaves 0000:01:00.1 (NVIDIA",
        "driver snd_hda_intel, IOMMU group 15) with the host",
    ];
    let together = "vm-service claim 0000:01:00.0 0000:01:00.1 (";
    for (resets, how) in [
        ("flr bus", "by flr alone, as a reset of the bus would also reset 0000:01:00.1"),
        ("bus pm", "by pm alone"),
    ] {
        divided(gpu().resets(resets)).check(Code::SlotDivided, Warns, evidence, &[how, together]);
    }
    let mut scene = divided(gpu());
    scene.options.beside = vec![address(AUDIO)];
    assert_eq!(scene.explain().blockers, []);
}
