//! Kills a process at one of its system calls, as `kill -9` or the OOM killer might: runs it under ptrace, counts the
//! calls that change something, and ends it right before a chosen one takes effect; or asks it to end there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;

use super::guest::role_of;
use super::sys::{self, Stop};
use super::wait_until;

/// How long a killed process may take to end.
const END: Duration = Duration::from_secs(60);

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The command's process; the helpers that it started go on.
    Process,
    /// It and all that it started.
    All,
    /// The command's process. A helper whose call it is does not go on before the [`Meanwhile`] has ended.
    ProcessFirst,
    /// Nobody: the command's process is sent SIGTERM.
    Asked,
    /// Nobody: all go on once the [`Meanwhile`] has ended.
    Nobody,
}

/// Before which of its calls that change something.
#[derive(Clone, Copy, Debug)]
pub enum At<'a> {
    /// This one, counted from 1 over all of its processes and threads.
    Number(usize),
    /// The first of a helper that ends so as it is shown, as in `/unbind)`.
    Helper(&'a str),
}

impl From<usize> for At<'_> {
    fn from(number: usize) -> Self {
        Self::Number(number)
    }
}

/// What is done between the end of a process and its helper's call ([`Victim::ProcessFirst`]), or right before the call
/// ([`Victim::Nobody`]).
pub type Meanwhile<'a> = &'a mut dyn FnMut() -> Result<()>;

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was killed before this call, or what the [`Victim`] says instead was done.
    Killed {
        /// The system call, as in `write(/sys/bus/pci/drivers/nvme/unbind)`.
        before: String,
        /// Whether it was a helper's call, and not one of the command's process.
        by_helper: bool,
        /// The exit status of the command's process; `None` when a signal ended it.
        code: Option<i32>,
    },
    /// It made fewer calls that change something, and ended by itself.
    Completed {
        /// Those that it made, as in [`Killed::before`](Self::Killed::before).
        calls: Vec<String>,
    },
}

/// Where the standard error of the last command is.
pub const SAID: &str = "/tmp/killed.stderr";

/// Runs `command` and kills it before the call that `at` says. To kill it, a call before which nothing has changed since the last that counted does not count,
/// unless a helper makes it: what is left there was left before.
///
/// # Errors
/// When it can't be traced, or does not end within `timeout`; and what `meanwhile` fails with.
pub fn kill_at<'a>(
    command: &mut Command,
    at: impl Into<At<'a>>,
    victim: Victim,
    timeout: Duration,
    meanwhile: Meanwhile<'_>,
) -> Result<Fate> {
    sys::trace_me(command);
    let said = File::create(SAID).with_context(|| format!("can't create {SAID}"))?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).spawn()?;
    let first = Pid::from_child(&child);
    let alive = Arc::new(Mutex::new(BTreeSet::from([first.as_raw_nonzero().get()])));
    let (done, watched) = channel::<()>();
    let watchdog = {
        let alive = Arc::clone(&alive);
        std::thread::spawn(move || {
            let late = watched.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout);
            if late {
                kill_all(&alive);
            }
            late
        })
    };
    let fate = follow(first, at.into(), victim, &alive, meanwhile);
    drop(done);
    if watchdog.join().unwrap_or(true) {
        bail!("it did not end within {} s", timeout.as_secs());
    }
    fate
}

type Alive = Mutex<BTreeSet<i32>>;

fn locked(alive: &Alive) -> MutexGuard<'_, BTreeSet<i32>> {
    alive.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill_all(alive: &Alive) {
    locked(alive).iter().copied().filter_map(Pid::from_raw).for_each(sys::kill);
}

/// Follows the process and all that it starts until none is left.
fn follow(first: Pid, at: At<'_>, victim: Victim, alive: &Alive, meanwhile: Meanwhile<'_>) -> Result<Fate> {
    let mut known = BTreeSet::new();
    let (mut calls, mut killed, mut between, mut ended) = (Vec::new(), None, Ok(()), None);
    // Since the last call that counted.
    let mut changed = true;
    while !locked(alive).is_empty() {
        let Some((pid, stop)) = sys::wait_for_stop().context("can't wait for it")? else { break };
        let raw = pid.as_raw_nonzero().get();
        if let Stop::Ended(code) = stop {
            locked(alive).remove(&raw);
            if pid == first {
                ended = code;
            }
            continue;
        }
        // As the init process we also wait for orphans of others, but only tracees stop.
        locked(alive).insert(raw);
        if known.insert(raw) && pid == first {
            // The stop right after exec. Children inherit the options.
            sys::follow(pid).context("can't follow it")?;
        }
        let mut signal = 0;
        match stop {
            Stop::Signal(number) => signal = number,
            Stop::Call if killed.is_none() => {
                if let Some(call) = changing_call(pid) {
                    let by_helper =
                        group_of(pid).is_some_and(|group| group != raw_of(first) && !is_vmm(group));
                    let counts = changed || by_helper || victim == Victim::Asked;
                    changed = call.lasts || changed && !counts;
                    if counts {
                        calls.push(call.shown.clone());
                    }
                    let is_meant = match at {
                        At::Number(number) => calls.len() == number,
                        At::Helper(end) => by_helper && call.shown.ends_with(end),
                    };
                    if counts && is_meant {
                        killed = Some((call.shown, by_helper));
                        match victim {
                            Victim::Asked => sys::ask(first),
                            Victim::Process => sys::kill(first),
                            Victim::All => kill_all(alive),
                            Victim::Nobody => between = meanwhile(),
                            Victim::ProcessFirst => {
                                sys::kill(first);
                                // The helper goes on, and ends, whatever comes of this.
                                between = wait_until("its end", END, || has_ended(first).then_some(()))
                                    .and_then(|()| meanwhile());
                            }
                        }
                    }
                }
            }
            _ => {}
        }
        // It may have been killed in the meantime, which its end will tell.
        let _ = sys::go_on(pid, signal);
    }
    between.map(|()| match killed {
        Some((before, by_helper)) => Fate::Killed { before, by_helper, code: ended },
        None => Fate::Completed { calls },
    })
}

/// Whether it holds nothing any more: it has gone, or is only not yet waited for.
fn has_ended(process: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", raw_of(process))).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("State:")).is_none_or(|state| state.contains('Z'))
}

fn raw_of(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

/// The process that a thread belongs to.
fn group_of(thread: Pid) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{}/status", raw_of(thread))).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Whether a process is a guest's VMM, which ends with its keeper.
fn is_vmm(process: i32) -> bool {
    role_of(process.cast_unsigned()).as_deref() == Some("guest-vmm")
}

/// A system call that changes something outside of the process.
struct Call {
    /// As in `write(/sys/bus/pci/drivers/nvme/unbind)`.
    shown: String,
    /// Whether what it does outlives the process: not so what only orders writes, or holds a lock, or makes what is there.
    lasts: bool,
}

/// VFIO's and iommufd's ioctls that only ask: the API's version, extensions, a group's status, a device's, regions', interrupts'
/// and IOMMU's data, usable addresses (include/uapi/linux/vfio.h and iommufd.h).
const VFIO_QUERIES: [u64; 8] = [0x64, 0x65, 0x67, 0x6b, 0x6c, 0x6d, 0x70, 0x84];

/// The system call that it is about to make, if that changes something outside of the process. What goes through a pipe,
/// an eventfd, to /dev/null or to [`SAID`] does not.
fn changing_call(pid: Pid) -> Option<Call> {
    // These fail only when the process was killed meanwhile.
    let (call, arguments) = sys::system_call(pid).ok()??;
    let file = || file_of(pid, arguments[0]);
    let written = || file().filter(|path| path.starts_with('/') && path != "/dev/null" && path != SAID);
    let text = |at: usize| Some(text_at(pid, arguments[at]).unwrap_or_default());
    let creates = arguments[2] & (libc::O_CREAT | libc::O_TRUNC) as u64;
    let (name, what) = match i64::try_from(call).ok()? {
        libc::SYS_write => ("write", written()),
        libc::SYS_writev => ("writev", written()),
        libc::SYS_pwrite64 => ("pwrite64", written()),
        libc::SYS_openat if creates != 0 => ("openat", text(1)),
        libc::SYS_rename => ("rename", text(0)),
        libc::SYS_renameat | libc::SYS_renameat2 => ("rename", text(1)),
        libc::SYS_unlink => ("unlink", text(0)),
        libc::SYS_unlinkat => ("unlink", text(1)),
        libc::SYS_mkdir => ("mkdir", text(0)),
        libc::SYS_mkdirat => ("mkdir", text(1)),
        libc::SYS_rmdir => ("rmdir", text(0)),
        libc::SYS_link | libc::SYS_symlink => ("link", text(1)),
        libc::SYS_linkat => ("link", text(3)),
        libc::SYS_symlinkat => ("link", text(2)),
        libc::SYS_ftruncate => ("ftruncate", file()),
        libc::SYS_fsync | libc::SYS_fdatasync => ("fsync", file()),
        libc::SYS_flock => ("flock", file()),
        // KVM's ioctls (type 0xae) change only the guest, which ends with the process.
        libc::SYS_ioctl
            if arguments[1] >> 8 & 0xff == 0x3b && !VFIO_QUERIES.contains(&(arguments[1] & 0xff)) =>
        {
            ("VFIO ioctl", Some(format!("{:#x}", arguments[1])))
        }
        _ => return None,
    };
    let what = what?;
    let lasts = match name {
        "fsync" | "flock" => false,
        "mkdir" => !Path::new(&what).is_dir(),
        "openat" if creates & libc::O_TRUNC as u64 == 0 => !Path::new(&what).is_file(),
        _ => true,
    };
    Some(Call { shown: format!("{name}({what})"), lasts })
}

/// What a descriptor of a process is, as in `/sys/…/unbind` or `pipe:[7]`.
fn file_of(pid: Pid, descriptor: u64) -> Option<String> {
    let link = fs::read_link(format!("/proc/{}/fd/{descriptor}", raw_of(pid))).ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// A path in a process's memory.
fn text_at(pid: Pid, address: u64) -> Option<String> {
    let mut bytes = [0; 256];
    let memory = File::open(format!("/proc/{}/mem", raw_of(pid))).ok()?;
    let count = memory.read_at(&mut bytes, address).ok()?;
    let text = bytes[..count].split(|&byte| byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}
