//! The calls that Rust can't check.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Has what the command starts inherit the three standard descriptors alone, whatever else this process was given.
pub(crate) fn inherit_standard(command: &mut Command) {
    let close = || {
        // SAFETY: it takes numbers, and sets flags of descriptors of the child's own table.
        match unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(close) };
}

/// Has what the command starts join the cgroup whose `cgroup.procs` this is, before it runs. Where that fails it stays where this
/// process is.
pub(crate) fn join_cgroup(command: &mut Command, procs: File) {
    let join = move || {
        // It means the process that writes it.
        let _ = rustix::io::write(&procs, b"0");
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(join) };
}

/// Has the Linux kernel kill what the command starts when the thread that starts it ends, from its first instruction on until
/// it changes its user.
pub(crate) fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: it takes numbers, and is of the child alone.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // One that ended before has left it to another, and there is no signal then.
        match std::os::unix::process::parent_id() == parent {
            true => Ok(()),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    };
    // SAFETY: between fork and exec it makes two system calls, and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// From here on SIGTERM, SIGINT and SIGHUP do nothing.
pub(super) fn ignore_requests_to_end() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: no handler of this program is installed, and these signals can be ignored.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Becomes another user, on all threads and for ever: its group has the same number, and it is a member of `groups`.
///
/// # Errors
/// The Linux kernel's; the user is as it was then.
pub(super) fn set_user(user: u32, groups: &[u32]) -> io::Result<()> {
    let done = |answer: libc::c_int| if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the pointer is to as many groups, which are only read.
    done(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: it takes numbers.
    done(unsafe { libc::setresgid(user, user, user) })?;
    // SAFETY: as above.
    done(unsafe { libc::setresuid(user, user, user) })
}

/// Makes a system call.
///
/// # Safety
/// As the call says: pointers among the arguments are to memory that it may use as it does.
#[cfg(test)]
pub(super) unsafe fn call(number: libc::c_long, arguments: [u64; 6]) -> io::Result<u64> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    u64::try_from(answer).map_err(|_| io::Error::last_os_error())
}
