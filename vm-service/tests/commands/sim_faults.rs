//! `egpu inject`: faults of a simulated host's enclosure, which other commands meet.

use std::path::Path;

use serde_json::Value;
use vm_passthrough::Host;

use super::vm_service;

/// A simulated host in a folder.
struct Lab(tempfile::TempDir);

impl Lab {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("lab")
    }

    /// Runs a command; its exit status, and what it prints.
    fn run(&self, args: &str) -> (u8, String, String) {
        let got = vm_service(&Host::system(), &format!("egpu {args} --sim {}", self.path().display()));
        (got.exit, got.out, got.err)
    }

    #[track_caller]
    fn check(&self, args: &str, exit: u8, expect: &str) -> String {
        let (got, out, err) = self.run(args);
        assert!(got == exit && format!("{out}{err}").contains(expect), "{args}: {got} {out}{err}");
        out
    }

    #[track_caller]
    fn json(&self, args: &str) -> Value {
        let (exit, out, err) = self.run(&format!("{args} --json"));
        assert_eq!(exit, 0, "{args}: {out}{err}");
        serde_json::from_str(&out).expect("JSON")
    }

    fn has(&self, path: &str) -> bool {
        Path::exists(&self.path().join(path))
    }
}

#[test]
fn a_gpu_is_named_by_its_enclosure() {
    const ID: &str = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30";
    let lab = Lab::new();
    lab.check(&format!("status {ID}"), 1, "no GPU is in the enclosure d2030000");
    lab.check("connect", 0, "in this enclosure (inferred)");
    for name in [ID, "0-1", "32:00.0"] {
        let gpus = lab.json(&format!("status {name}"))["gpus"].clone();
        assert_eq!(gpus.as_array().map(Vec::len), Some(1), "{gpus}");
        assert_eq!((&gpus[0]["enclosure_id"], &gpus[0]["router_basis"]), (&ID.into(), &"inferred".into()));
        let (exit, out, err) = lab.run(&format!("monitor {name} -n 1 --json"));
        assert!(exit == 0 && out.contains("0000:32:00.0"), "{out}{err}");
        lab.check(&format!("config show {name}"), 0, "set by           amdgpu");
        lab.check(&format!("config power 260 --gpu {name}"), 0, "260 W");
        lab.check(&format!("benchmark {name}"), 0, "0000:32:00.0");
    }
    lab.check("status 0-3", 1, "no GPU is in the enclosure 0-3");
    lab.check("status sofa", 2, "name a GPU by its PCI address");
}

#[test]
fn ports_retimers_firmware_and_lanes_are_shown() {
    let lab = Lab::new();
    let text = lab.check("info", 0, "tunnels can be taken down");
    for expect in [
        "0-0 (this host) USB4, firmware 60.0\n",
        "    port 1: link Thunderbolt 3, connector port0\n",
        "    port 3: nothing is connected, connector port1\n",
        "    retimer 1 of port 1: 8087:15ee, firmware 7.0\n",
        "    0-1 Razer Core X Thunderbolt 3, 40 Gb/s (2 x 20 Gb/s), not authorised: no PCIe, firmware 41.0, ",
    ] {
        assert!(text.contains(expect), "{expect}: {text}");
    }
}

const GPU: &str = "sys/bus/pci/devices/0000:32:00.0";

#[test]
fn a_simulated_gpu_shows_sensors_and_is_set() {
    let lab = Lab::new();
    lab.check("connect", 0, "ready");
    let gpu = &lab.json("status")["gpus"][0];
    assert_eq!((&gpu["address"], &gpu["driver"]), (&"0000:32:00.0".into(), &"amdgpu".into()), "{gpu}");
    let text = lab.check("status", 0, " °C");
    assert!(text.contains("  Razer Core X (inferred)  "), "{text}");
    assert!(text.starts_with("simulated host: ") && text.contains(" of 303 W  0 %"), "{text}");
    // It is hot as soon as it is said to be, and its model has it from there.
    lab.check("inject temperature 119", 0, "0-1: temperature 119");
    let hot = |gpu: &Value| gpu["telemetry"]["temperature_celsius"].as_f64();
    let hot = hot(&lab.json("status")["gpus"][0]).expect("a temperature");
    assert!((60.0..=119.1).contains(&hot), "{hot}");
    lab.check("inject sensor fails", 0, "sensor fails");
    assert!(!lab.check("status", 0, "amdgpu").contains("°C"));
    lab.check("inject sensor works", 0, "sensor works");
    lab.check("config power 250", 0, "250 W");
    lab.check("config power 500", 2, "348");
    lab.check("config fan 40", 0, "40 %");
    lab.check("inject work", 0, "work");
    assert!(lab.check("status", 0, " of 250 W").contains(" 97 %"));
    lab.check("reset", 3, "it is used by process");
    lab.check("inject heal", 0, "heal");
    lab.check("disconnect --force", 0, "");
    assert!(!lab.has("proc/4194304"), "work ends with its GPU");
}

#[test]
fn hangs_are_cured_by_the_reset_that_can() {
    // What it hangs until, what is said of resets beforehand, which reset is tried, and how that ends.
    for (fault, before, reset, exit, expect) in [
        ("hang", "", "reset", 0, "after a soft reset"),
        ("hang hard", "", "reset", 1, "did not help"),
        ("hang hard", "", "reset --hard", 0, "after a hard reset"),
        ("hang hard", "reset hard lies", "reset --hard", 1, "did not help"),
        ("hang hard", "reset hard fails 1", "reset --hard", 1, "cannot reset 0000:32:00.0 (bus)"),
        ("hang reconnect", "", "reset --hard", 1, "did not help"),
        ("hang reconnect", "", "reset --reconnect", 0, "after a reconnect"),
        ("hang reconnect", "deauthorise fails 1", "reset --reconnect", 1, "write 0 to"),
        ("hang unplug", "", "reset --reconnect", 1, ""),
    ] {
        let lab = Lab::new();
        lab.check("connect", 0, "ready");
        if !before.is_empty() {
            lab.check(&format!("inject {before}"), 0, before);
        }
        lab.check(&format!("inject {fault}"), 0, "hang");
        lab.check("diag", 1, "FAILED  integrity");
        lab.check(reset, exit, expect);
        if exit == 0 {
            lab.check("diag", 0, "ok      integrity");
        }
        // A cable that is pulled takes the power with it.
        lab.check("inject unplug", 0, "unplug");
        assert!(!lab.has(GPU) && !lab.has("sys/bus/thunderbolt/devices/0-1"));
        lab.check("connect", 1, "");
        lab.check("inject heal", 0, "heal");
        lab.check("inject plug", 0, "plug");
        lab.check("connect", 0, "ready");
        lab.check("diag", 0, "ok      integrity");
    }
}

#[test]
fn what_comes_behind_a_tunnel_is_as_injected() {
    for (fault, exit, expect) in [
        ("enumerate no-room", 1, "gives no address to BAR"),
        ("enumerate other 1", 1, "and the one that is known has"),
        ("authorise fails 1", 1, "write 1 to"),
        ("reset reconnect fails 1", 1, "write 1 to"),
    ] {
        let lab = Lab::new();
        lab.check("connect --remember", 0, "ready");
        lab.check("disconnect", 0, "0-1");
        lab.check(&format!("inject {fault}"), 0, fault);
        lab.check("connect", exit, expect);
        lab.check("inject heal", 0, "heal");
        if lab.has(GPU) {
            lab.check("disconnect", 0, "0-1");
        }
        lab.check("connect", 0, "ready");
    }
    let lab = Lab::new();
    lab.check("connect", 0, "ready");
    lab.check("inject tunnel drops", 0, "tunnel");
    assert!(!lab.has(GPU));
    lab.check("inject tunnel comes", 0, "tunnel");
    lab.check("diag", 0, "ok      integrity");
    lab.check("inject suspend", 0, "suspend");
    lab.check("status", 0, "it is asleep");
    lab.check("inject suspend drops", 0, "suspend");
    assert!(!lab.has(GPU));
}

#[test]
fn checked_copies_find_what_the_link_corrupts() {
    let lab = Lab::new();
    lab.check("connect", 0, "ready");
    let checks = |lab: &Lab| lab.json("benchmark --checked")["checks"].clone();
    let clean = checks(&lab);
    let count = |checks: &Value, name: &str| checks[name].as_u64().expect("a number");
    assert!(count(&clean, "chunks") > 300 && count(&clean, "corrupted") == 0, "{clean}");
    lab.check("inject corrupt 1e-6", 0, "corrupt 1e-6");
    let bad = checks(&lab);
    assert!(count(&bad, "corrupted") > 0 && count(&bad, "resent") == count(&bad, "corrupted"), "{bad}");
    // Without a check nobody notices, and nothing is counted.
    assert_eq!(lab.json("benchmark")["checks"], Value::Null);
    lab.check("inject corrupt 1", 0, "corrupt");
    lab.check("benchmark --checked", 1, "arrived corrupted 6 times in a row");
    lab.check("inject errors 0.5", 0, "errors");
    lab.check("benchmark", 1, "its link went down");
}

#[test]
fn what_can_not_be_injected_says_what_can() {
    let lab = Lab::new();
    lab.check("inject hagn", 2, "`hagn` is no fault");
    lab.check("inject guest takes", 2, "vm-service claim");
    lab.check("inject enumerate endless", 2, "egpu simulate");
    lab.check("inject hang --enclosure 0-3", 2, "no enclosure at 0-3");
    let got = vm_service(&Host::system(), "egpu inject hang");
    assert!(got.exit == 2 && got.err.contains("--sim DIR"), "{got:?}");
    let injected = lab.json("inject hang hard");
    assert_eq!((&injected["simulated"], &injected["fault"]), (&true.into(), &"hang hard".into()));
}
