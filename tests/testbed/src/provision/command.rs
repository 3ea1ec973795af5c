//! Runs a command of this machine with a deadline, its output in a log.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

/// Prints a line of progress.
pub fn say(line: impl std::fmt::Display) {
    eprintln!("testbed: {line}");
}

/// A command to run: what for, where its output goes, how long it may take.
#[derive(Debug)]
pub struct Step<'a> {
    /// What it does, for progress and errors.
    pub what: &'a str,
    /// Where its output goes.
    pub log: PathBuf,
    /// How long it may take.
    pub deadline: Duration,
}

impl Step<'_> {
    /// Runs the command in a process group of its own, and kills the group at the deadline.
    ///
    /// # Errors
    /// When it can't be started, fails or takes too long; the end of its output is part of the error.
    pub fn run(&self, command: &mut Command) -> Result<()> {
        let log = File::create(&self.log).with_context(|| format!("can't create {}", self.log.display()))?;
        let start = Instant::now();
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{}: can't run {program}", self.what))?;
        let mut told = start;
        loop {
            if let Some(status) = child.try_wait()? {
                if status.success() {
                    return Ok(());
                }
                bail!(
                    "{}: {program} failed ({status}); the end of {}:\n{}",
                    self.what,
                    self.log.display(),
                    tail(&self.log, 25)
                );
            }
            if start.elapsed() > self.deadline {
                if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
                    // It may have ended by itself just now.
                    let _ = kill_process_group(group, Signal::KILL);
                }
                child.wait()?;
                bail!(
                    "{}: {program} took longer than {} s; the end of {}:\n{}",
                    self.what,
                    self.deadline.as_secs(),
                    self.log.display(),
                    tail(&self.log, 25)
                );
            }
            if told.elapsed() > Duration::from_secs(60) {
                told = Instant::now();
                say(format_args!("{}: {} s", self.what, start.elapsed().as_secs()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The output of a short command, or nothing when it fails.
pub(super) fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last lines of a text file.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
