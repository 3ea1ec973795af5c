//! A card whose functions are in different IOMMU groups, as behind a port with ACS.

use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::capture::answers_alike;
use super::host::address;
use super::vm_service;

const GPU: &str = "0000:01:00.0";
const AUDIO: &str = "0000:01:00.1";

fn divided() -> SimHost {
    let sim = SimHost::new().expect("a simulated host");
    for driver in ["nvidia", "snd_hda_intel", "pcieport"] {
        sim.add_driver(driver).expect("a driver");
    }
    let port = address("0000:00:01.0");
    sim.add(&SimFunction::root_port(port).group(1).driver("pcieport")).expect("a port");
    let gpu = SimFunction::gpu(address(GPU)).below(port).group(14).driver("nvidia").resets("flr bus");
    sim.add(&gpu).expect("a function");
    let audio = SimFunction::new(address(AUDIO), 0x10de, 0x22ba, 0x04_0300).express(0).below(port).group(15);
    sim.add(&audio.driver("snd_hda_intel").resets("flr")).expect("a function");
    sim
}

#[test]
fn explain_names_what_a_claim_leaves_with_the_host() {
    let sim = divided();
    let got = vm_service(&sim.plain_host(), &format!("explain {GPU}"));
    assert_eq!((got.exit, got.err.as_str()), (0, ""), "{}", got.out);
    for part in [
        "warning slot-divided: functions of its slot are in other IOMMU groups, and stay with the host",
        "a claim of 0000:01:00.0, in IOMMU group 14, leaves 0000:01:00.1 (NVIDIA Corporation",
        "driver snd_hda_intel, IOMMU group 15) with the host",
        "it is reset by flr alone, as a reset of the bus would also reset 0000:01:00.1",
        "it stays powered while the host uses them",
        "vm-service claim 0000:01:00.0 0000:01:00.1",
    ] {
        assert!(got.out.contains(part), "{part}: {}", got.out);
    }
    // A guest with both leaves nothing.
    let guest = sim.path("guest.toml");
    let devices = format!("[[devices]]\naddress = \"{GPU}\"\n[[devices]]\naddress = \"{AUDIO}\"\n");
    let text = format!("name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n{devices}");
    std::fs::write(&guest, text).expect("written");
    let got = vm_service(&sim.plain_host(), &format!("explain --guest {}", guest.display()));
    assert!(got.exit == 0 && !got.out.contains("slot-divided"), "{}", got.out);
}

#[test]
fn a_fix_does_not_pass_what_the_host_uses() {
    let sim = divided();
    std::fs::create_dir_all(sim.path("proc/4242/fd")).expect("made");
    sim.write("proc/4242/comm", "pipewire\n").expect("written");
    let file = sim.device_dir(address(AUDIO)).expect("a function").join("resource0");
    std::os::unix::fs::symlink(file, sim.path("proc/4242/fd/3")).expect("linked");
    let got = vm_service(&sim.plain_host(), &format!("explain {GPU}"));
    assert!(got.out.contains("0000:01:00.1 must stay with the host (in-use: process 4242"), "{}", got.out);
    assert!(!got.out.contains("vm-service claim"), "{}", got.out);
}

#[test]
fn a_claim_names_what_it_leaves_with_the_host() {
    let sim = divided();
    let host = SimDrivers::new(&sim).host();
    let got = vm_service(&host, &format!("claim {GPU}"));
    assert_eq!((got.exit, got.err.as_str()), (0, ""));
    let expect = "0000:01:00.0 claimed, taken from nvidia\n\
                  0000:01:00.1 of the same slot stays with the host, on snd_hda_intel\n";
    assert_eq!(got.out, expect);
    assert_eq!(sim.driver_of(address(AUDIO)).as_deref(), Some("snd_hda_intel"));
    assert_eq!(vm_service(&host, &format!("release {GPU}")).exit, 0);
    // Named together, both are claimed.
    let got = vm_service(&host, &format!("claim {GPU} {AUDIO} --json"));
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!((&document["left"], got.exit), (&serde_json::json!([]), 0), "{document}");
    for function in [GPU, AUDIO] {
        assert_eq!(sim.driver_of(address(function)).as_deref(), Some("vfio-pci"));
    }
}

/// Consoles of the host are found in a capture, too.
#[test]
fn a_serial_console_is_in_a_capture() {
    let sim = divided();
    let card = address("0000:05:00.0");
    let serial = SimFunction::new(card, 0x13a8, 0x0352, 0x07_0002).group(5).driver("exar_serial");
    sim.add_driver("exar_serial").and_then(|()| sim.add(&serial)).expect("a function");
    sim.add_child(card, "tty", "tty/ttyS4", &[]).expect("a port");
    sim.write("sys/class/tty/console/active", "ttyS4\n").expect("written");
    let got = vm_service(&sim.plain_host(), "explain 05:00.0");
    assert!(
        got.exit == 3 && got.out.contains("the host's console ttyS4 is a serial port of it"),
        "{}",
        got.out
    );
    answers_alike(&sim, &[]);
}
