//! `bridge serve --memory`: programs have no more together than they may, and what one held is there again when it or its worker ends.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use crate::process::{Running, beside, until};

/// A server with 64 MiB for all programs, and the program.
struct Place {
    server: Running,
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), path("bridge/libcuda.so.1")).expect("a link");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/bridge-guest/tests/memory.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-o"]).arg(path("program")).arg(source).arg("-ldl");
        assert!(gcc.status().expect("gcc").success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--memory", "64M", "--socket"]).arg(path("socket"));
        command.arg("--driver").arg(beside("libvm_cuda_fake.so")).stderr(Stdio::null());
        let server = Running(command.spawn().expect("vm-service"));
        until("the server listens", || path("socket").exists());
        Self { server, folder }
    }

    fn command(&self, way: &str) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(path("program"));
        command.arg(way).env("LD_LIBRARY_PATH", path("bridge"));
        command.env("VM_BRIDGE", format!("unix:{}", path("socket").display()));
        command
    }

    /// What a program says that takes all that it gets.
    fn fill(&self) -> String {
        let output = self.command("fill").output().expect("the program");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A program that holds 40 MiB.
    fn hold(&self) -> (Running, ChildStdin) {
        let mut command = self.command("hold");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program");
        let input = child.stdin.take().expect("its input");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "holds\n");
        (Running(child), input)
    }
}

const FULL: &str = "made 8, then 2, of 64 MiB\n";

#[test]
fn programs_have_no_more_together_than_they_may() {
    let place = Place::new();
    assert_eq!(place.fill(), FULL);
    let kill_program = |(mut program, _input): (Running, ChildStdin)| program.0.kill().expect("killed");
    let kill_worker = |(_program, _input): (Running, ChildStdin)| {
        let [worker] = place.server.workers().try_into().expect("one worker");
        let worker = rustix::process::Pid::from_raw(worker as i32).expect("a process");
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).expect("killed");
    };
    let end = |(mut program, input): (Running, ChildStdin)| {
        drop(input);
        assert!(program.0.wait().expect("ended").success());
    };
    let ends: [&dyn Fn((Running, ChildStdin)); 3] = [&kill_program, &kill_worker, &end];
    for end in ends {
        until("the workers before have ended", || place.server.workers().is_empty());
        let holds = place.hold();
        let said = place.fill();
        assert_eq!(said, "made 3, then 2, of 64 MiB\n");
        until("the worker of the other has ended", || place.server.workers().len() == 1);
        end(holds);
        until("what it held is given back", || place.fill() == FULL);
    }
}

#[test]
fn programs_and_workers_that_are_killed_anywhere_leave_nothing() {
    let place = Place::new();
    // What the server makes once is there then.
    assert_eq!(place.fill(), FULL);
    until("the first worker has ended", || place.server.workers().is_empty());
    let before = place.server.has();
    for number in 0..100u64 {
        let mut command = place.command("hold");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut program = Running(command.spawn().expect("the program"));
        // Somewhere between its first connection and its last call.
        std::thread::sleep(Duration::from_micros(number * 7919 % 100 * 300));
        if number % 2 == 0 {
            for worker in place.server.workers() {
                let worker = rustix::process::Pid::from_raw(worker as i32).expect("a process");
                // It may have ended.
                let _ = rustix::process::kill_process(worker, rustix::process::Signal::KILL);
            }
        }
        program.0.kill().expect("killed");
    }
    until("all workers have ended", || place.server.workers().is_empty());
    until("the server has what it had", || {
        place.server.has().iter().zip(&before).all(|(now, then)| now <= then)
    });
    assert_eq!(place.fill(), FULL);
}

#[test]
fn a_worker_has_a_list_of_system_calls() {
    let place = Place::new();
    let (_program, _input) = place.hold();
    let [worker] = place.server.workers().try_into().expect("one worker");
    let status = std::fs::read_to_string(format!("/proc/{worker}/status")).expect("its status");
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1"] {
        assert!(status.lines().any(|said| said == line), "{line}: {status}");
    }
}

#[test]
fn a_quota_that_is_none_is_refused() {
    let check = |memory: &str, says: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        let output = command.args(["bridge", "serve", "--memory", memory]).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{memory}: {said}");
    };
    check("64", "does not end in K, M, G or T");
    check("1K", "is less than 2M");
    check("99999999999999T", "is too large");
}
