//! A program in a process group of its own, with limits, no descriptors but those it is given, and a deadline.
//!
//! Its files are memory: nothing is left on a disk, whatever happens.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Limits;
use super::spawn::{Child, Spawn, spawn};

/// A file in memory.
#[derive(Debug)]
pub(super) struct Scratch(File);

impl Scratch {
    pub(super) fn new(name: &str) -> io::Result<Self> {
        Ok(Self(File::from(memfd_create(name, MemfdFlags::CLOEXEC)?)))
    }

    pub(super) fn fill(&self, bytes: &[u8]) -> io::Result<()> {
        (&self.0).write_all(bytes)
    }

    /// Its path in a process that was given it.
    pub(super) fn path(&self) -> OsString {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// The first `most` bytes.
    pub(super) fn read(&self, most: u64) -> io::Result<Vec<u8>> {
        // Opened again, so that the place where the program stopped writing does not matter.
        let mut bytes = Vec::new();
        File::open(self.path())?.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

impl AsFd for Scratch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What to run.
pub(super) struct Program<'a> {
    pub(super) path: &'a Path,
    pub(super) arguments: Vec<OsString>,
    /// Whether it reserves more address space than it uses; then the limit is on its data.
    pub(super) reserves_memory: bool,
    pub(super) limits: Limits,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// With exit status 0.
    Well,
    /// With another.
    Status(i32),
    /// By a signal that was not ours.
    Signal(i32),
    /// Killed after its time.
    Late,
}

/// A program that was started. Dropping it ends it, with what it started in its process group.
#[derive(Debug)]
pub(super) struct Running(Child);

/// Starts a program. `files` are open in it, and `messages` are its output and its error output.
pub(super) fn start(program: &Program<'_>, files: &[&Scratch], messages: &Scratch) -> io::Result<Running> {
    if !program.path.as_os_str().as_bytes().contains(&b'/') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is named without its folder"));
    }
    let nothing = File::open("/dev/null")?;
    let path = c_string(program.path.as_os_str())?;
    let mut arguments = vec![path.clone()];
    for argument in &program.arguments {
        arguments.push(c_string(argument)?);
    }
    let Limits { time, memory, output } = program.limits;
    let child = spawn(&Spawn {
        program: path,
        arguments,
        environment: if program.reserves_memory { driver_environment() } else { Vec::new() },
        standard: [nothing.as_raw_fd(), messages.0.as_raw_fd(), messages.0.as_raw_fd()],
        given: files.iter().map(|file| file.0.as_raw_fd()).collect(),
        limits: vec![
            (if program.reserves_memory { libc::RLIMIT_DATA } else { libc::RLIMIT_AS }, memory),
            (libc::RLIMIT_CPU, time.as_secs().saturating_add(1)),
            (libc::RLIMIT_FSIZE, output),
            (libc::RLIMIT_CORE, 0),
        ],
    })?;
    Ok(Running(child))
}

impl Running {
    /// Whether it ended before `deadline`, without reaping it.
    pub(super) fn ends_by(&self, deadline: Instant) -> io::Result<bool> {
        match self.0.pid() {
            Some(pid) => wait(pid, deadline),
            None => Ok(true),
        }
    }

    /// Waits for its end. When this returns, it and what it started in its process group have ended.
    pub(super) fn end(mut self, deadline: Instant) -> io::Result<Ended> {
        let in_time = self.ends_by(deadline)?;
        let status = self.0.end()?;
        Ok(match (in_time, status.exit_status(), status.terminating_signal()) {
            (false, _, _) => Ended::Late,
            (true, Some(0), _) => Ended::Well,
            (true, Some(code), _) => Ended::Status(code),
            (true, None, signal) => Ended::Signal(signal.unwrap_or(0)),
        })
    }
}

/// What leads the driver's library to where this process found it, and to the same devices.
fn driver_environment() -> Vec<CString> {
    let kept =
        |name: &str| name == "LD_LIBRARY_PATH" || name.starts_with("CUDA_") || name.starts_with("NVIDIA_");
    std::env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(kept))
        .filter_map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            c_string(&name).ok()
        })
        .collect()
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.as_bytes())?)
}

/// Waits for the end of a child, without reaping it; false if it did not come in time.
fn wait(pid: Pid, deadline: Instant) -> io::Result<bool> {
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600));
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&left)) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
