//! `bridge serve --memory` and `--host-memory`: programs have no more together than they may, and what one held is there again when it or its worker
//! ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use vm_bridge::wire::{Answer, CHUNK, Header, VERSION, code, control, own, put};

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
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/client/tests/memory.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(path("program")).arg(source).arg("-ldl");
        assert!(gcc.status().expect("gcc").success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--memory", "64M", "--host-memory", "64M", "--socket"]);
        command.arg(path("socket")).arg("--stream").arg(path("stream"));
        command.arg("--driver").arg(beside("libvm_cuda_fake.so")).stderr(Stdio::null());
        let server = Running(command.spawn().expect("vm-service"));
        until("the server listens", || path("socket").exists() && path("stream").exists());
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

/// A number in a line of a process's status, in KiB.
fn kib(process: u32, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let found = status.lines().find_map(|said| said.strip_prefix(line)).expect(line);
    found.trim_matches(|c: char| !c.is_ascii_digit()).parse().expect("a number")
}

#[test]
fn a_worker_that_is_sent_images_without_end_holds_no_more_than_its_budget() {
    let place = Place::new();
    let connection = UnixStream::connect(place.folder.path().join("socket")).expect("a connection");
    let order = |words, file: Option<&UnixStream>| {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        vm_bridge::orders::give(&connection, words, &[], &files).expect("an answer")
    };
    assert_eq!(order([control::HELLO, VERSION.into(), 0, 0], None), 0);
    let (lane, theirs) = UnixStream::pair().expect("a lane");
    lane.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    assert_eq!(order([control::LANE, 0, 0, 0], Some(&theirs)), 0);
    let mut ticket = 0;
    let mut send = |call: u16, asks, payload: &[u8]| {
        let header = Header { len: payload.len() as u32, call, asks, is_bulk: false, ticket };
        ticket += 1;
        { &lane }.write_all(&[&header.to_bytes()[..], payload].concat()).expect("sent");
    };
    let answer = || {
        let mut bytes = [0; Answer::SIZE];
        { &lane }.read_exact(&mut bytes).expect("an answer");
        let answer = Answer::from_bytes(bytes).expect("an answer");
        { &lane }.read_exact(&mut vec![0; answer.len as usize]).expect("its payload");
        answer.code
    };
    // It has nothing of its own to say before the driver has begun.
    let flags = vm_cuda_api::number("cuCtxGetFlags").expect("a function") as u16;
    let mut word = Vec::new();
    put(&mut word, 1);
    let [worker] = place.server.workers().try_into().expect("one worker");
    let before = kib(worker, "VmRSS:");
    let image = vec![b'x'; CHUNK];
    let mut codes = Vec::new();
    for _ in 0..4 {
        (0..100).for_each(|_| send(own::IMAGE, false, &image));
        send(flags, true, &word);
        codes.push(answer());
    }
    // The parts are refused, and the session goes on.
    assert_eq!(codes, [2; 4]);
    send(flags, true, &word);
    assert_eq!(answer(), code::NOT_INITIALIZED);
    let peak = kib(worker, "VmHWM:");
    assert!(peak - before < 80 << 10, "{before} KiB, then {peak}");
}

#[test]
fn a_worker_is_killed_before_its_server_when_the_host_has_no_memory() {
    let place = Place::new();
    let (_program, _input) = place.hold();
    let [worker] = place.server.workers().try_into().expect("one worker");
    let score = |process: u32| {
        let text = std::fs::read_to_string(format!("/proc/{process}/oom_score_adj")).expect("its score");
        text.trim().parse::<i32>().expect("a number")
    };
    assert_eq!(score(worker), (score(place.server.0.id()) + 500).min(1000));
}

#[test]
fn a_thread_for_which_the_host_has_no_memory_fails_alone() {
    let place = Place::new();
    for way in ["unix:", "stream:"] {
        let path = place.folder.path().join(if way == "unix:" { "socket" } else { "stream" });
        let mut command = place.command("threads");
        let output =
            command.env("VM_BRIDGE", format!("{way}{}", path.display())).output().expect("the program");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, "a thread: 2, then the first: 0\n", "{way}");
    }
}

#[test]
fn a_quota_that_is_none_is_refused() {
    let check = |option: &str, memory: &str, says: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        let output = command.args(["bridge", "serve", option, memory]).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{option} {memory}: {said}");
    };
    check("--memory", "64", "does not end in K, M, G or T");
    check("--memory", "1K", "is less than 2M");
    check("--memory", "99999999999999T", "is too large");
    check("--host-memory", "64", "does not end in K, M, G or T");
    check("--host-memory", "31M", "is less than 32M");
}
