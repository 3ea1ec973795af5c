//! A program in a process group of its own, with limits, no descriptors but those it is given, and a deadline.
//!
//! Its files are memory: nothing is left on a disk, whatever happens.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::Limits;
use crate::spawn::{Child, Spawn, spawn};

/// A file in memory. It is gone with the last that has it open.
#[derive(Debug)]
pub struct Scratch(File);

impl Scratch {
    /// An empty one; `name` is seen in `/proc` alone.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn new(name: &str) -> io::Result<Self> {
        above_standard(memfd_create(name, MemfdFlags::CLOEXEC)?.into()).map(Self)
    }

    /// One that has these bytes.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn of(name: &str, bytes: &[u8]) -> io::Result<Self> {
        let file = Self::new(name)?;
        (&file.0).write_all(bytes)?;
        Ok(file)
    }

    /// Its path in a process that was given it.
    pub fn path(&self) -> OsString {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// The first `most` bytes.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn read(&self, most: u64) -> io::Result<Vec<u8>> {
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

/// The file by a descriptor that is none of the standard ones, which a program is given others in the place of: where this process was
/// started without them, a new file gets their numbers.
fn above_standard(file: File) -> io::Result<File> {
    const FIRST: i32 = 3;
    if file.as_raw_fd() >= FIRST {
        return Ok(file);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, FIRST)?.into())
}

/// What a limit on memory is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// All address space.
    Space,
    /// Data: for a program that reserves more address space than it uses.
    Data,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Program<'a> {
    /// The file, with its folder.
    pub path: &'a Path,
    /// What comes behind its name.
    pub arguments: Vec<OsString>,
    /// All that is in its environment.
    pub environment: Vec<(OsString, OsString)>,
    /// What the limit on memory is on.
    pub memory: Memory,
    /// Whether it prints its output; else what it prints are messages, and it opens its output by a path.
    pub prints: bool,
    /// What it may use.
    pub limits: Limits,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With exit status 0.
    Well,
    /// With another.
    Status(i32),
    /// By a signal that was not ours.
    Signal(i32),
    /// Killed after its time.
    Late,
}

/// A program that was started. Dropping it ends it, with what it started in its process group; so does the end of this process.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    /// Nobody writes to it: that this process has it open keeps the program alive.
    _life: OwnedFd,
}

/// Starts a program. `files` are open in it, and `messages` are its error output, and its output as well unless it prints
/// what it makes.
pub(crate) fn start(
    program: &Program<'_>,
    files: &[&Scratch],
    output: &Scratch,
    messages: &Scratch,
) -> io::Result<Running> {
    if !program.path.as_os_str().as_bytes().contains(&b'/') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is named without its folder"));
    }
    let nothing = above_standard(File::open("/dev/null")?)?;
    let path = c_string(program.path.as_os_str())?;
    let mut arguments = vec![path.clone()];
    for argument in &program.arguments {
        arguments.push(c_string(argument)?);
    }
    let (printed, opened) = if program.prints { (output, None) } else { (messages, Some(output)) };
    let mut environment = Vec::new();
    for (name, value) in &program.environment {
        let mut text = name.clone();
        text.push("=");
        text.push(value);
        environment.push(c_string(&text)?);
    }
    let resource = match program.memory {
        Memory::Space => libc::RLIMIT_AS,
        Memory::Data => libc::RLIMIT_DATA,
    };
    let (read, life) = pipe_with(PipeFlags::CLOEXEC)?;
    let read = above_standard(read.into())?;
    let Limits { time, memory, output } = program.limits;
    let child = spawn(&Spawn {
        program: path,
        arguments,
        environment,
        standard: [nothing.as_raw_fd(), printed.0.as_raw_fd(), messages.0.as_raw_fd()],
        given: files.iter().copied().chain(opened).map(|file| file.0.as_raw_fd()).collect(),
        life: read.as_raw_fd(),
        limits: vec![
            (resource, memory),
            (libc::RLIMIT_CPU, time.as_secs().saturating_add(1)),
            (libc::RLIMIT_FSIZE, output),
            (libc::RLIMIT_CORE, 0),
        ],
    })?;
    Ok(Running { child, _life: life })
}

impl Running {
    /// Whether it ended before `deadline`, without reaping it.
    pub(crate) fn ends_by(&self, deadline: Instant) -> io::Result<bool> {
        match self.child.pid() {
            Some(pid) => wait(pid, deadline),
            None => Ok(true),
        }
    }

    /// Waits for its end. When this returns, it and what it started in its process group have ended.
    pub(crate) fn end(mut self, deadline: Instant) -> io::Result<Ended> {
        let in_time = self.ends_by(deadline)?;
        let status = self.child.end()?;
        Ok(match (in_time, status.exit_status(), status.terminating_signal()) {
            (false, _, _) => Ended::Late,
            (true, Some(0), _) => Ended::Well,
            (true, Some(code), _) => Ended::Status(code),
            (true, None, signal) => Ended::Signal(signal.unwrap_or(0)),
        })
    }
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
