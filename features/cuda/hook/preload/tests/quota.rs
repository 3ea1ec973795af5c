//! The quota is of all memory of devices: a program finds the same as on a device that has no more.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// What the program says, and its log.
fn run(folder: &Path, environment: &[(&str, &str)], hook: bool) -> (String, Vec<serde_json::Value>) {
    run_as(folder, &[], environment, hook)
}

fn run_as(
    folder: &Path,
    arguments: &[&str],
    environment: &[(&str, &str)],
    hook: bool,
) -> (String, Vec<serde_json::Value>) {
    let log = folder.join("log");
    let _ = std::fs::remove_file(&log);
    let mut command = Command::new(folder.join("quota"));
    command.args(arguments).env("LD_LIBRARY_PATH", folder).env("XDG_RUNTIME_DIR", folder);
    command.env("VMM_LOG_LEVEL", "INFO").env("VMM_LOG_FILE", &log).envs(environment.iter().copied());
    if hook {
        command.env("LD_PRELOAD", beside("libvmhook.so"));
    }
    let output = command.output().expect("the program");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{environment:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    let log = std::fs::read_to_string(&log).unwrap_or_default();
    (said, log.lines().map(|line| serde_json::from_str(line).expect(line)).collect())
}

#[test]
fn a_quota_is_as_a_smaller_device() {
    let folder = tempfile::tempdir().expect("a directory");
    let folder = folder.path();
    std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.join("libcuda.so.1")).expect("a link");
    let mut command = Command::new("gcc");
    command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-o"]).arg(folder.join("quota"));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quota.c")).args(["-ldl", "-pthread"]);
    assert!(command.status().expect("gcc").success());

    let (without, _) = run(folder, &[("VM_CUDA_FAKE_MEMORY", "33554432")], false);
    // What a pool keeps is not free, and its own.
    assert!(without.contains("kept: 4, then 2, left 0, freed 0\nkept: 4,"), "{without}");
    assert!(without.contains("mapped: 4, then 2, left 0, freed 32\n"), "{without}");
    assert!(without.ends_with("threads, left 32\n"), "{without}");
    let (with, log) = run(folder, &[("VMM_QUOTA", "32M")], true);
    assert_eq!(with, without, "{log:#?}");

    let (without, _) = run_as(folder, &["pools"], &[("VM_CUDA_FAKE_MEMORY", "33554432")], false);
    assert!(without.starts_with("two pools: 0, held 32, left 0\noutlives its pool: 0, "), "{without}");
    let (with, log) = run_as(folder, &["pools"], &[("VMM_QUOTA", "32M")], true);
    assert_eq!(with, without, "{log:#?}");

    // Without a quota each allocation and its end is a line of the log.
    let (_, log) = run(folder, &[("VMM_MODE", "MONITOR"), ("VM_CUDA_FAKE_MEMORY", "33554432")], true);
    let mut kinds = BTreeMap::<String, (u64, u64)>::new();
    for line in &log {
        let of = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        let bytes = line["bytes"].as_u64().unwrap_or(0);
        match &*of("event") {
            "native-allocated" => kinds.entry(of("kind")).or_default().0 += bytes,
            "native-freed" => kinds.entry(of("kind")).or_default().1 += bytes,
            "start" => continue,
            other => assert_eq!(other, "failed"),
        }
        let named = if matches!(&*of("kind"), "physical" | "array") { "handle" } else { "address" };
        assert!(line["event"] == "failed" || of(named).starts_with("0x"), "{line}");
    }
    let kinds: Vec<(&str, bool)> = kinds.iter().map(|(kind, of)| (&**kind, of.0 == of.1)).collect();
    assert_eq!(kinds, [("array", true), ("device", true), ("physical", true), ("pool", true)]);
}
