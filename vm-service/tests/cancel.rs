//! Ctrl-C while a kernel runs.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Its kernel @spin never ends.
const TWO: &str = include_str!("two.vir");

#[test]
fn ends_the_launch_and_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("two.vir"), TWO).expect("written");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args([
            "launch",
            "two.vir",
            "--kernel",
            "spin",
            "--device",
            "interpreter",
            "--grid",
            "1",
            "--arg",
            "x=i32[1]",
        ])
        .args(["--out", "x=@x.npy"])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    // It says that it waits once it does, and so takes signals.
    let mut err = BufReader::new(child.stderr.take().expect("its errors"));
    let mut line = String::new();
    err.read_line(&mut line).expect("a line");
    assert!(line.contains("kernel @spin: 2 s so far"), "{line}");
    let asked = Instant::now();
    kill_process(Pid::from_child(&child), Signal::INT).expect("sent");
    let status = child.wait().expect("its end");
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    let mut rest = String::new();
    err.read_to_string(&mut rest).expect("the rest");
    assert_eq!(status.code(), Some(1), "{rest}");
    assert!(rest.contains("error: kernel @spin: cancelled by SIGINT"), "{rest}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("the folder").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
