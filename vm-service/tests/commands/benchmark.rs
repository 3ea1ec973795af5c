//! `egpu benchmark`: on a simulated enclosure, and what keeps a GPU from being measured.

use serde_json::Value;
use vm_passthrough::Host;
use vm_passthrough::sim::{SimFunction, SimHost};

use super::host::address;
use super::vm_service;

/// Runs a command on the simulated host in a folder; its exit status, standard output and standard error.
fn on(lab: &std::path::Path, args: &str) -> (u8, String, String) {
    let got = vm_service(&Host::system(), &format!("{args} --sim {}", lab.display()));
    (got.exit, got.out, got.err)
}

#[test]
fn a_simulated_enclosure_is_measured_by_its_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let check = |args: &str, exit: u8, expect: &str| {
        let (got, out, err) = on(&lab, &format!("egpu {args}"));
        assert!(got == exit && format!("{out}{err}").contains(expect), "{args}: {got} {out}{err}");
    };
    check("benchmark", 1, "no GPU is behind a tunnel; name one");
    check("b 0000:99:00.0", 1, "0000:99:00.0");
    // One that is in no enclosure has no link that is modelled.
    check("benchmark 01:00.0", 1, "what is simulated of links are those of enclosures");
    check("connect", 0, "ready");
    check("benchmark --checked", 0, "chunks, 0 corrupted, 0 sent again");
    check("benchmark --deadline soon", 2, "write seconds");
    check("benchmark", 0, "0000:32:00.0");
    check(
        "b 32:00.0",
        0,
        ", simulated in Razer Core X (inferred)\nits link allows 4.10 GB/s to it and 4.10 GB/s from it",
    );

    let (exit, out, err) = on(&lab, "egpu benchmark --json");
    assert_eq!(exit, 0, "{err}");
    let json: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&json["simulated"], &json["address"]), (&true.into(), &"0000:32:00.0".into()));
    assert_eq!(
        (&json["f32_flops"], &json["memory_bytes_per_second"], &json["checks"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    let transfers = json["transfers"].as_array().expect("transfers");
    assert_eq!(transfers.len(), 6, "{out}");
    for transfer in transfers {
        // 32 of 40 Gb/s are PCIe's, and nothing else takes of it.
        let percent = transfer["percent_of_link"].as_f64().expect("a share");
        assert!((79.0..=80.1).contains(&percent), "{transfer}");
    }
    let directions: Vec<_> = transfers.iter().map(|transfer| transfer["direction"].as_str()).collect();
    assert_eq!((directions[0], directions[5]), (Some("to-device"), Some("from-device")));
    let latency = json["latencies"][0]["seconds"]["median"].as_f64().expect("a time");
    assert!((5e-7..1e-6).contains(&latency), "{latency}");
}

#[test]
fn what_can_not_be_measured_says_why() {
    let sim = SimHost::new().expect("a host");
    for driver in ["nvidia", "amdgpu", "i915"] {
        sim.add_driver(driver).expect("a driver");
    }
    for (at, vendor, device, driver) in [
        ("01:00.0", 0x10de, 0x2684, "nvidia"),
        ("02:00.0", 0x1002, 0x744c, "amdgpu"),
        ("03:00.0", 0x8086, 0x56a0, "i915"),
    ] {
        let gpu = SimFunction::new(address(at), vendor, device, 0x03_0000).express(0).group(1).driver(driver);
        sim.add(&gpu).expect("a function");
    }
    let host = sim.plain_host();
    let check = |args: &str, exit: u8, expect: &[&str]| {
        let got = vm_service(&host, &format!("egpu {args}"));
        let is_said = expect.iter().any(|expect| got.err.contains(expect));
        assert!(
            got.exit == exit && got.out.is_empty() && is_said,
            "{args}: {} {}{}",
            got.exit,
            got.out,
            got.err
        );
    };
    check(
        "benchmark",
        1,
        &["no GPU is behind a tunnel; name one, as `vm-service egpu status --all` lists them"],
    );
    // The GPU is not there where a driver is.
    check("benchmark 01:00.0", 1, &["libcuda.so.1 can't be used", "no accelerator 0000:01:00.0"]);
    check(
        "benchmark 01:00.0 --checked --json",
        1,
        &["libcuda.so.1 can't be used", "no accelerator 0000:01:00.0"],
    );
    check("b 02:00.0", 1, &["amdgpu"]);
    check("b 03:00.0", 1, &["is no accelerator that runs kernels"]);
    let root = format!("--root {} b 01:00.0", host.sys.parent().expect("a folder").display());
    check(&root, 2, &["a captured tree has no GPU that could be measured; leave out --root"]);
}
