//! `egpu config`: what GPUs are set to, and setting one.

use std::path::Path;

use serde_json::Value;
use vm_passthrough::Host;
use vm_passthrough::sim::SimDrivers;

use super::host::{address, workstation};
use super::monitor::{add_gpu, two_gpus};
use super::{check_error, vm_service};

/// Runs a command on the simulated host in a folder; its exit status, standard output, and standard error without what labels it.
fn on(lab: &Path, args: &str) -> (u8, String, String) {
    let got = vm_service(&Host::system(), &format!("egpu {args} --sim {}", lab.display()));
    let label = format!("simulated host: {}\n", lab.display());
    (got.exit, got.out, got.err.strip_prefix(&label).unwrap_or(&got.err).to_owned())
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn a_simulated_gpu_is_set_and_stays_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let shows = |args: &str, expect: &str| {
        let (exit, out, err) = on(&lab, args);
        assert_eq!((exit, err.as_str()), (0, ""), "{args}: {out}");
        assert!(out.ends_with(expect), "{args} printed\n{out}");
    };
    shows("config show", "no GPU is behind a tunnel; with `--all` every GPU of the host is meant\n");
    let first = "
  set by           amdgpu
  core clock       1725 of 2500 MHz, 500 to 3000
  memory clock     1249 of 1249 MHz, 97 to 1500
  power limit      303 W, 200 to 348, by default 303
  fan              25 % auto, 0 to 100
  performance      auto
";
    shows("cf show 07:00.0", first);
    shows(
        "config power 250 --gpu 07:00.0",
        "  power limit      250 W, 200 to 348, by default 303\n  fan              25 % auto, 0 to 100\n  performance      auto\n",
    );
    shows(
        "config fan 40 --gpu 07:00.0",
        "  fan              40 % fixed, 0 to 100\n  performance      auto\n",
    );
    shows("config clock 2300 1200 --gpu 07:00.0", "  performance      manual\n");
    let after = "
  set by           amdgpu
  core clock       1725 of 2300 MHz, 500 to 3000
  memory clock     1200 of 1200 MHz, 97 to 1500
  power limit      250 W, 200 to 348, by default 303
  fan              40 % fixed, 0 to 100
  performance      manual
";
    shows("config show 07:00.0", after);
    shows("config pstate profile_peak --gpu 07:00.0", "  performance      profile_peak\n");

    // In JSON, the one that was set, as it was read back.
    let (exit, out, _) = on(&lab, "config clock --reset --gpu 07:00.0 --json");
    let document = json(&out);
    let gpu = &document["gpus"][0];
    assert_eq!(
        (exit, &document["command"], &document["simulated"]),
        (0, &"egpu-config".into(), &true.into())
    );
    assert_eq!(
        (&gpu["core_clock"]["limit_mhz"], &gpu["core_clock"]["max_mhz"]),
        (&2500.into(), &3000.into())
    );
    assert_eq!((&gpu["source"], &gpu["performance_state"]), (&"amdgpu".into(), &"auto".into()));
    let document = json(&on(&lab, "config fan 0 --gpu 07:00.0 --json").1);
    assert_eq!(
        (&document["gpus"][0]["fan"]["mode"], &document["gpus"][0]["fan"]["percent"]),
        (&"fixed".into(), &0.into())
    );
    let note = document["gpus"][0]["notes"][0].as_str().unwrap_or_default();
    assert!(note.contains("does not raise it any more when the GPU gets hot"), "{note}");
    on(&lab, "config fan auto --gpu 07:00.0");
    on(&lab, "config power --reset --gpu 07:00.0");
    let gpu = &json(&on(&lab, "config show 07:00.0 --json").1)["gpus"][0];
    assert_eq!((&gpu["fan"]["mode"], &gpu["power"]["limit_watts"]), (&"auto".into(), &303.0.into()));

    // All of them, each with what it is set to or why that is not known.
    let gpus = json(&on(&lab, "config show --all --json").1)["gpus"].as_array().expect("GPUs").clone();
    let unknown: Vec<_> = gpus.iter().filter_map(|gpu| gpu["unknown"].as_str()).collect();
    assert!(
        unknown.len() + 1 == gpus.len() && unknown.iter().all(|why| why.contains("can't be set: ")),
        "{gpus:?}"
    );
}

#[test]
fn what_can_not_be_set_says_why_and_is_not_touched() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let before = on(&lab, "config show --all").1;
    let fails = |args: &str, exit: u8, expect: &str| {
        let (got, out, err) = on(&lab, args);
        assert!(got == exit && out.is_empty() && err.contains(expect), "{args}: {got} {out} {err}");
        assert_eq!(on(&lab, "config show --all").1, before, "{args}");
    };
    let amd = "--gpu 07:00.0";
    fails(
        &format!("config clock 3001 {amd}"),
        2,
        "its core clock can't be 3001 MHz: it may be from 500 to 3000 MHz",
    );
    fails(
        &format!("config clock 2000 2000 {amd}"),
        2,
        "its memory clock can't be 2000 MHz: it may be from 97 to 1500 MHz",
    );
    fails(
        &format!("config power 349 {amd}"),
        2,
        "its power limit can't be 349 W: it may be from 200 to 348 W",
    );
    fails("config power 250", 1, "no GPU is behind a tunnel; name one with `--gpu`");
    fails(
        "config power 250 --gpu 08:00.0",
        1,
        "0000:08:00.0 can't be set: no driver has it; load its driver",
    );
    fails("config power 250 --gpu 00:0b.0", 2, "is no GPU");
    fails("config power 250 --gpu 7f:00.0", 1, "there is no PCI function 0000:7f:00.0");
    for wrong in [
        "config",
        "config clock",
        "config clock --reset 2000",
        "config clock 0",
        "config clock -1",
        "config clock 2e3",
        "config clock 100001",
        "config clock 99999999999999999999",
        "config clock 2000 1000 1",
        "config power",
        "config power 0",
        "config power 250.5",
        "config power 250W",
        "config power 250 --reset",
        "config fan",
        "config fan 101",
        "config fan -1",
        "config fan full",
        "config fan AUTO",
        "config pstate",
        "config pstate P0",
        "config pstate Auto",
        "config pstate profile_exit",
        "config power 250 --all",
        "config power 250 07:00.0",
        "config power 250 --gpu x",
        "config show --gpu 07:00.0",
        "config show 07:00.0 --all",
    ] {
        fails(wrong, 2, "--help");
    }
}

#[test]
fn the_gpu_behind_a_tunnel_is_meant() {
    let sim = two_gpus();
    let host = SimDrivers::new(&sim).host();
    let addresses = |args: &str| -> Vec<String> {
        let gpus = json(&vm_service(&host, &format!("egpu config {args} --json")).out)["gpus"].clone();
        gpus.as_array()
            .expect("GPUs")
            .iter()
            .map(|gpu| gpu["address"].as_str().unwrap_or_default().to_owned())
            .collect()
    };
    assert_eq!(addresses("show"), ["0000:03:00.0"]);
    assert_eq!(addresses("show --all"), ["0000:03:00.0", "0000:01:00.0"]);
    assert_eq!(addresses("power 250"), ["0000:03:00.0"]);
    assert_eq!(addresses("power 251 --gpu 01:00.0"), ["0000:01:00.0"]);
    let watts: Vec<_> = ["01:00.0", "03:00.0"]
        .map(|at| json(&vm_service(&host, &format!("egpu config show {at} --json")).out)["gpus"][0]["power"]["limit_watts"].clone())
        .into();
    assert_eq!(watts, [251.0, 250.0]);
    sim.set(address("03:00.0"), "power/runtime_status", "suspended\n").expect("written");
    check_error(
        &host,
        "egpu config power 250",
        1,
        "0000:03:00.0 can't be set: it is asleep, and is not woken for this; start what uses it, or keep it awake: echo on > power/control in its \
         directory",
    );
    add_gpu(&sim, "04:00.0", Some("00:07.0"));
    let got = vm_service(&host, "egpu config power 250");
    let which = "several GPUs match; name one with `--gpu`: 0000:03:00.0 (";
    assert!(got.exit == 2 && got.err.contains(which) && got.err.contains("), 0000:04:00.0 ("), "{got:?}");
}

#[test]
fn a_captured_tree_is_shown_and_not_written() {
    let sim = two_gpus();
    let root = sim.root().display().to_string();
    let got = vm_service(&Host::system(), &format!("egpu --root {root} config show --json"));
    assert_eq!(json(&got.out)["gpus"][0]["power"]["limit_watts"], 303.0, "{got:?}");
    for change in ["clock 2000", "clock --reset", "power 250", "fan 10", "pstate low"] {
        check_error(
            &Host::system(),
            &format!("egpu --root {root} config {change}"),
            2,
            "a captured tree is only read: leave `--root` out to act on this machine, or try it with `--sim DIR`",
        );
    }
    assert!(!sim.path("run/locks").exists());
}

#[test]
fn who_is_of_another_vendor_or_at_a_guest_is_refused() {
    let sim = workstation();
    let host = SimDrivers::new(&sim).host();
    let check = |expect: &str| {
        let got = vm_service(&host, "egpu config pstate low --gpu 01:00.0");
        assert!(got.exit == 1 && got.err.contains(expect), "{got:?}");
    };
    check(if cfg!(feature = "cuda") { "NVML answers for this machine" } else { "was built without CUDA" });
    assert_eq!(vm_service(&host, "claim 01:00.0").exit, 0);
    check("vfio-pci has it: only its guest can ask; release it from its guest");
    assert_eq!(vm_service(&host, "release 01:00.0").exit, 0);
    sim.add_driver("nouveau").expect("a driver");
    sim.set_driver(address("01:00.0"), Some("nouveau")).expect("bound");
    check("the driver nouveau has it; only nvidia and amdgpu can be told");
}
