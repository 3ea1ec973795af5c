//! `explain`, `claim` and `release`.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vm_passthrough::PassthroughManager;
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::pci::BarKind;
use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::host::{address, workstation};
use super::{check, check_error, vm_service};

/// An NVMe disk and a network card in one group, as behind a port without ACS.
pub(crate) fn crowded() -> SimHost {
    let sim = SimHost::new().expect("a simulated host");
    for driver in ["nvme", "e1000e"] {
        sim.add_driver(driver).expect("a driver");
    }
    let disk = SimFunction::nvme(address("0000:02:00.0")).group(7).driver("nvme");
    let card = SimFunction::network(address("0000:03:00.0")).group(7).driver("e1000e");
    sim.add(&disk).expect("a function");
    sim.add(&card).expect("a function");
    sim
}

#[test]
fn explains_what_is_ready() {
    check(
        &workstation().plain_host(),
        "explain 0000:02:00.0",
        "
0000:02:00.0 Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO: ready
  driver  vfio-pci, as no variant of it is made for this device
",
    );
    check(
        &workstation().plain_host(),
        "explain",
        "
0000:01:00.0 NVIDIA Corporation AD102 [GeForce RTX 4090]: ready
  goes with 0000:01:00.1
  driver  vfio-pci, as no variant of it is made for this device
",
    );
}

#[test]
fn explains_what_is_not_ready_with_status_3() {
    let sim = crowded();
    let got = vm_service(&sim.plain_host(), "explain 0000:02:00.0");
    assert_eq!((got.exit, got.err.as_str()), (3, ""));
    assert_eq!(got.out, BLOCKED);
    let got = vm_service(&sim.plain_host(), "explain 0000:02:00.0 --json");
    assert_eq!((got.exit, got.err.as_str()), (3, ""));
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(document["command"], "explain");
    assert_eq!(document["functions"][0]["ready"], false);
    assert_eq!(document["functions"][0]["blockers"][0]["code"], "group-not-viable");
    check(
        &sim.plain_host(),
        "explain 0000:02:00.0 --with-group",
        "
0000:02:00.0 Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO: ready
  goes with 0000:03:00.0
  driver  vfio-pci, as no variant of it is made for this device
",
    );
}

/// What is said of the disk of [`crowded`].
const BLOCKED: &str = "\
0000:02:00.0 Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO: not ready, 1 blocker
  driver  vfio-pci, as no variant of it is made for this device
  blocker group-not-viable: a driver of the host uses another function of its IOMMU group
    found   0000:03:00.0 (Intel Corporation 82574L Gigabit Network Connection, driver e1000e) is in group 7 too, by /sys/kernel/iommu_groups/7/devices
    remedy  give the whole group away (--with-group), or take 0000:03:00.0 from its driver: echo 0000:03:00.0 > /sys/bus/pci/drivers/e1000e/unbind
";

#[test]
fn explains_for_a_guest() {
    let sim = workstation();
    let guest = sim.path("guest.toml");
    let text = "name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n[[devices]]\naddress = \"02:00.0\"\n";
    std::fs::write(&guest, text).expect("written");
    let args = format!("explain --guest {} --json", guest.display());
    let got = vm_service(&sim.plain_host(), &args);
    assert_eq!((got.exit, got.err.as_str()), (0, ""));
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(document["functions"][0]["address"], "0000:02:00.0");
    assert_eq!(document["functions"].as_array().map(Vec::len), Some(1));
}

/// Each fits into the guest, but not both: what `run` would meet when both had been taken.
#[test]
fn explains_what_does_not_fit_together() {
    let sim = SimHost::new().expect("a simulated host");
    sim.add_driver("e1000e").expect("a driver");
    let mut text = String::from("name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n");
    for bus in [2u64, 3] {
        let card = SimFunction::network(address(&format!("0000:{bus:02x}:00.0"))).driver("e1000e");
        sim.add(&card.bar(0, BarKind::Memory32, false, 0x8000_0000, 512 << 20)).expect("a function");
        text += &format!("[[devices]]\naddress = \"{bus:02x}:00.0\"\n");
        let got = vm_service(&sim.plain_host(), &format!("explain {bus:02x}:00.0"));
        assert_eq!((got.exit, got.err.as_str()), (0, ""));
    }
    let guest = sim.path("guest.toml");
    std::fs::write(&guest, text).expect("written");
    let got = vm_service(&sim.plain_host(), &format!("explain --guest {}", guest.display()));
    assert_eq!((got.exit, got.err.as_str()), (3, ""));
    assert!(
        got.out.contains("0000:02:00.0 Intel Corporation 82574L Gigabit Network Connection: ready"),
        "{}",
        got.out
    );
    assert!(got.out.contains("blocker bars-too-large"), "{}", got.out);
    // Nothing is taken.
    let drivers = SimDrivers::new(&sim);
    std::fs::write(sim.path("k"), "").expect("written");
    let got = vm_service(&drivers.host(), &format!("run {}", guest.display()));
    assert_eq!(got.exit, 3, "{}", got.err);
    assert!(got.err.contains("nothing was touched") && got.err.contains("bars-too-large"), "{}", got.err);
    assert_eq!(drivers.writes(), []);
}

/// A variant takes what it is made for; `--vfio-driver` says otherwise, also after a boot.
#[test]
fn a_variant_is_bound_or_vfio_pci_by_name() {
    let sim = workstation();
    sim.add_driver("nvme_vfio_pci").expect("a driver");
    let aliases = "alias vfio_pci:v0000144Dd*sv*sd*bc*sc*i* nvme_vfio_pci\n";
    sim.write("lib/modules/6.12.0/modules.alias", aliases).expect("written");
    let host = SimDrivers::new(&sim).host();
    let on = |expect: &str| assert_eq!(sim.driver_of(address("0000:02:00.0")).as_deref(), Some(expect));
    let json = |args: &str| -> serde_json::Value {
        serde_json::from_str(&vm_service(&host, args).out).expect("JSON")
    };
    let explained = json("explain 02:00.0 --json");
    assert_eq!(explained["functions"][0]["drivers"][0]["driver"], "nvme_vfio_pci", "{explained}");
    let explained = json("explain 02:00.0 --vfio-driver vfio-pci --json");
    assert_eq!(explained["functions"][0]["drivers"][0]["why"], "vfio-pci, as asked for", "{explained}");
    check(&host, "claim 02:00.0", "\n0000:02:00.0 claimed, taken from nvme, bound to nvme_vfio_pci\n");
    on("nvme_vfio_pci");
    assert_eq!(vm_service(&host, "release 02:00.0").exit, 0);
    on("nvme");
    assert_eq!(vm_service(&host, "claim 02:00.0 --vfio-driver vfio-pci --persist").exit, 0);
    on("vfio-pci");
    // The host boots.
    sim.delete("run/ledger").expect("deleted");
    sim.set_driver(address("0000:02:00.0"), Some("nvme")).expect("bound");
    let restored = json("claim --restore --json");
    assert_eq!(restored["functions"][0]["vfio_driver"], "vfio-pci", "{restored}");
    on("vfio-pci");
}

/// Names the host's root to a child that has claimed a disk until its input ends.
const CHILD: &str = "VM_SERVICE_CLAIM";

#[test]
fn what_another_process_has_is_not_touched() {
    if let Some(root) = std::env::var_os(CHILD) {
        let host = SimDrivers::at(root.as_ref()).host();
        let mut manager = PassthroughManager::with_host(host).expect("a manager");
        manager.claim(address("0000:02:00.0"), &ClaimOptions::default()).expect("claimed");
        std::io::stdin().read_line(&mut String::new()).expect("read");
        return;
    }
    let sim = workstation();
    let drivers = SimDrivers::new(&sim);
    let host = drivers.host();
    let mut child = Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "explain_claim::what_another_process_has_is_not_touched", "--quiet"])
        .env(CHILD, sim.root())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("a child");
    let until = Instant::now() + Duration::from_secs(60);
    while !vm_service(&host, "claims").out.contains("0000:02:00.0") {
        assert!(Instant::now() < until && child.try_wait().expect("asked").is_none(), "it does not claim");
        std::thread::sleep(Duration::from_millis(5));
    }
    let guest = sim.path("guest.toml");
    std::fs::write(sim.path("k"), "").expect("written");
    let text = "name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n[[devices]]\naddress = \"02:00.0\"\n";
    std::fs::write(&guest, text).expect("written");
    let owner = format!("process {} (", child.id());
    for line in ["explain 02:00.0", "claim 03:00.0 02:00.0", &format!("run {}", guest.display())] {
        let got = vm_service(&host, line);
        assert_eq!(got.exit, 3, "{line}: {got:?}");
        let said = got.out + &got.err;
        assert!(said.contains("blocker claimed") && said.contains(&owner), "{line}: {said}");
    }
    assert_eq!(drivers.writes(), []);
    drop(child.stdin.take());
    child.wait().expect("ended");
    check(&host, "claim 02:00.0", "0000:02:00.0 claimed, taken from nvme\n");
}

#[test]
fn claims_with_companions_and_releases() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let drivers = || [sim.driver_of(address("0000:01:00.0")), sim.driver_of(address("0000:01:00.1"))];
    let before = drivers();
    check(
        &host,
        "claim 01:00.0",
        "0000:01:00.1 claimed, taken from snd_hda_intel\n0000:01:00.0 claimed, taken from nvidia\n",
    );
    assert_eq!(drivers(), [Some("vfio-pci".into()), Some("vfio-pci".into())]);
    let again = vm_service(&host, "claim 01:00.0");
    assert_eq!(again.exit, 1, "{again:?}");
    let whose = format!("0000:01:00.0 is claimed already by process {} (", std::process::id());
    assert!(again.err.contains(&whose), "{again:?}");
    assert!(
        again.err.contains("until it is released; run `vm-service release 0000:01:00.0` first"),
        "{again:?}"
    );
    check(&host, "release 01:00.0", "0000:01:00.0 released\n");
    assert_eq!(drivers(), before);
    check_error(&host, "release 01:00.0", 1, "0000:01:00.0 is not claimed, so there is nothing to release");
}

#[test]
fn claims_and_releases_in_json() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    check(
        &host,
        "claim 02:00.0 --json",
        r#"{
  "version": 1,
  "command": "claim",
  "address": "0000:02:00.0",
  "addresses": [
    "0000:02:00.0"
  ],
  "functions": [
    {
      "address": "0000:02:00.0",
      "driver": "nvme",
      "vfio_driver": "vfio-pci",
      "kept": false
    }
  ],
  "left": []
}
"#,
    );
    check(
        &host,
        "release 02:00.0 --json",
        r#"{
  "version": 1,
  "command": "release",
  "address": "0000:02:00.0",
  "addresses": [
    "0000:02:00.0"
  ]
}
"#,
    );
}

#[test]
fn claims_nothing_while_something_stands_in_the_way() {
    let sim = crowded();
    let drivers = SimDrivers::new(&sim);
    let what = BLOCKED.trim_end();
    let message = format!("nothing was touched, because of what stands in the way:\n{what}");
    check_error(&drivers.host(), "claim 0000:02:00.0", 3, &message);
    assert_eq!(drivers.writes(), []);
    let got = vm_service(&drivers.host(), "claim 0000:02:00.0 --json");
    assert_eq!(got.exit, 3);
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(document["functions"][0]["blockers"][0]["code"], "group-not-viable");
    assert_eq!(drivers.writes(), []);
    let claimed = vm_service(&drivers.host(), "claim 0000:02:00.0 --with-group");
    assert_eq!((claimed.exit, claimed.err.as_str()), (0, ""));
    assert_eq!(sim.driver_of(address("0000:03:00.0")).as_deref(), Some("vfio-pci"));
    check(&drivers.host(), "release 0000:03:00.0", "0000:03:00.0 released\n");
    assert_eq!(sim.driver_of(address("0000:02:00.0")).as_deref(), Some("nvme"));
}

#[test]
fn a_captured_tree_is_only_read() {
    let sim = workstation();
    let drivers = SimDrivers::new(&sim);
    let root = sim.root().display();
    let got = vm_service(&drivers.host(), &format!("list --root {root}"));
    assert_eq!((got.exit, got.err.as_str()), (0, ""));
    for command in
        ["claims", "claim 02:00.0", "release 02:00.0", "run guest.toml", "start guest.toml", "guests"]
    {
        let got = vm_service(&drivers.host(), &format!("{command} --root {root}"));
        assert!(got.exit == 2 && got.err.contains("unexpected argument '--root'"), "{command}: {}", got.err);
        let name = command.split(' ').next().unwrap_or_default();
        let help = vm_service(&drivers.host(), &format!("{name} --help")).out;
        assert!(help.contains("--state") && !help.contains("--root"), "{help}");
    }
    assert_eq!(drivers.writes(), []);
}

#[test]
fn a_device_without_reset_is_for_those_who_accept_it() {
    let sim = SimHost::new().expect("a simulated host");
    sim.add_driver("nvme").expect("a driver");
    sim.add(&SimFunction::nvme(address("0000:02:00.0")).group(7).driver("nvme").resets(""))
        .expect("a function");
    let host = SimDrivers::new(&sim).host();
    for command in ["explain", "claim"] {
        let got = vm_service(&host, &format!("{command} 0000:02:00.0"));
        assert_eq!(got.exit, 3, "{command}: {} {}", got.out, got.err);
    }
    let got = vm_service(&host, "explain 0000:02:00.0 --accept no-reset");
    assert_eq!(got.exit, 0, "{} {}", got.out, got.err);
    assert!(got.out.contains("warning no-reset"), "{}", got.out);
    let got = vm_service(&host, "claim 0000:02:00.0 --accept no-reset");
    assert_eq!(got.exit, 0, "{} {}", got.out, got.err);
    assert_eq!(sim.driver_of(address("0000:02:00.0")).as_deref(), Some("vfio-pci"));
    let got = vm_service(&host, "explain 0000:02:00.0 --accept group-not-viable");
    assert_eq!(got.exit, 2, "{}", got.err);
}

/// Operators paste what `lspci -nn`, sysfs and libvirt print.
#[test]
fn other_spellings_of_an_address_are_accepted_or_explained() {
    let sim = workstation();
    let host = sim.plain_host();
    let expect = vm_service(&host, "explain 0000:01:00.0");
    for address in ["/sys/bus/pci/devices/0000:01:00.0", "pci_0000_01_00_0"] {
        assert_eq!(vm_service(&host, &format!("explain {address}")), expect, "{address}");
    }
    let root = sim.root().display();
    let refused = |args: &str, parts: &[&str]| {
        for args in [args.to_owned(), format!("{args} --root {root}"), format!("{args} --sim={root}")] {
            let got = vm_service(&host, &args);
            assert_eq!((got.exit, got.out.as_str()), (2, ""), "{args}: {}", got.err);
            parts.iter().for_each(|part| assert!(got.err.contains(part), "{args}: no {part} in {}", got.err));
        }
    };
    for command in ["explain", "info"] {
        refused(
            &format!("{command} 10de:2684"),
            &["that is a vendor:device ID", "did you mean 0000:01:00.0?"],
        );
        refused(&format!("{command} 10de:ffff"), &["vendor:device ID", "no function of this host has it"]);
        refused(
            &format!("{command} 01:00"),
            &["that is a slot", "0000:01:00.0 (NVIDIA", "0000:01:00.1 (NVIDIA"],
        );
    }
    // A second card of the same model.
    let card = SimFunction::new(address("0000:06:00.0"), 0x10de, 0x2684, 0x03_00_00).group(16);
    sim.add(&card).expect("a function");
    refused("explain 10de:2684", &["did you mean 0000:01:00.0 or 0000:06:00.0?"]);
}

/// The guest file lies where an operator keeps it, not in the captured tree, which is all that this process may read else.
#[test]
fn a_guest_file_outside_a_captured_tree_is_read() {
    let sim = workstation();
    let folder = tempfile::tempdir().expect("a folder");
    let guest = folder.path().join("guest.toml");
    let text = "name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n[[devices]]\naddress = \"02:00.0\"\n";
    std::fs::write(&guest, text).expect("written");
    let ended = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(["explain", "--guest"])
        .arg(&guest)
        .arg("--root")
        .arg(sim.root())
        .output()
        .expect("vm-service");
    assert!(ended.status.success(), "{ended:?}");
    assert!(String::from_utf8_lossy(&ended.stdout).starts_with("0000:02:00.0 "), "{ended:?}");
}
