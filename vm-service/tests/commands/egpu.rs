//! `egpu`: what is connected by USB4 and Thunderbolt.

use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::host::address;
use super::{check, vm_service};

#[test]
fn shows_what_is_connected_and_what_is_behind_it() {
    let sim = SimHost::new().expect("a host");
    let host = SimDrivers::new(&sim).host();
    let none = "no USB4 or Thunderbolt controller found, or its module thunderbolt is not loaded\n";
    check(&host, "egpu info", none);

    let add = |function: SimFunction| sim.add(&function).expect("a function");
    add(SimFunction::new(address("00:0d.2"), 0x8086, 0x9a1b, 0x0c_0340));
    let port = add(SimFunction::root_port(address("00:07.0")));
    std::fs::create_dir(port.join("supplier:pci:0000:00:0d.2")).expect("a link");
    add(SimFunction::root_port(address("01:00.0")).below(address("00:07.0")));
    add(SimFunction::root_port(address("02:00.0")).below(address("01:00.0")));
    add(SimFunction::gpu(address("03:00.0")).below(address("02:00.0")));
    for function in ["01:00.0", "02:00.0", "03:00.0"] {
        sim.set(address(function), "removable", "removable\n").expect("an attribute");
    }
    let security = [("security", "user\n"), ("iommu_dma_protection", "1\n")];
    sim.add_domain(0, Some(address("00:0d.2")), &security).expect("a domain");
    let waits = "
domain0 at 0000:00:0d.2: security user, the IOMMU protects the host's memory, tunnels can't be taken down but by pulling the cable
  0-0 (this host) USB4
behind a tunnel, in which router is not known
  0000:03:00.0 GPU NVIDIA NVIDIA Corporation AD102 [GeForce RTX 4090]
";
    sim.write("proc/sys/kernel/osrelease", "6.13.0\n").expect("a release");
    check(&host, "egpu i", waits);
    let enclosure = [
        ("authorized", "1\n"),
        ("vendor_name", "Razer\n"),
        ("device_name", "Core X\n"),
        ("generation", "3\n"),
        ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    sim.add_router("0-1".parse().expect("a route"), &enclosure).expect("a router");
    let works = "
domain0 at 0000:00:0d.2: security user, the IOMMU protects the host's memory, tunnels can't be taken down but by pulling the cable
  0-0 (this host) USB4
    0-1 Razer Core X Thunderbolt 3, 40 Gb/s (2 x 20 Gb/s), authorised, d2030000-00a0-751e-a3f4-c0e5ae7b0d30
      0000:03:00.0 GPU NVIDIA NVIDIA Corporation AD102 [GeForce RTX 4090], in this router (inferred)
";
    check(&host, "egpu info", works);
    let json = vm_service(&host, "egpu info --json").out;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let router = &json["domains"][0]["routers"][1];
    assert_eq!((&router["receive_megabits"], &router["receive_lanes"]["count"]), (&40_000.into(), &2.into()));
    assert_eq!(router["transmit_lanes"]["megabits"], 20_000);
    let gpu = json["functions"].as_array().and_then(|all| all.last()).expect("functions");
    assert_eq!((gpu["router"].as_str(), gpu["basis"].as_str()), (Some("0-1"), Some("linux")), "{gpu}");
    assert_eq!(gpu["router_basis"], "inferred", "{gpu}");
    sim.write("proc/sys/kernel/osrelease", "6.12.0\n").expect("a release");
    let inferred = vm_service(&host, "egpu info").out;
    assert!(inferred.contains("behind a tunnel (inferred: this Linux does not say what is)"), "{inferred}");
}

/// Runs a command on the simulated host in a folder; its exit status, standard output, and standard error without what labels it.
fn on(lab: &std::path::Path, args: &str) -> (u8, String, String) {
    let got = vm_service(&vm_passthrough::Host::system(), &format!("{args} --sim {}", lab.display()));
    let label = format!("simulated host: {}\n", lab.display());
    (got.exit, got.out, got.err.strip_prefix(&label).expect("its label").to_owned())
}

#[test]
fn an_enclosure_is_connected_by_the_policy_remembered_reset_and_disconnected() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let json = |args: &str| -> serde_json::Value {
        let (exit, out, err) = on(&lab, &format!("{args} --json"));
        assert_eq!((exit, err.as_str()), (0, ""), "{args}: {out}");
        serde_json::from_str(&out).expect("JSON")
    };
    let fails = |args: &str, exit: u8, expect: &str| {
        let (got, out, err) = on(&lab, args);
        assert!(got == exit && out.is_empty() && err.contains(expect), "{args}: {got} {out} {err}");
    };
    const ID: &str = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";
    let is_there = || lab.join("sys/bus/pci/devices/0000:32:00.0").exists();

    // It has no tunnel yet, as is wanted.
    let states = |report: serde_json::Value| -> Vec<serde_json::Value> {
        report["steps"].as_array().expect("steps").iter().map(|step| step["state"].clone()).collect()
    };
    assert_eq!(states(json("egpu disconnect")), ["disconnected"]);
    fails("egpu disconnect 0-3", 1, "nothing that is connected is 0-3");
    assert_eq!(json("egpu policy --authorise never")["authorise"], "never");
    fails("egpu connect", 3, "the policy is to authorise no enclosure");
    assert_eq!(json("egpu policy --authorise ask --minimum-rate 40.001")["minimum_megabits"], 40_001);
    fails("egpu connect", 3, "its link has 40 Gb/s and the policy asks for 40.001");
    json("egpu policy --minimum-rate 40");
    fails("egpu connect 0-3", 1, "nothing that is connected is 0-3");
    assert!(!is_there(), "what is refused is not touched");

    let connected = json("egpu connect --remember");
    assert_eq!((&connected["state"], &connected["functions"][0]), (&"ready".into(), &"0000:32:00.0".into()));
    assert_eq!(states(connected), ["disconnected", "authorising", "enumerating", "verifying", "ready"]);
    assert!(is_there());
    let known = &json("egpu policy")["known"];
    assert_eq!((known[0]["enclosure"].as_str(), known[0]["name"].as_str()), (Some(ID), Some("Razer Core X")));
    // What is connected stays so.
    assert_eq!(json(&format!("egpu c {ID}"))["state"], "ready");
    assert_eq!(json("egpu reset")["state"], "ready");
    assert_eq!(json("egpu r --reconnect")["state"], "ready");

    // A claim that no process holds is no use, and ends with the enclosure.
    assert_eq!(on(&lab, "claim 32:00.0").0, 0);
    let gone = json("egpu dc 0-1");
    assert_eq!((&gone["state"], is_there()), (&"disconnected".into(), false));
    assert_eq!(json("claims")["claims"].as_array().map(Vec::len), Some(0));
    assert_eq!(states(json("egpu disconnect")), ["disconnected"]);
    let steps = gone["steps"].as_array().expect("steps").iter().filter(|step| step["state"] == "draining");
    let actions: Vec<_> = steps.map(|step| step["action"].clone()).collect();
    assert_eq!(actions, ["stop-work", "detach", "release", "unbind", "deauthorise"]);
    assert_eq!(gone["functions_basis"], "inferred");

    assert_eq!(json(&format!("egpu forget {ID}"))["known"].as_array().map(Vec::len), Some(0));
    fails(&format!("egpu forget {ID}"), 1, "is not known");
    // What keeps the host's memory safe is said to be missing, and passed over by those who say so.
    std::fs::write(lab.join("sys/bus/thunderbolt/devices/domain0/iommu_dma_protection"), "0\n")
        .expect("written");
    fails("egpu connect", 3, "no DMA protection");
    assert_eq!(json("egpu connect --allow-unprotected")["state"], "ready");
}

#[test]
fn an_enclosure_is_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    // Each check with its verdict.
    let check = |args: &str, exit: u8, expect: [&str; 6]| {
        let (got, out, err) = on(&lab, &format!("egpu {args} --json"));
        let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        let verdicts: Vec<_> =
            json["checks"].as_array().expect("checks").iter().map(|check| &check["verdict"]).collect();
        assert_eq!((got, &verdicts[..]), (exit, &expect.map(Into::into).each_ref()[..]), "{out}{err}");
        out
    };
    check("diag", 1, ["passed", "warning", "failed", "failed", "warning", "warning"]);
    assert_eq!(on(&lab, "egpu connect --remember").0, 0);
    let all = ["passed"; 6];
    check("d 0-1", 0, all);
    let device = lab.join("sys/bus/pci/devices/0000:32:00.0");
    let sensor = device.join("hwmon/hwmon4/temp1_input");
    let going = lab.join("sim/usb4/0-1/functions");
    let [functions, nothing] = [std::fs::read_to_string(&going).expect("read"), String::new()];
    // As it is, not as its model has it.
    std::fs::write(&going, nothing).expect("written");
    for (millidegrees, exit, verdict) in
        [(79_999, 0, "passed"), (80_000, 0, "warning"), (90_000, 1, "failed")]
    {
        std::fs::write(&sensor, format!("{millidegrees}\n")).expect("written");
        check("diag", exit, ["passed", "passed", "passed", "passed", "passed", verdict]);
    }
    std::fs::write(&going, functions).expect("written");
    let log = lab.join("dev/kmsg");
    let xid = "3,700,9,-;NVRM: Xid (PCI:0000:32:00): 79, pid=7, GPU has fallen off the bus.\n";
    std::fs::write(&log, xid).expect("written");
    let out = check("diag", 0, ["passed", "passed", "passed", "passed", "passed", "warning"]);
    assert!(out.contains("Xid 79: pid=7, GPU has fallen off") && out.contains("--reconnect"), "{out}");
    std::fs::remove_file(&log).expect("removed");
    let link = lab.join("sys/bus/thunderbolt/devices/0-1/tx_lanes");
    std::fs::write(&link, "1\n").expect("written");
    let out = check("diag", 0, ["passed", "passed", "passed", "warning", "passed", "passed"]);
    assert!(out.contains("it runs on one lane"), "{out}");
    std::fs::write(&link, "2\n").expect("written");
    let config = device.join("config");
    let len = std::fs::read(&config).expect("read").len();
    std::fs::write(config, vec![0xff; len]).expect("written");
    let out = check("diag", 1, ["passed", "passed", "passed", "passed", "failed", "passed"]);
    assert!(out.contains("its config space reads all ones") && out.contains("--reconnect"), "{out}");
}

#[test]
fn a_script_breaks_a_simulated_egpu() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join("bad.sim");
    let run = |text: &str, args: &str| {
        std::fs::write(&script, text).expect("written");
        let args = format!("egpu simulate {} {args}", script.display());
        let got = vm_service(&vm_passthrough::Host::system(), &args);
        (got.exit, got.out, got.err)
    };
    let (exit, out, err) = run("reset soft lies\nat 5s hang hard # it helps\n", "--json");
    assert_eq!((exit, err.as_str()), (0, ""), "{out}");
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let states: Vec<_> = json["changes"]
        .as_array()
        .expect("changes")
        .iter()
        .filter_map(|change| change["state"].as_str())
        .collect();
    let mut way = states.clone();
    way.dedup();
    assert_eq!(
        way,
        [
            "disconnected",
            "authorising",
            "enumerating",
            "verifying",
            "ready",
            "degraded",
            "recovering",
            "ready"
        ]
    );
    assert_eq!((&json["state"], &json["tunnels"], &json["seed"]), (&"ready".into(), &1.into(), &1.into()));
    assert_eq!(json["simulated"], true);
    // Each step has the time at which it began: building a tunnel takes a while, and so do its functions.
    let times: Vec<_> = json["changes"].as_array().expect("changes").iter().take(5).collect();
    let times: Vec<_> = times.iter().filter_map(|change| change["milliseconds"].as_f64()).collect();
    assert!(times[1] < times[2] && times[2] < times[3] && times[3] <= times[4], "{times:?}");
    let (_, out, _) = run("at 5s guest takes\nat 6s hang hard\n", "");
    assert!(out.contains("cut off: a guest (simulated) by detach by force\n"), "{out}");
    // The same again, for people.
    let (_, first, _) = run("corrupt 1e-3\nat 3s unplug\nat 5s plug\nat 9s temperature 95\n", "--seed 7");
    assert_eq!(run("corrupt 1e-3\nat 3s unplug\nat 5s plug\nat 9s temperature 95\n", "--seed 7").1, first);
    assert!(first.starts_with("simulated eGPU, seed 7, virtual time\n"), "{first}");
    assert!(first.contains(" absent\n") && first.contains("failed (overheated)"), "{first}");
    assert!(first.contains("end: failed; 0 tunnels, 0 functions, 0 drivers, 0 claims, 0 users"), "{first}");
    for (text, args, expect) in [
        ("hagn", "", "line 1: `hagn` is no fault"),
        ("at 1min hang", "--seconds 99999999999", "more than 1000000 looks"),
    ] {
        let (exit, out, err) = run(text, args);
        assert!(exit == 2 && out.is_empty() && err.contains(expect), "{exit} {err}");
    }
    let none = vm_service(&vm_passthrough::Host::system(), "egpu simulate /nowhere/at/all");
    assert!(none.exit == 2 && none.err.contains("can't read /nowhere/at/all"), "{}", none.err);
}

#[test]
fn links_are_not_followed_out_of_a_captured_tree() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    assert_eq!(on(&lab, "egpu info").0, 0);
    let name = lab.join("sys/bus/thunderbolt/devices/0-1/device_name");
    // Where the file lies that the name of an enclosure is a link to, and whether it is read there.
    for (place, is_read) in [(lab.join("name"), true), (folder.path().join("name"), false)] {
        std::fs::write(&place, "Elsewhere\n").expect("a file");
        std::fs::remove_file(&name).expect("the name");
        std::os::unix::fs::symlink(&place, &name).expect("a link");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vm-service"));
        let shown = command.args(["egpu", "--root"]).arg(&lab).arg("info").output().expect("it runs");
        let (out, err) = (String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
        if err.contains("links that lead out") {
            println!("skipped: {err}");
            return;
        }
        assert_eq!((shown.status.code(), out.contains("Elsewhere")), (Some(0), is_read), "{out}{err}");
        assert!(out.contains("0-1"), "{out}{err}");
    }
}

/// Commands that change something refuse a captured tree, and those that read leave it as it is.
#[test]
fn a_captured_tree_is_never_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    assert_eq!(on(&lab, "egpu connect").0, 0);
    let root = lab.display();
    let lock = lab.join("run/ledger/lock");
    if lock.exists() {
        std::fs::remove_file(&lock).expect("removed");
    }
    let store = lab.join("var/lib/vm-passthrough/egpu.toml");
    for args in [
        "policy --authorise always",
        "forget d2030000-00a0-751e-a3f4-c0e5ae7b0d30",
        "connect",
        "disconnect --force",
        "reset",
        "watch",
        "inject heal",
    ] {
        let got = vm_service(&vm_passthrough::Host::system(), &format!("egpu --root {root} {args}"));
        assert_eq!((got.exit, got.out.as_str()), (2, ""), "{args}: {got:?}");
    }
    for args in ["status", "info", "diag", "policy"] {
        vm_service(&vm_passthrough::Host::system(), &format!("egpu --root {root} {args}"));
    }
    assert!(!store.exists() && !lock.exists());
}

#[test]
fn one_that_can_not_be_remembered_is_connected_all_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    assert_eq!(on(&lab, "egpu policy").0, 0);
    let lasting = lab.join("var/lib/vm-passthrough");
    if lasting.exists() {
        std::fs::remove_dir_all(&lasting).expect("removed");
    }
    std::fs::create_dir_all(lab.join("var/lib")).expect("made");
    std::os::unix::fs::symlink("nowhere", &lasting).expect("linked");
    let (exit, out, err) = on(&lab, "egpu connect --remember --json");
    assert!(exit == 1 && err.contains("it is connected, and could not be remembered: "), "{exit} {err}");
    let document: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(document["state"], "ready");
}

#[test]
fn a_rate_that_would_be_none_is_refused() {
    let got = vm_service(&vm_passthrough::Host::system(), "egpu policy --minimum-rate 0.0000001");
    assert!(got.exit == 2 && got.err.contains("less than 0.001"), "{got:?}");
}

/// By force another command is waited for a few seconds.
#[test]
fn a_command_that_holds_an_enclosure_is_not_waited_for_by_force() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    assert_eq!(on(&lab, "egpu connect").0, 0);
    let sim = vm_passthrough::sim::SimHost::open(&lab).expect("the simulated host");
    let host = vm_passthrough::sim::SimDrivers::new(&sim).host();
    let id = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30".parse().expect("a UUID");
    let held = vm_passthrough::ledger::EnclosureLock::of(&host, id, std::time::Duration::ZERO);
    let (exit, _, err) = on(&lab, "egpu disconnect --force");
    assert!(exit == 1 && err.contains(&std::process::id().to_string()), "{exit} {err}");
    drop(held.expect("the lock"));
    assert_eq!(on(&lab, "egpu disconnect --force").0, 0);
}

/// Runtime power management takes the tunnel down: the remembered GPU returns by a new one.
#[test]
fn a_reconnect_keeps_the_remembered_gpu() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let (exit, out, err) = on(&lab, "egpu status");
    assert_eq!((exit, err.as_str()), (0, ""));
    assert!(
        out.contains("0-1 Razer Core X is connected, and not authorised; `vm-service egpu connect 0-1`"),
        "{out}"
    );
    for command in
        ["egpu connect --remember", "egpu inject suspend drops", "egpu reset --reconnect", "egpu connect"]
    {
        let (exit, out, err) = on(&lab, command);
        assert_eq!(exit, 0, "{command}: {out} {err}");
    }
    let out = on(&lab, "egpu status").1;
    assert!(out.contains("0000:32:00.0"), "{out}");
}

/// `diag` reports the causing Xid once, for the GPU and not for its audio function.
#[test]
fn diag_advises_about_the_xid_that_caused_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    assert_eq!(on(&lab, "egpu connect").0, 0);
    let sim = SimHost::open(&lab).expect("the host");
    let log = "4,1,2,-;NVRM: Xid (PCI:0000:32:00): 79, GPU has fallen off the bus.\n\
               4,2,3,-;NVRM: Xid (PCI:0000:32:00): 154, GPU recovery action changed\n";
    sim.write("dev/kmsg", log).expect("a log");
    let out = on(&lab, "egpu diag").1;
    let health = out.split("warning health: ").nth(1).expect("a warning");
    assert!(
        health.starts_with("0000:32:00.0: its driver logged Xid 79: GPU has fallen off the bus."),
        "{out}"
    );
    assert!(health.contains("it also logged Xid 154") && health.contains("power plugs"), "{out}");
    assert_eq!(health.matches("Xid 79").count(), 1, "{out}");
}
