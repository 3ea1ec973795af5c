//! Kills a process at one of its system calls, as `kill -9` or the OOM killer might: runs it under ptrace, counts the
//! calls that change something, and ends it right before a chosen one takes effect.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;

use super::sys::{self, Stop};

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The command's process; the helpers that it started go on.
    Process,
    /// It and all that it started.
    All,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was killed before this call.
    Killed {
        /// The system call, as in `write(5)`.
        before: String,
    },
    /// It made fewer calls that change something, and ended by itself.
    Completed {
        /// How many it made.
        calls: usize,
    },
}

/// Runs `command` and kills it before its `number`th call that changes something, counted from 1 over all of its
/// processes and threads.
///
/// # Errors
/// When it can't be traced, or does not end within `patience`.
pub fn kill_at(command: &mut Command, number: usize, victim: Victim, patience: Duration) -> Result<Fate> {
    sys::trace_me(command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let first = Pid::from_child(&child);
    let alive = Arc::new(Mutex::new(BTreeSet::from([first.as_raw_nonzero().get()])));
    let (done, watched) = channel::<()>();
    let watchdog = {
        let alive = Arc::clone(&alive);
        std::thread::spawn(move || {
            let late = watched.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
            if late {
                kill_all(&alive);
            }
            late
        })
    };
    let fate = follow(first, number, victim, &alive);
    drop(done);
    if watchdog.join().unwrap_or(true) {
        bail!("it did not end within {} s", patience.as_secs());
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
fn follow(first: Pid, number: usize, victim: Victim, alive: &Alive) -> Result<Fate> {
    let mut known = BTreeSet::new();
    let (mut calls, mut killed_before) = (0, None);
    while !locked(alive).is_empty() {
        let Some((pid, stop)) = sys::wait_for_stop().context("can't wait for it")? else { break };
        let raw = pid.as_raw_nonzero().get();
        if stop == Stop::Ended {
            locked(alive).remove(&raw);
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
            Stop::Call if killed_before.is_none() => {
                if let Some(call) = changing_call(pid) {
                    calls += 1;
                    if calls == number {
                        killed_before = Some(call);
                        match victim {
                            Victim::Process => sys::kill(first),
                            Victim::All => kill_all(alive),
                        }
                    }
                }
            }
            _ => {}
        }
        // It may have been killed in the meantime, which its end will tell.
        let _ = sys::go_on(pid, signal);
    }
    Ok(match killed_before {
        Some(before) => Fate::Killed { before },
        None => Fate::Completed { calls },
    })
}

/// The system call that it is about to make, if that changes something outside of the process.
fn changing_call(pid: Pid) -> Option<String> {
    // It fails only when the process was killed meanwhile.
    let (call, arguments) = sys::system_call(pid).ok()??;
    let name = match i64::try_from(call).ok()? {
        libc::SYS_write | libc::SYS_writev if arguments[0] <= 2 => return None,
        libc::SYS_write => "write",
        libc::SYS_writev => "writev",
        libc::SYS_pwrite64 => "pwrite64",
        libc::SYS_openat if arguments[2] & (libc::O_CREAT | libc::O_TRUNC) as u64 != 0 => "openat",
        libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => "rename",
        libc::SYS_unlink | libc::SYS_unlinkat => "unlink",
        libc::SYS_mkdir | libc::SYS_mkdirat => "mkdir",
        libc::SYS_rmdir => "rmdir",
        libc::SYS_link | libc::SYS_linkat => "link",
        libc::SYS_symlink | libc::SYS_symlinkat => "symlink",
        libc::SYS_ftruncate => "ftruncate",
        libc::SYS_fsync | libc::SYS_fdatasync => "fsync",
        libc::SYS_flock => "flock",
        // KVM's ioctls (type 0xae) change only the guest, which ends with the process.
        libc::SYS_ioctl if arguments[1] >> 8 & 0xff == 0x3b => {
            return Some(format!("VFIO ioctl({:#x})", arguments[1]));
        }
        _ => return None,
    };
    Some(format!("{name}({})", arguments[0].cast_signed() as i32))
}
