//! What a test sees of another process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the hidden command is of a guest's VMM, and of a worker.
pub(crate) const VMM: &str = "guest-vmm";
pub(crate) const WORKER: &str = "accelerator-worker";

/// The child of a process that this command is, if it has one now.
pub(crate) fn find_child(process: u32, command: &str) -> Option<u32> {
    let is_it = |child: &&str| {
        fs::read_to_string(format!("/proc/{child}/cmdline"))
            .is_ok_and(|words| words.split('\0').any(|word| word == command))
    };
    let children =
        tasks(process).flat_map(|task| fs::read_to_string(task.join("children"))).collect::<String>();
    let child = children.split_whitespace().find(is_it)?;
    Some(child.parse().expect("a process id"))
}

/// The child of a `run` that this hidden command is.
pub(crate) fn child_of(run: u32, command: &str) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(child) = find_child(run, command) {
            return child;
        }
        assert!(Instant::now() < deadline, "{run} has no {command}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The directories of a process's threads in `/proc`.
pub(crate) fn tasks(process: u32) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten().map(|task| task.path())
}

/// `/proc/PID/status` of a process that runs; `None` of one that has ended.
pub(crate) fn status(process: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/status")).ok().filter(|status| !status.contains("State:\tZ"))
}

/// The descriptors of a process, and what they are.
pub(crate) fn descriptors(process: u32) -> Vec<(u32, String)> {
    let mut files = Vec::new();
    for entry in
        fs::read_dir(Path::new("/proc").join(process.to_string()).join("fd")).expect("descriptors").flatten()
    {
        let number = entry.file_name().to_string_lossy().parse().expect("a number");
        if let Ok(file) = fs::read_link(entry.path()) {
            files.push((number, file.to_string_lossy().into_owned()));
        }
    }
    files
}

/// Sends a signal.
pub(crate) fn kill(process: u32, signal: i32) {
    let signal = rustix::process::Signal::from_named_raw(signal).expect("a signal");
    let process = rustix::process::Pid::from_raw(process as i32).expect("a process id");
    rustix::process::kill_process(process, signal).expect("sent");
}
