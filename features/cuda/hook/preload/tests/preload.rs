//! Programs with the hook before a driver, and without: they find the same.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

/// A directory with the fake driver as `libcuda.so.1`, and the programs.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.path().join("libcuda.so.1"))
            .expect("a link");
        for name in ["grow", "peer", "traps"] {
            let mut command = Command::new("gcc");
            command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-o"]).arg(folder.path().join(name));
            command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"))).arg("-ldl");
            assert!(command.status().expect("gcc").success());
        }
        folder
    });
    made.path()
}

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// What `grow` says, and the hook's log.
fn run(arguments: &[&str], hook: bool, environment: &[(&str, &str)]) -> (String, String) {
    run_program("grow", arguments, hook, environment)
}

fn run_program(
    program: &str,
    arguments: &[&str],
    hook: bool,
    environment: &[(&str, &str)],
) -> (String, String) {
    let log = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new(folder().join(program));
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder())
        .env("XDG_RUNTIME_DIR", folder())
        .env("VM_CUDA_FAKE_MEMORY", (4u64 << 30).to_string());
    command.env("VMM_LOG_LEVEL", "DEBUG").env("VMM_LOG_FILE", log.path()).envs(environment.iter().copied());
    if hook {
        command.env("LD_PRELOAD", beside("libvmhook.so"));
    }
    let output = command.output().expect("the program");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}, hook {hook}: {}\n{said}{wrong}", output.status);
    (said, std::fs::read_to_string(log.path()).expect("the log"))
}

fn count(log: &str, event: &str) -> usize {
    log.matches(&format!("\"event\":\"{event}\"")).count()
}

/// Runs a program with the hook, which must find what it found without, until so many moves are in its log. A copy is put off for 1 ms at
/// most, so on a busy machine a run may have fewer.
fn run_until_moved(
    program: &str,
    arguments: &[&str],
    environment: &[(&str, &str)],
    found: &str,
    moves: usize,
) -> String {
    const RUNS: usize = 100;
    let mut last = String::new();
    for _ in 0..RUNS {
        let (with, log) = run_program(program, arguments, true, environment);
        assert_eq!(with, found, "{arguments:?}\n{log}");
        if count(&log, "moved") == moves {
            return log;
        }
        last = log;
    }
    panic!("{program} {arguments:?} never has {moves} moves:\n{last}");
}

#[test]
fn programs_find_the_same() {
    let (without, log) = run(&["dlsym"], false, &[]);
    assert_eq!(log, "");
    assert!(without.contains("3: 7 2 3 3") && without.ends_with("left: 1\n"), "{without}");
    for arguments in [&["dlsym"][..], &["proc"], &["dlsym", "deepbind"], &["proc", "deepbind"]] {
        let log = run_until_moved("grow", arguments, &[], &without, 4);
        assert!(log.lines().all(|line| line.starts_with("{\"time\":") && line.ends_with('}')), "{log}");
    }
    // Natively, and only told of.
    let (with, log) = run(&["proc"], true, &[("VMM_MODE", "MONITOR")]);
    assert_eq!(with, without);
    assert!(count(&log, "moved") == 0 && count(&log, "native-allocated") == 8, "{log}");
    assert!(
        log.lines().next().is_some_and(|line| line.contains("\"start\"") && line.contains("MONITOR")),
        "{log}"
    );
    assert_eq!(count(&log, "failed"), 1, "{log}");
}

#[test]
fn what_fails_is_not_seen() {
    let (without, _) = run(&["dlsym"], false, &[]);
    // Mapping fails when memory is to be moved: it is copied. The first maps are of the first allocation and of what is behind the second's part.
    for call in 1..8 {
        let fails = format!("cuMemMap:{call}=999");
        let (with, log) = run(&["dlsym"], true, &[("VM_CUDA_FAKE_FAIL", fails.as_str())]);
        assert_eq!(with, without, "{fails}\n{log}");
    }
}

#[test]
fn devices_reach_each_others_memory() {
    let two = [("VM_CUDA_FAKE_DEVICES", "2")];
    let (without, _) = run_program("peer", &[], false, &two);
    assert!(without.matches("right").count() == 6 && !without.contains("wrong"), "{without}");
    let log = run_until_moved("peer", &[], &two, &without, 2);
    assert!(!log.contains("no-access"), "{log}");
}

#[test]
fn memory_is_what_the_drivers_own_is() {
    let (without, _) = run_program("traps", &[], false, &[]);
    assert!(without.contains("replayed: 0 0 22 22\n"), "{without}");
    let (with, log) = run_program("traps", &[], true, &[]);
    assert_eq!(with, without, "{log}");
    // A driver of CUDA 11.2 has no cuGetProcAddress.
    let old = [("VM_CUDA_FAKE_VERSION", "11020")];
    let (with, log) = run_program("traps", &[], true, &old);
    assert_eq!(with, run_program("traps", &[], false, &old).0, "{log}");
}

/// The log tells of a program's memory.
#[test]
fn a_new_log_is_the_users_alone_whatever_the_umask() {
    use std::os::unix::fs::PermissionsExt as _;

    let place = tempfile::tempdir().expect("a folder");
    let log = place.path().join("log");
    let mut command = Command::new("sh");
    command.args(["-c", "umask 0; exec \"$@\"", "sh"]).arg(folder().join("grow")).args(["1", "2"]);
    command.env("LD_LIBRARY_PATH", folder()).env("XDG_RUNTIME_DIR", folder());
    command.env("VMM_LOG_FILE", &log).env("LD_PRELOAD", beside("libvmhook.so"));
    command.output().expect("the program");
    assert_eq!(log.metadata().expect("a log").permissions().mode() & 0o777, 0o600);
}
