//! The keeper's side of a VMM: it starts the process, gives it orders, hears of the guest, and ends it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, PipeReader, Read as _, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::fcntl_setpipe_size;
use thiserror::Error;
use tracing::level_filters::LevelFilter;
use vm_passthrough::PciAddress;
use vm_passthrough::guest::PeerReport;

use super::handle::Message;
use super::state::Event;
use super::watch;
use super::wire::{Done, Failed, Make, Order, Report};
use crate::deadlines::{
    CONSOLE_END, VMM_ATTACH, VMM_END, VMM_GIVES_UP, VMM_MADE, VMM_ORDER, VMM_PING, VMM_STOP, WORKER_OPEN,
};
use crate::os::output::write;
use crate::os::process::{ChildProgram, Messages, Process, end_of, packets, printable, socketpair, starter};
use crate::os::sandbox::Confinement;
use crate::vmm::{Console, GuestAnswer, MachineOptions, PowerButton, Stop, sys};

/// Bytes of the pipe for the console's output.
const PIPE: usize = 4096;
/// How often it is seen whether the guest is to end while an order is carried out.
const STOP_STEP: Duration = Duration::from_millis(250);
/// How long after a report that the guest has restarted the next is heard: so that they do not pile up while a device is attached.
const RESTART: Duration = Duration::from_millis(100);
/// Where more is said of a process that does not end.
const DMESG: &str = "the Linux kernel's log (dmesg)";
/// How long after a VMM's channel has closed its process may last.
const CLOSED: Duration = Duration::from_secs(1);

/// Why a guest's VMM could not be had.
#[derive(Debug, Error)]
pub(crate) enum VmmError {
    /// What the guest is to boot can't be booted.
    #[error("{0}")]
    Boot(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// How a guest's VMM is run.
#[derive(Clone, Debug)]
pub(crate) struct VmmOptions {
    /// What it is.
    pub(crate) program: ChildProgram,
    /// How long it may take to make the machine, and beside that as long as its accelerators' workers.
    pub(crate) made: Duration,
    /// How long it may take to carry out another order, but to attach a device, and to reset the guest.
    pub(crate) order: Duration,
    /// How long it may take to end the guest.
    pub(crate) stop: Duration,
    /// How often it is asked whether it is there, and how long it may take to answer.
    pub(crate) ping: Duration,
}

impl Default for VmmOptions {
    fn default() -> Self {
        let program = ChildProgram::vmm("/proc/self/exe");
        Self { program, made: VMM_MADE, order: VMM_ORDER, stop: VMM_STOP, ping: VMM_PING }
    }
}

/// A guest's VMM. Dropping it kills the process.
pub(super) struct Vmm {
    socket: Arc<OwnedFd>,
    /// Held from an order until it is done.
    done: Mutex<Receiver<Result<Done, Failed>>>,
    options: VmmOptions,
    life: Arc<Life>,
    stop: Stop,
    /// How far the process is confined.
    confinement: Confinement,
    /// What hears the process, until that has gone.
    hears: JoinHandle<()>,
}

/// The process, and what is known of it.
#[derive(Debug)]
struct Life {
    process: Process,
    /// Whether an order was given that is not done.
    asked: AtomicBool,
    /// Whether the guest was to run and has not ended.
    runs: AtomicBool,
    /// How often the guest was asked for each slot, and has not answered.
    slots: Mutex<BTreeMap<PciAddress, u32>>,
    /// Why the process was killed, if it did what it should not.
    fault: OnceLock<String>,
    /// How the process ended.
    end: OnceLock<String>,
}

impl Life {
    fn new(process: Process) -> Self {
        let (asked, runs) = (AtomicBool::new(false), AtomicBool::new(false));
        let (slots, fault, end) = (Mutex::default(), OnceLock::new(), OnceLock::new());
        Self { process, asked, runs, slots, fault, end }
    }

    /// How it ended, and where more of that is said.
    fn end(&self) -> String {
        let (how, more) = match (self.fault.get(), self.end.get()) {
            (Some(fault), Some(_)) => (format!("was killed, as it {fault}"), "its messages in the log"),
            (Some(fault), None) => (format!("was killed, as it {fault}, and is not gone"), DMESG),
            (None, Some(end)) => (end.clone(), "its messages in the log, and the Linux kernel's log (dmesg)"),
            (None, None) => ("was killed and is not gone".to_owned(), DMESG),
        };
        format!("the guest's VMM {how}; see {more}")
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<PciAddress, u32>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills the process for what it does.
    fn kill_for(&self, fault: String) {
        // The first fault is the one that counts.
        let _ = self.fault.set(fault);
        self.kill();
    }

    fn kill(&self) {
        // It fails on a process that has ended.
        let _ = self.process.kill();
    }

    /// Its channel has closed: by its end, that is, which takes a moment.
    ///
    /// # Errors
    /// When it lives on.
    fn closed(&self) -> Result<(), String> {
        let until = Instant::now() + CLOSED;
        while let Ok(None) = self.process.try_wait() {
            if Instant::now() >= until {
                return Err("closed its channel".into());
            }
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Vmm {
    /// Starts a guest's VMM, and waits until its machine is made and it has given up its rights. What the guest does is sent to
    /// `messages`.
    ///
    /// # Errors
    /// When it can't be started, or the machine can't be made.
    pub(super) fn start(
        options: VmmOptions,
        make: Make,
        machine: MachineOptions,
        stop: &Stop,
        reset: BorrowedFd<'_>,
        messages: Sender<Message>,
    ) -> Result<Self, VmmError> {
        let failed = |error: io::Error| {
            VmmError::Failed(format!(
                "the guest's VMM can't be started: {error}; see `ulimit -n` and `ulimit -u`"
            ))
        };
        let MachineOptions { console: Console { output, input }, worker, power_button, .. } = machine;
        let button = power_button.map_or_else(PowerButton::new, Ok).map_err(failed)?;
        let mut command = Command::new(&options.program.path);
        command.args(&options.program.arguments).env_clear();
        let level = || LevelFilter::current().to_string().into();
        command.env("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(level));
        // The VMM has an event of its own: what it does with that keeps nobody else from hearing.
        let told = watch::event().map_err(failed)?;
        let (tells, wakes) = (told.try_clone().map_err(failed)?, messages.clone());
        let tell = move |_: &Stop| {
            // One that does not end the guest says nothing, either. It fails only when nobody is left to do something about it.
            drop(wakes.send(Event::Stop.into()));
            watch::wake(&tells);
        };
        stop.hear(tell).map_err(failed)?;
        let (process, socket, said) = Process::start(command).map_err(failed)?;
        let socket = Arc::new(socket);
        let said = Messages::start(None, std::fs::File::from(said)).map_err(failed)?;
        let (starts, asks) = socketpair().map_err(failed)?;
        let life = Arc::new(Life::new(process));
        let serves = life.clone();
        let serve = move || starter::serve(&starts, &worker, |fault| serves.kill_for(fault));
        Builder::new().name("workers".into()).spawn(serve).map_err(failed)?;
        let (screen, writes) = io::pipe().map_err(failed)?;
        // What waits for its reader waits in the VMM.
        fcntl_setpipe_size(&writes, PIPE).map_err(|error| failed(error.into()))?;
        let screen = Screen::start(screen, output).map_err(failed)?;
        let (tell, done) = channel();
        let (period, tell) = (options.ping, Some(tell));
        let heard =
            Heard { socket: socket.clone(), life: life.clone(), period, messages, said, screen, tell };
        let hears = Builder::new().name("vmm".into()).spawn(move || heard.hear()).map_err(failed)?;
        let (done, confinement) = (Mutex::new(done), Confinement::default());
        let mut this = Self { socket, done, options, life, stop: stop.clone(), confinement, hears };
        let button = sys::borrow(button.event());
        let mut files = vec![told.as_fd(), reset, button, asks.as_fd(), writes.as_fd()];
        files.extend(input.as_ref().map(OwnedFd::as_fd));
        let workers = WORKER_OPEN.saturating_mul(make.config.accelerators.len() as u32);
        let limits = (this.options.made + workers, VMM_GIVES_UP);
        match this.order_within(&Order::Make(Box::new(make)), &files, limits) {
            Ok(Done::Made(confinement)) => {
                tracing::info!("the guest's VMM is confined: {confinement}");
                this.confinement = confinement;
                Ok(this)
            }
            Ok(_) => Err(VmmError::Failed(this.misunderstood())),
            Err(Failed { reason, is_boot: true }) => Err(VmmError::Boot(reason)),
            Err(Failed { reason, .. }) => Err(VmmError::Failed(reason)),
        }
    }

    /// How far the process is confined.
    pub(super) fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    /// Gives an order, and answers what came of it. A VMM that does not carry it out in time is killed.
    ///
    /// # Errors
    /// Why it was not carried out.
    pub(super) fn order(&self, order: &Order, files: &[BorrowedFd<'_>]) -> Result<Done, String> {
        let deadline = if matches!(order, Order::Attach(_)) { VMM_ATTACH } else { self.options.order };
        if let Order::Ask(slot) = order {
            *self.life.slots().entry(*slot).or_default() += 1;
        }
        let limits = (deadline, self.options.order);
        self.order_within(order, files, limits).map_err(|failed| printable(&failed.reason))
    }

    /// As [`order`](Self::order), within a time, and one from when the guest is to end.
    fn order_within(
        &self,
        order: &Order,
        files: &[BorrowedFd<'_>],
        limits: (Duration, Duration),
    ) -> Result<Done, Failed> {
        let gone = || Failed::from(self.life.end());
        let begun = Instant::now();
        let answers = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        self.life.asked.store(true, Ordering::SeqCst);
        match packets::offer(&*self.socket, order, files) {
            Ok(()) => match self.answer(&answers, limits) {
                Ok(done) => return done,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => self.life.kill_for(late(&order, begun.elapsed())),
            },
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Other) => {
                self.life.asked.store(false, Ordering::SeqCst);
                return Err(format!("the guest's VMM can't be told: {error}").into());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.life.kill_for("did not read its orders".into());
            }
            // It has gone, perhaps with a word why.
            Err(_) => self.life.closed().unwrap_or_else(|fault| self.life.kill_for(fault)),
        }
        let until = Instant::now() + VMM_END;
        let mut said = None;
        while let Ok(done) = answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            said = done.err().or(said);
        }
        Err(said.unwrap_or_else(gone))
    }

    /// Waits for an answer.
    fn answer(
        &self,
        answers: &Receiver<Result<Done, Failed>>,
        (deadline, ending): (Duration, Duration),
    ) -> Result<Result<Done, Failed>, RecvTimeoutError> {
        let mut until = Instant::now() + deadline;
        let mut is_stopped = false;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match answers.recv_timeout(left.min(STOP_STEP)) {
                Err(RecvTimeoutError::Timeout) if left > STOP_STEP => {}
                answer => return answer,
            }
            if self.stop.requested() && !std::mem::replace(&mut is_stopped, true) {
                until = until.min(Instant::now() + ending);
            }
        }
    }

    /// Kills a VMM that answers an order with what is no answer to it.
    pub(super) fn misunderstood(&self) -> String {
        self.end_for("answered another order than it was given".into());
        self.life.end()
    }

    /// What kills it for what it does, from any thread.
    pub(super) fn refuses(&self) -> impl FnOnce(String) + Send + 'static {
        let life = self.life.clone();
        move |fault| life.kill_for(fault)
    }

    /// Has the guest run.
    ///
    /// # Errors
    /// When it can't. When the process goes meanwhile the guest has ended.
    pub(super) fn boot(&self) -> Result<(), String> {
        self.life.runs.store(true, Ordering::SeqCst);
        match self.order(&Order::Boot, &[]) {
            Err(_) if self.is_gone() => Ok(()),
            Err(error) => {
                self.life.runs.store(false, Ordering::SeqCst);
                Err(error)
            }
            Ok(_) => Ok(()),
        }
    }

    /// The process.
    pub(super) fn id(&self) -> u32 {
        self.life.process.id()
    }

    /// Whether the process has gone, and with it all that it did with devices.
    pub(super) fn is_gone(&self) -> bool {
        self.life.end.get().is_some()
    }

    /// How it is run.
    pub(super) fn options(&self) -> &VmmOptions {
        &self.options
    }

    /// Kills the process for what it does, and waits until it is gone, but not for ever.
    pub(super) fn end_for(&self, fault: String) {
        self.life.kill_for(fault);
        self.end();
    }

    /// Kills the process, unless it has ended, and waits until it is gone, but not for ever.
    pub(super) fn end(&self) {
        self.life.kill();
        let until = Instant::now() + VMM_END;
        while !self.hears.is_finished() {
            if Instant::now() >= until {
                // What hears it goes on telling so, and ends when the process does.
                tracing::error!("the guest's VMM was killed and is not gone");
                return;
            }
            sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vmm").field("life", &self.life).finish_non_exhaustive()
    }
}

/// What a VMM did that was to do something, and has not in this time.
pub(super) fn late(what: &dyn fmt::Display, time: Duration) -> String {
    format!("did not {what} within {} s", time.as_secs())
}

/// What hears a VMM.
struct Heard {
    socket: Arc<OwnedFd>,
    life: Arc<Life>,
    /// How often it is asked whether it is there.
    period: Duration,
    messages: Sender<Message>,
    said: Messages,
    screen: Screen,
    /// `None` once there is nothing more to tell.
    tell: Option<Sender<Result<Done, Failed>>>,
}

impl Heard {
    fn hear(mut self) {
        match self.reports() {
            Err(fault) => self.life.kill_for(fault),
            Ok(()) => self.life.kill(),
        }
        let end = loop {
            match end_of(&self.life.process) {
                Some(end) => break end,
                None => tracing::error!(
                    "the guest's VMM was killed and is not gone: its devices are kept meanwhile"
                ),
            }
        };
        self.said.wait();
        // Nobody else sets it.
        let _ = self.life.end.set(end);
        drop(self.tell.take());
        self.screen.finish();
        if self.life.runs.swap(false, Ordering::SeqCst) {
            // It fails only when nobody is left to do something about it.
            let _ = self.messages.send(Event::Ended(Err(self.life.end())).into());
        }
    }

    /// Hears what it reports until it has gone, and asks whether it is there while nothing else is asked.
    ///
    /// # Errors
    /// What it should not have done.
    fn reports(&self) -> Result<(), String> {
        let (mut next, mut started) = (Instant::now() + self.period, 0);
        let (mut is_asked, mut hangs, mut peers) = (false, false, None);
        // What fails to be sent is heard by nobody any more.
        let tell = |event: Event| drop(self.messages.send(event.into()));
        loop {
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() {
                next = Instant::now() + self.period;
                if !is_asked {
                    is_asked = packets::offer(&*self.socket, &Order::Ping, &[]).is_ok();
                } else if !self.life.asked.load(Ordering::SeqCst) && !std::mem::replace(&mut hangs, true) {
                    tell(Event::Unresponsive);
                }
                continue;
            }
            let left = Timespec::try_from(left).ok();
            if matches!(
                poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], left.as_ref()),
                Ok(0) | Err(Errno::INTR)
            ) {
                continue;
            }
            let report = packets::receive(&*self.socket);
            let Some((report, _)) = report.map_err(|error| format!("made an invalid report ({error})"))?
            else {
                return self.life.closed();
            };
            let runs = || self.life.runs.load(Ordering::SeqCst);
            match report {
                Report::Done(_) if !self.life.asked.swap(false, Ordering::SeqCst) => {
                    return Err("answered an order that it was not given".into());
                }
                Report::Done(done) => {
                    next = Instant::now() + self.period;
                    drop(self.tell.as_ref().map(|tell| tell.send(done)));
                }
                Report::Here(_) if !std::mem::take(&mut is_asked) => {
                    return Err("said unasked that it is there".into());
                }
                Report::Here(report) => {
                    if std::mem::take(&mut hangs) {
                        tell(Event::Responsive);
                    }
                    let reason = report.reason.as_deref().map(printable);
                    let report = PeerReport { reason, ..report };
                    if peers.as_ref() != Some(&report) {
                        tell(Event::Peers(report.clone()));
                        peers = Some(report);
                    }
                }
                Report::Started { restarts } if restarts != started || !runs() => {
                    return Err("reported the start of a guest that did not start".into());
                }
                Report::Started { restarts } => {
                    started += 1;
                    if restarts == 0 {
                        tell(Event::Started(Instant::now()));
                    } else {
                        tell(Event::Restarted);
                        sleep(RESTART);
                    }
                }
                Report::Ended(_) if !self.life.runs.swap(false, Ordering::SeqCst) => {
                    return Err("reported the end of a guest that did not run".into());
                }
                Report::Ended(ran) => {
                    self.screen.finish();
                    tell(Event::Ended(ran.map_err(|error| printable(&error))));
                }
                Report::Asked(slot, answer) => {
                    let mut slots = self.life.slots();
                    let asked = slots.get_mut(&slot).filter(|asked| **asked > 0);
                    *asked.ok_or("answered for a slot that the guest was not asked for")? -= 1;
                    tell(asked_for(slot, answer));
                }
            }
        }
    }
}

/// What a guest that was asked for a slot answers.
fn asked_for(slot: PciAddress, answer: GuestAnswer) -> Event {
    match answer {
        GuestAnswer::LetGo => Event::LetGo(slot),
        GuestAnswer::Kept => Event::Kept(
            slot,
            format!(
                "the guest was about to let go of {slot}, and has kept it; see its console, or take it by surprise"
            ),
        ),
        GuestAnswer::Deaf => Event::Kept(
            slot,
            format!(
                "the guest can't be asked for {slot}, as nothing in it drives its slots (a Linux kernel does with \
                 CONFIG_HOTPLUG_PCI_PCIE, once it has started); take it by surprise"
            ),
        ),
    }
}

/// Carries the console's output from the VMM to where it goes.
struct Screen {
    source: PipeReader,
    busy: Arc<AtomicBool>,
}

impl Screen {
    fn start(source: PipeReader, mut output: Box<dyn Write + Send>) -> io::Result<Self> {
        let (mut from, busy) = (source.try_clone()?, Arc::<AtomicBool>::default());
        let writes = busy.clone();
        let carry = move || {
            let mut bytes = vec![0; 4096];
            let mut fails = false;
            loop {
                if poll(&mut [PollFd::new(&from, PollFlags::IN)], None)
                    .is_err_and(|error| error != Errno::INTR)
                {
                    return;
                }
                // Whoever sees that nothing is left to read sees that it is not written yet.
                writes.store(true, Ordering::SeqCst);
                let Ok(count @ 1..) = from.read(&mut bytes) else { break };
                let written = write(&mut output, &bytes[..count], |_| true);
                if let Err(error) = &written
                    && !fails
                {
                    tracing::warn!(%error, "the guest's console output is lost from here on");
                }
                fails = written.is_err();
                writes.store(false, Ordering::SeqCst);
            }
            writes.store(false, Ordering::SeqCst);
        };
        Builder::new().name("console".into()).spawn(carry)?;
        Ok(Self { source, busy })
    }

    /// Waits until all is written, as long as somebody reads it.
    fn finish(&self) {
        let until = Instant::now() + CONSOLE_END;
        let left = || rustix::io::ioctl_fionread(&self.source).unwrap_or(0);
        while left() > 0 || self.busy.load(Ordering::SeqCst) {
            if Instant::now() >= until {
                tracing::warn!(
                    "the last {} bytes of the guest's console output are dropped: nobody reads them",
                    left()
                );
                return;
            }
            sleep(Duration::from_millis(1));
        }
    }
}
