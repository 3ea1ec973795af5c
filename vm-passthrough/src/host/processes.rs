//! Ends processes of the host.

use std::fmt;
use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How a process is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// It is asked to end (SIGTERM).
    Asked,
    /// It is ended at once (SIGKILL).
    Killed,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "SIGTERM",
            Self::Killed => "SIGKILL",
        })
    }
}

/// Ends processes of a host, for [`Host::processes`](super::Host::processes).
pub trait ProcessControl: fmt::Debug + Send + Sync {
    /// Has a process end, and does not wait for that. `is_it` is asked once its number can't become another process's, and nothing
    /// is done unless it holds.
    ///
    /// # Errors
    /// What the Linux kernel answered, as for a process of another user. One that has ended is no error.
    fn end(&self, pid: u32, ending: Ending, is_it: &dyn Fn() -> bool) -> io::Result<()>;
}

/// The processes of the machine that this process runs on.
#[derive(Debug)]
pub(super) struct KernelProcesses;

impl ProcessControl for KernelProcesses {
    fn end(&self, pid: u32, ending: Ending, is_it: &dyn Fn() -> bool) -> io::Result<()> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let signal = match ending {
            Ending::Asked => Signal::TERM,
            Ending::Killed => Signal::KILL,
        };
        let ended = pidfd_open(pid, PidfdFlags::empty()).and_then(|process| match is_it() {
            true => pidfd_send_signal(process, signal),
            false => Ok(()),
        });
        match ended {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            ended => Ok(ended?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_the_process_that_is_meant_is_ended() {
        for (ending, signal) in [(Ending::Asked, libc::SIGTERM), (Ending::Killed, libc::SIGKILL)] {
            let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            KernelProcesses.end(child.id(), ending, &|| false).unwrap();
            assert_eq!(child.try_wait().unwrap(), None);
            KernelProcesses.end(child.id(), ending, &|| true).unwrap();
            assert_eq!(child.wait().unwrap().signal(), Some(signal));
            KernelProcesses.end(child.id(), ending, &|| true).unwrap();
        }
        assert!(KernelProcesses.end(0, Ending::Killed, &|| true).is_err());
        assert!(KernelProcesses.end(u32::MAX, Ending::Killed, &|| true).is_err());
    }
}
