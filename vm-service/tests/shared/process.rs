//! What a test sees of another process.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// The worker of a VMM's process: its only child.
pub(crate) fn worker_of(vmm: u32) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let children = fs::read_dir(format!("/proc/{vmm}/task"))
            .into_iter()
            .flatten()
            .flatten()
            .flat_map(|task| fs::read_to_string(task.path().join("children")))
            .collect::<String>();
        let mut children = children.split_whitespace();
        if let (Some(child), None) = (children.next(), children.next()) {
            return child.parse().expect("a process id");
        }
        assert!(Instant::now() < deadline, "{vmm} has no worker");
        std::thread::sleep(Duration::from_millis(5));
    }
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
