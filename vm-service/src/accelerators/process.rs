//! The VMM's side of a worker: it starts the process, gives it what it needs, and ends it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use super::meter::{self, Meter};
use super::wire::{Open, Order, Report, Start};
use crate::deadlines::WORKER_OPEN;
use crate::os::process::{ChildProgram, Messages, Process, end_of, packets};
use crate::os::sandbox::{Confinement, Profile};
use crate::vmm::{Stop, sys};

/// Why a worker could not be had.
#[derive(Debug, Error)]
pub(crate) enum WorkerError {
    /// The process could not be started, or be given no orders.
    #[error(
        "the worker of the accelerator {device} can't be started: {source}; see `ulimit -n` and `ulimit -u`"
    )]
    Start {
        /// Which accelerator.
        device: String,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// It started and could not open the accelerator.
    #[error("the accelerator {device} can't be opened: {reason}")]
    Refused {
        /// Which accelerator.
        device: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// Nobody waits for it any more.
    #[error("opening the accelerator {device} was stopped")]
    Stopped {
        /// Which accelerator.
        device: String,
    },
    /// It did not get so far.
    #[error(
        "the worker of the accelerator {device} {what} before the accelerator was open; see its messages above"
    )]
    Gone {
        /// Which accelerator.
        device: String,
        /// How it ended.
        what: String,
    },
}

/// A worker that has opened its accelerator. Dropping it kills the process. It is never waited for when it is sent
/// something: one that does not listen gets no more than its socket holds.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    process: Process,
    socket: OwnedFd,
    meter: Meter,
    messages: Option<Messages>,
}

/// What a worker says of itself once its accelerator is open.
#[derive(Debug)]
pub(crate) struct Ready {
    /// The accelerator's name.
    pub(crate) name: String,
    /// How far the worker is confined.
    pub(crate) confinement: Confinement,
}

impl WorkerProcess {
    /// Starts a worker and waits until its accelerator is open. It inherits nothing but its end of a socket, and a pipe for
    /// its messages. `meter` keeps what it uses of the guest's time.
    ///
    /// # Errors
    /// When it can't be started, or the accelerator can't be opened; when `end` was requested before.
    pub(crate) fn spawn(
        program: &ChildProgram,
        open: &Open,
        ram: &[BorrowedFd<'_>],
        meter: &Meter,
        end: &Stop,
    ) -> Result<(Self, Ready), WorkerError> {
        let failed = |source| WorkerError::Start { device: open.device.clone(), source };
        let runs_models = Profile::of(&open.device) == Profile::Npu;
        let kept = meter.try_clone().map_err(failed)?;
        let (process, socket, messages) = Process::start_worker(program, runs_models).map_err(failed)?;
        let mut this = Self { process, socket, meter: kept, messages: None };
        let messages = Messages::start(Some(this.process.id()), std::fs::File::from(messages));
        this.messages = Some(messages.map_err(failed)?);
        let files: Vec<BorrowedFd<'_>> = ram.iter().copied().chain([meter.as_fd()]).collect();
        packets::offer(&this.socket, &Order::Open(open.clone()), &files).map_err(failed)?;
        let device = open.device.clone();
        match this.report_before(WORKER_OPEN, Some(end)) {
            Ok(Some(Report::Ready { name, confinement, .. })) => Ok((this, Ready { name, confinement })),
            Ok(Some(Report::Failed(reason))) => Err(WorkerError::Refused { device, reason }),
            Ok(Some(_)) => {
                Err(WorkerError::Gone { device, what: "made another report than it should".into() })
            }
            Ok(None) => {
                let what = this.kill().unwrap_or_else(|| "did not end".into());
                Err(WorkerError::Gone { device, what })
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(WorkerError::Stopped { device }),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let reason =
                    format!("it took longer than {} s; see whether its driver hangs", WORKER_OPEN.as_secs());
                Err(WorkerError::Refused { device, reason })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Tells the worker to serve a queue.
    ///
    /// # Errors
    /// When it has gone, or does not listen.
    pub(crate) fn start(
        &self,
        start: Start,
        doorbell: BorrowedFd<'_>,
        interrupt: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = std::iter::once(doorbell).chain(interrupt).collect();
        packets::offer(&self.socket, &Order::Start(start), &files)
    }

    /// Hands a program's socket to the worker.
    ///
    /// # Errors
    /// When it has gone, or does not listen.
    pub(crate) fn connect(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        packets::offer(&self.socket, &Order::Connect, &[socket])
    }

    /// Asks the worker whether it is there.
    ///
    /// # Errors
    /// When it has gone, or does not listen.
    pub(crate) fn ping(&self) -> io::Result<()> {
        packets::offer(&self.socket, &Order::Ping, &[])
    }

    /// Readable when there is a report, or the worker has gone.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next report; `None` when the worker has gone.
    ///
    /// # Errors
    /// When none comes within `timeout` (`TimedOut`), or what comes is none.
    pub(crate) fn report(&self, timeout: Duration) -> io::Result<Option<Report>> {
        self.report_before(timeout, None)
    }

    /// As [`report`](Self::report), but no longer than until `end` is requested (`Interrupted`).
    fn report_before(&self, timeout: Duration, end: Option<&Stop>) -> io::Result<Option<Report>> {
        let end = end.map(|end| sys::borrow(end.event()));
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN)];
            fds.extend(end.iter().map(|end| PollFd::new(end, PollFlags::IN)));
            match poll(&mut fds, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if fds.get(1).is_some_and(|end| !end.revents().is_empty()) => {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) => {}
                Ok(_) => return Ok(packets::receive(&self.socket)?.map(|(report, _)| report)),
            }
        }
    }

    /// Kills the worker and says how it ended; `None` when it is not gone within the deadline.
    pub(crate) fn kill(&mut self) -> Option<String> {
        // It fails on a process that has ended.
        let _ = self.process.kill();
        let ended = end_of(&self.process)?;
        self.messages.iter().for_each(Messages::wait);
        Some(ended)
    }
}

#[cfg(test)]
impl WorkerProcess {
    /// The process's number.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// A process that reads nothing, with the other end of its socket.
    pub(crate) fn deaf() -> (Self, OwnedFd) {
        let (socket, theirs) = crate::os::process::socketpair().unwrap();
        let mut command = std::process::Command::new("sleep");
        command.arg("1000");
        let (process, ..) = Process::start(command).unwrap();
        (Self { process, socket, meter: Meter::new().unwrap(), messages: None }, theirs)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if self.kill().is_none() {
            tracing::error!(pid = self.process.id(), "an accelerator's worker was killed and is not gone");
        }
        if let Err(error) = self.meter.settle(meter::now()) {
            tracing::error!(%error, "what the worker used of the guest's time is not known");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerators::meter::Reading;

    #[test]
    fn the_end_of_a_worker_settles_what_it_used() {
        let (worker, _theirs) = WorkerProcess::deaf();
        let meter = worker.meter.try_clone().unwrap();
        let now = meter::now();
        meter.write(&Reading { balance: 5, at: now, since: Some(now) }).unwrap();
        drop(worker);
        let left = meter.read().unwrap().unwrap();
        assert!(left.since.is_none() && left.balance < 5, "{left:?}");
    }
}
