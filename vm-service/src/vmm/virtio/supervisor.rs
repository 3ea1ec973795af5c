//! Starts the workers of an accelerator that the guest shares, and watches over them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::programs::Programs;
use crate::accelerators::{Meter, Open, Ready, Report, WorkerError, WorkerProcess};
use crate::config::Trust;
use crate::deadlines::{PING, PING_PERIOD, WORKER_INTERVAL};
use crate::os::process::{ChildProgram, printable};
use crate::os::sandbox::{Measure, Profile, further_waivers};
use crate::vmm::{Stop, sys};

/// How soon an accelerator must be refused for a look whether a waiver helps.
const RETRY: Duration = Duration::from_secs(20);

/// What it takes to make a worker.
pub(super) struct Maker {
    program: ChildProgram,
    open: Open,
    memory: Vec<File>,
    /// What they have used of the guest's time, all of them.
    meter: Meter,
    /// When the last one was started.
    last: Mutex<Option<Instant>>,
    /// Whether the accelerator opened once.
    opened: OnceLock<()>,
}

impl Maker {
    /// Workers of this program, each with these orders and files.
    ///
    /// # Errors
    /// When there are no files left.
    pub(super) fn new(program: ChildProgram, open: Open, memory: Vec<File>) -> io::Result<Self> {
        let (meter, last, opened) = (Meter::new()?, Mutex::new(None), OnceLock::new());
        Ok(Self { program, open, memory, meter, last, opened })
    }

    /// What a worker is sent first.
    pub(super) fn open(&self) -> &Open {
        &self.open
    }

    /// Tells the operator that a worker was ended.
    pub(super) fn tell_end(&self, reason: &str) {
        let Open { guest, device, .. } = &self.open;
        // A worker's own words may be in it.
        tracing::warn!(%guest, accelerator = %device, "the worker was ended: {}", printable(reason));
    }

    /// Workers of this program, for a guest that has nothing.
    #[cfg(test)]
    pub(super) fn for_test(program: ChildProgram) -> Self {
        let open = Open {
            guest: "test".into(),
            device: "cpu".into(),
            memory: 0,
            deadline_us: 0,
            time_slice_us: 0,
            poll_us: 0,
            ram: Vec::new(),
            port: None,
            unconfined: Measure::ALL.to_vec(),
            trust: Trust::Kernels,
        };
        Self::new(program, open, Vec::new()).unwrap()
    }

    /// Starts a worker, unless `end` is requested before its accelerator is open. When the accelerator does not open before the
    /// guest ran, the error names what the operator could waive so that it does.
    ///
    /// # Errors
    /// When it can't be started, the accelerator can't be opened, or it is to end.
    pub(super) fn make(&self, end: &Stop) -> Result<(WorkerProcess, Ready), WorkerError> {
        let begin = Instant::now();
        match self.make_with(&self.open.unconfined, end) {
            Err(WorkerError::Refused { device, reason })
                if self.opened.get().is_none() && begin.elapsed() < RETRY =>
            {
                let helps = self.waiver_that_helps(end).map(|waived| {
                    format!("; it opens with `unconfined = {waived:?}` in its section of the guest's file")
                });
                Err(WorkerError::Refused { device, reason: reason + &helps.unwrap_or_default() })
            }
            made => made.inspect(|_| self.opened.set(()).unwrap_or_default()),
        }
    }

    /// The names of the measures without which the accelerator opens. A driver's library may lie where only root reads it; the
    /// CPU opens with all of them.
    fn waiver_that_helps(&self, end: &Stop) -> Option<Vec<&'static str>> {
        const MAY: [Measure; 2] = [Measure::Files, Measure::User];
        // Workers that serve CUDA programs find that out themselves.
        let is_probed = matches!(Profile::of(&self.open.device), Profile::Driver | Profile::Npu)
            && self.open.trust == Trust::Kernels;
        let mut waivers = further_waivers(&MAY, &self.open.unconfined).take_while(|_| is_probed);
        let opens = |waived: &Vec<Measure>| self.make_with(waived, end).is_ok();
        Some(waivers.find(opens)?.into_iter().map(Measure::name).collect())
    }

    fn make_with(&self, unconfined: &[Measure], end: &Stop) -> Result<(WorkerProcess, Ready), WorkerError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = *last {
            std::thread::sleep(WORKER_INTERVAL.saturating_sub(last.elapsed()));
        }
        *last = Some(Instant::now());
        drop(last);
        let memory: Vec<BorrowedFd<'_>> = self.memory.iter().map(File::as_fd).collect();
        let open = Open { unconfined: unconfined.to_vec(), ..self.open.clone() };
        WorkerProcess::spawn(&self.program, &open, &memory, &self.meter, end)
    }
}

/// Watches over a worker until it is asked to end, and hands it the programs that connect meanwhile, until the guest's vsock
/// device is reset, which ends them. The worker is gone
/// when this returns, however long that takes: who waits for it has a deadline.
///
/// # Errors
/// Why it was ended before.
pub(super) fn supervise(
    mut worker: WorkerProcess,
    end: &Stop,
    programs: Option<&Programs>,
) -> Result<(), String> {
    let ended = supervise_within(&mut worker, end, programs, PING_PERIOD, PING);
    while worker.kill().is_none() {
        std::thread::sleep(PING_PERIOD);
        tracing::error!(
            "a worker of an accelerator was killed and is not gone: it may still use the guest's memory"
        );
    }
    ended
}

fn supervise_within(
    worker: &mut WorkerProcess,
    end: &Stop,
    programs: Option<&Programs>,
    period: Duration,
    timeout: Duration,
) -> Result<(), String> {
    let period = Timespec::try_from(period).map_err(|error| error.to_string())?;
    // Since when it owes an answer, and whether it was asked: its socket may have been full.
    let (mut since, mut asked): (Option<Instant>, bool) = (None, false);
    loop {
        let (end, socket) = (sys::borrow(end.event()), worker.socket());
        let events = programs.map(|programs| [programs.resets(), programs.arrived()].map(sys::borrow));
        let mut fds = vec![PollFd::new(&end, PollFlags::IN), PollFd::new(&socket, PollFlags::IN)];
        fds.extend(events.iter().flatten().map(|event| PollFd::new(event, PollFlags::IN)));
        match poll(&mut fds, Some(&period)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.to_string()),
            Ok(_) => {}
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] || ready.get(2) == Some(&true) {
            return Ok(());
        }
        if let (Some(programs), Some(true)) = (programs, ready.get(3)) {
            programs.hand_over(|socket| worker.connect(socket));
        }
        if ready[1] {
            match worker.report(Duration::ZERO) {
                Ok(Some(Report::Here)) => (since, asked) = (None, false),
                Ok(Some(Report::Broken(reason) | Report::Overdue(reason) | Report::Failed(reason))) => {
                    return Err(reason);
                }
                Ok(Some(Report::Ready { .. })) => return Err("it reported out of order".into()),
                Ok(None) => {
                    return Err(worker.kill().unwrap_or_else(|| "it is stuck in the Linux kernel".into()));
                }
                Err(error) => return Err(format!("it can't be heard: {error}")),
            }
        } else {
            if since.get_or_insert_with(Instant::now).elapsed() > timeout {
                return Err(format!("it did not answer within {} s", timeout.as_secs()));
            }
            asked = asked || worker.ping().is_ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn nobody_who_is_to_end_waits_for_a_worker_that_never_opens() {
        let program = ChildProgram { path: "/bin/sleep".into(), arguments: vec!["1000".into()] };
        let maker = Maker::for_test(program);
        let (end, begin) = (Stop::new().unwrap(), Instant::now());
        let asked = end.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            asked.request();
        });
        let made = maker.make(&end);
        assert!(matches!(made, Err(WorkerError::Stopped { .. })), "{made:?}");
        assert!(begin.elapsed() < crate::deadlines::ACCELERATOR_STOP, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_worker_that_hears_nothing_is_ended_whatever_waits_for_it() {
        for connections in [0, 1, 20_000] {
            let (mut worker, deaf) = WorkerProcess::deaf();
            let end = Stop::new().unwrap();
            let socket = std::io::pipe().unwrap().0;
            let refused = (0..connections).filter(|_| worker.connect(socket.as_fd()).is_err()).count();
            assert_eq!(refused > 0, connections > 1);
            let (period, timeout) = (Duration::from_millis(10), Duration::from_millis(200));
            let begin = Instant::now();
            let reason = supervise_within(&mut worker, &end, None, period, timeout).unwrap_err();
            assert!(reason.contains("did not answer"), "{reason}");
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            drop(deaf);
        }
    }
}
