//! `bridge serve --deadline`: a program whose work on the device makes no progress is ended and told so, and no other is.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Running, beside, until};

/// A server with a deadline, and the program.
struct Place {
    server: Running,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(driver: &str, deadline: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), path("bridge/libcuda.so.1")).expect("a link");
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/client/tests/deadline.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-Wall", "-Wextra", "-pthread", "-o"]);
        assert!(gcc.arg(path("program")).arg(source).arg("-ldl").status().expect("gcc").success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--deadline", deadline, "--socket"]).arg(path("socket"));
        command.arg("--stream").arg(path("stream")).arg("--driver").arg(beside(driver));
        // The processor's driver has a limit of its own for a kernel.
        let server = command.env("VM_CUDA_CPU_SECONDS", "3600").stderr(Stdio::null());
        let server = Running(server.spawn().expect("vm-service"));
        until("the server listens", || path("stream").exists());
        Self { server, folder }
    }

    /// What a program says.
    fn run(&self, way: &str, arguments: &[String]) -> String {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(path("program"));
        command.args(arguments).env("LD_LIBRARY_PATH", path("bridge")).env("VM_BRIDGE_LOG", path("log"));
        let place = if way == "stream" { "stream" } else { "unix" };
        let socket = path(if way == "stream" { "stream" } else { "socket" });
        command.env("VM_BRIDGE", format!("{place}:{}", socket.display()));
        if way == "bytes" {
            command.env("VM_BRIDGE_STREAM", "1");
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program");
        let end = Instant::now() + Duration::from_secs(120);
        while child.try_wait().expect("asked").is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        // It fails on one that has ended.
        let _ = child.kill();
        let output = child.wait_with_output().expect("the program");
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    /// Runs programs, all at once: each by its name, how it connects, and whether it is ended.
    fn check(&self, more: &[&str], programs: &[(&str, &str, bool)]) {
        std::thread::scope(|scope| {
            let start = |(name, way, _): &(&str, &str, bool)| {
                let arguments: Vec<String> =
                    [&[*name], more].concat().into_iter().map(str::to_owned).collect();
                let way = (*way).to_owned();
                scope.spawn(move || self.run(&way, &arguments))
            };
            let started: Vec<_> = programs.iter().map(start).collect();
            for ((name, way, is_ended), run) in programs.iter().zip(started) {
                let ends = if *is_ended { "702 702 CUDA_ERROR_LAUNCH_TIMEOUT" } else { "0 0 CUDA_SUCCESS" };
                assert_eq!(run.join().expect("a program"), format!("{name}: {ends}\n"), "{way}");
            }
        });
        until("all workers have ended", || self.server.workers().is_empty());
    }
}

#[test]
fn what_makes_no_progress_is_ended_and_nothing_else() {
    let place = Place::new("libvm_cuda_fake.so", "2s");
    place.check(
        &[],
        &[
            ("legacy", "memory", true),
            ("legacy", "stream", true),
            ("legacy", "bytes", true),
            ("own", "memory", true),
            ("own", "bytes", true),
            ("own_waited", "memory", true),
            ("free", "memory", true),
            ("free", "stream", true),
            ("blocks", "memory", true),
            ("asked", "memory", true),
            ("thread_ended", "memory", true),
            ("destroyed", "memory", true),
            ("released", "memory", true),
            ("hidden", "memory", true),
            ("behind_wait", "memory", true),
            ("before_wait", "memory", true),
            ("before_capture", "memory", true),
            ("graph", "memory", true),
            ("honest_queue", "memory", false),
            ("honest_legacy", "memory", false),
            ("honest_own", "memory", false),
            ("honest_own", "bytes", false),
            ("honest_many", "memory", false),
            ("honest_waits", "memory", false),
            ("honest_implicit", "memory", false),
            ("honest_callback", "memory", false),
            ("honest_value", "memory", false),
            ("honest_capture", "memory", false),
            ("honest_idle", "memory", false),
        ],
    );
    // The next one is served.
    place.check(&[], &[("honest_idle", "stream", false)]);
}

#[test]
fn the_end_of_a_context_that_waits_for_what_does_not_end_is_late_too() {
    let place = Place::new("libvm_cuda_fake.so", "50ms");
    place.check(&[], &[("reset", "memory", true), ("context_destroyed", "stream", true)]);
}

/// A kernel that is alone, as the program has waited for all before it, has one deadline. Behind 24 that are not done it has 24.
#[test]
fn what_was_waited_for_gives_no_deadlines_to_what_follows() {
    let place = Place::new("libvm_cuda_fake.so", "500ms");
    let (ended, first) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for name in ["queued", "alone"] {
            let (place, ended) = (&place, ended.clone());
            scope.spawn(move || ended.send(place.run("memory", &[name.to_owned()])).expect("awaited"));
        }
        let says = |name: &str| format!("{name}: 702 702 CUDA_ERROR_LAUNCH_TIMEOUT\n");
        assert_eq!(first.recv(), Ok(says("alone")));
        assert_eq!(first.recv(), Ok(says("queued")));
    });
}

#[test]
fn kernels_of_ptx_that_do_not_end_are_ended() {
    let place = Place::new("libvm_cuda_cpu.so", "2s");
    place.check(
        &["400", "ptx"],
        &[("free", "memory", true), ("graph", "stream", true), ("hidden", "memory", true)],
    );
    place.check(&["0", "ptx"], &[("honest_many", "memory", false)]);
}

#[test]
fn a_deadline_that_is_none_is_refused() {
    let check = |deadline: &str, says: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        let output = command.args(["bridge", "serve", "--deadline", deadline]).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{deadline}: {said}");
    };
    check("2", "does not end in us, ms or s");
    check("1ms", "is less than 10ms");
    check("3601s", "is more than 3600s");
}
