//! A program in a process group of its own, with limits, no descriptors but those it is given, and a deadline.
//!
//! Its files are memory: nothing is left on a disk, whatever happens.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::Limits;

/// A file in memory.
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

/// Runs a program to its end. `files` are open in it, and `messages` are its output and its error output. When this
/// returns, the program and what it started in its process group have ended.
pub(super) fn run(program: &Program<'_>, files: &[&Scratch], messages: &Scratch) -> io::Result<Ended> {
    let deadline = Instant::now() + program.limits.time;
    let mut command = Command::new(program.path);
    command.args(&program.arguments).process_group(0).stdin(Stdio::null());
    command.stdout(messages.0.try_clone()?).stderr(messages.0.try_clone()?);
    command.env_clear();
    if program.reserves_memory {
        // The driver is where the embedder's own process found it, and sees the same devices.
        let kept = |name: &str| {
            name == "LD_LIBRARY_PATH" || name.starts_with("CUDA_") || name.starts_with("NVIDIA_")
        };
        command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept)));
    }
    let given: Vec<RawFd> = files.iter().map(|file| file.0.as_raw_fd()).collect();
    let Limits { time, memory, output } = program.limits;
    let limits = [
        (if program.reserves_memory { libc::RLIMIT_DATA } else { libc::RLIMIT_AS }, memory),
        (libc::RLIMIT_CPU, time.as_secs().saturating_add(1)),
        (libc::RLIMIT_FSIZE, output),
        (libc::RLIMIT_CORE, 0),
    ];
    // SAFETY: between fork and exec it makes system calls only, and touches no memory but its own copy of `given` and
    // `limits`.
    unsafe { command.pre_exec(move || confine(&given, &limits)) };
    let mut child = command.spawn()?;
    let ended = wait(&mut child, deadline);
    // What it left behind; the group is there as long as the child has not been waited for.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let status = child.wait()?;
    Ok(match (ended?, status.code(), status.signal()) {
        (false, _, _) => Ended::Late,
        (true, Some(0), _) => Ended::Well,
        (true, Some(code), _) => Ended::Status(code),
        (true, None, signal) => Ended::Signal(signal.unwrap_or(0)),
    })
}

/// Waits for the end of a child, without reaping it; false if it did not come in time.
fn wait(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left.min(Duration::from_secs(3600)))
            .map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&left)) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// What the child does to itself before it becomes the program. System calls only.
fn confine(given: &[RawFd], limits: &[(libc::__rlimit_resource_t, u64)]) -> io::Result<()> {
    let check = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: no pointers. It ends with the thread that waits for it.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }.into())?;
    // SAFETY: no pointers. Programs that it runs gain no rights.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // Closed when the program begins, and not now: the standard library still tells its parent of failures.
    // SAFETY: no pointers.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) })?;
    for &file in given {
        // SAFETY: no pointers.
        check(unsafe { libc::fcntl(file, libc::F_SETFD, 0) }.into())?;
    }
    for &(resource, most) in limits {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the pointer is to a local.
        check(unsafe { libc::getrlimit(resource, &raw mut limit) }.into())?;
        // Nobody but root may raise the upper one. That of processor time is a second later, and ends it with SIGKILL.
        limit.rlim_max = limit.rlim_max.min(most.saturating_add(u64::from(resource == libc::RLIMIT_CPU)));
        limit.rlim_cur = most.min(limit.rlim_max);
        // SAFETY: the pointer is to a local.
        check(unsafe { libc::setrlimit(resource, &raw const limit) }.into())?;
    }
    Ok(())
}
