//! What becomes of programs whose process is killed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use vm_assemble::{Job, Limits, Memory, Program, Scratch};

const DEADLINE: Duration = Duration::from_secs(20);
const FOLDER: &str = "ORPHANS_FOLDER";

/// Starts a program that starts another, and waits.
#[test]
#[ignore = "it is the process that the other test starts"]
fn a_process() {
    let folder = std::env::var(FOLDER).unwrap();
    let script = format!("sleep 1000 & echo $$ $! > {folder}/new && mv {folder}/new {folder}/pids; wait");
    let program = Program {
        path: Path::new("/bin/sh"),
        arguments: vec!["-c".into(), script.into()],
        environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
        memory: Memory::Space,
        prints: true,
        limits: Limits { time: 10 * DEADLINE, ..Limits::default() },
    };
    let job = Job::start(program, Scratch::new("output").unwrap(), &[]).unwrap();
    job.end(Instant::now() + 10 * DEADLINE).unwrap();
}

#[test]
fn the_end_of_a_process_ends_its_programs_and_what_they_started() {
    let folder = tempfile::tempdir().unwrap();
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process", "--ignored"])
        .env(FOLDER, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + DEADLINE;
    let pids = loop {
        if let Ok(pids) = fs::read_to_string(folder.path().join("pids")) {
            break pids;
        }
        assert!(Instant::now() < until, "it was not started");
        std::thread::sleep(Duration::from_millis(5));
    };
    let open = |pid: &str| {
        pidfd_open(Pid::from_raw(pid.parse().unwrap()).unwrap(), PidfdFlags::empty()).expect("it runs")
    };
    let processes: Vec<_> = pids.split_whitespace().map(open).collect();
    assert_eq!(processes.len(), 2, "{pids}");
    parent.kill().unwrap();
    parent.wait().unwrap();
    for process in &processes {
        let timeout = Timespec::try_from(DEADLINE).unwrap();
        let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout));
        assert_eq!(ended, Ok(1), "one of {pids} goes on");
    }
}
