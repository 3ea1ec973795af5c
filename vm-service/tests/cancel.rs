//! Ctrl-C while a kernel runs.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
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
    assert!(asked.elapsed() < Duration::from_secs(120), "{:?}", asked.elapsed());
    let mut rest = String::new();
    err.read_to_string(&mut rest).expect("the rest");
    assert_eq!(status.code(), Some(1), "{rest}");
    assert!(rest.contains("error: kernel @spin: cancelled by SIGINT"), "{rest}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("the folder").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// With `--trusted` nothing stops a kernel but the end of the process.
#[cfg(feature = "cpu")]
#[test]
fn gives_up_what_can_t_be_stopped() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("two.vir"), TWO).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(
            "launch two.vir --kernel spin --device cpu --grid 1 --arg x=i32[1] --trusted --deadline 0.2"
                .split(' '),
        )
        .current_dir(dir.path())
        .output()
        .expect("its end");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("kernel @spin did not end within 0.2 s: with --trusted it can't be stopped"),
        "{err}"
    );
}

/// Behind the work, who waits for a reader is ended as any other program is.
#[test]
fn ends_what_nobody_reads() {
    const HELD: u64 = 64 << 10;
    let dir = tempfile::tempdir().expect("a folder");
    let sums: String = (0..4_000).map(|n| format!("%s{} = add %s{n}, %x : i32\n", n + 1)).collect();
    let text = format!(
        "vir 1\nkernel @long(@y: view<i32, [?], write>, %x: i32) at 0x0 block(1) {{\n%i = const 0 : i64\n\
         %s0 = mul %x, %x : i32\n{sums}store @y[%i], %s4000\n}}\n"
    );
    std::fs::write(dir.path().join("long.vir"), text).expect("written");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(["compile", "long.vir", "--target", "ptx:sm_90a"])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let out = child.stdout.take().expect("its output");
    let deadline = Instant::now() + Duration::from_secs(60);
    while rustix::io::ioctl_fionread(&out).expect("its length") < HELD {
        assert!(Instant::now() < deadline, "the pipe is not full");
        std::thread::sleep(Duration::from_millis(10));
    }
    let asked = Instant::now();
    kill_process(Pid::from_child(&child), Signal::TERM).expect("sent");
    let status = loop {
        if let Some(status) = child.try_wait().expect("its end") {
            break status;
        }
        if asked.elapsed() > Duration::from_secs(10) {
            child.kill().expect("killed");
            panic!("SIGTERM did not end it");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
}

/// What an assembler started ends with it: here it is a script that waits for another process.
#[cfg(feature = "rocm")]
#[test]
fn ends_what_assemblers_started() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("two.vir"), TWO).expect("written");
    let started = dir.path().join("started");
    let script = format!("#!/bin/sh\n/bin/sleep 1000 &\necho $! >'{}'\nwait\n", started.display());
    for name in ["llc", "ld.lld"] {
        let file = dir.path().join(name);
        std::fs::write(&file, &script).expect("written");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).expect("a program");
    }
    let child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(["compile", "two.vir", "--target", "amdgcn:gfx942", "-o", "two.hsaco"])
        .env("VM_ROCM_LLVM", dir.path())
        .env("XDG_CACHE_HOME", dir.path())
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let deadline = Instant::now() + Duration::from_secs(60);
    let until = |what: &str, done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let number = || std::fs::read_to_string(&started).is_ok_and(|text| text.ends_with('\n'));
    until("the assembler does not start", &number);
    let sleeper = std::fs::read_to_string(&started).expect("its number").trim().to_owned();
    kill_process(Pid::from_child(&child), Signal::INT).expect("sent");
    let output = child.wait_with_output().expect("its end");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("cancelled by SIGINT"), "{err}");
    // It has gone, or only waits for whoever has it now to ask how it ended.
    until("what it started is still there", &|| {
        let stat = std::fs::read_to_string(format!("/proc/{sleeper}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
    });
}
