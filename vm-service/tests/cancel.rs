//! Ctrl-C while a kernel runs.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A kernel that never ends.
const SPIN: &str = "vir 1
kernel @spin(@x: view<i32, [1], readwrite>) at 0x2000 block(1) {
  %i = const 0 : i64
  %zero = const 0 : i32
  while {
    %a = load @x[%i] : i32
    %on = eq %a, %zero : bool
    yield %on
  } do {
    store @x[%i], %zero
  }
}
";

#[test]
fn ends_the_launch_and_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("spin.vir"), SPIN).expect("written");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(["launch", "spin.vir", "--device", "interpreter", "--grid", "1", "--arg", "x=i32[1]"])
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
