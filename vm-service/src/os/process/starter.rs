//! Starts processes that are confined, and ends them, in a thread that stays and that may: workers, and VMMs.
//!
//! Such a process ends with the thread that started it, by its own wish (`PR_SET_PDEATHSIG`), so that one that was taken over
//! does not outlive its keeper. That thread must not end before the process does. And a VMM, which is confined itself, may
//! neither make sockets, nor start processes, nor send signals: it asks its keeper, which knows the program.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use super::{ChildProgram, packets};
use crate::deadlines::{WORKER_END, WORKER_INTERVAL};
use crate::os::sandbox::{end_with_parent, inherit_standard};

type Order = Box<dyn FnOnce() + Send>;

/// The most workers that a VMM has at once: each of its accelerators has one, and the next while that is ended.
const MOST: usize = 2 * crate::config::MAX_ACCELERATORS;

/// Who starts this process's workers, where it may not.
static KEEPER: OnceLock<Mutex<OwnedFd>> = OnceLock::new();

/// What a VMM asks of its keeper.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Request {
    /// Start a worker, which runs models or does not.
    Start { runs_models: bool },
    /// Kill it.
    Kill(u32),
    /// Tell how it ended, if it has.
    Wait(u32),
}

/// What it is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Answer {
    /// The worker's number. With its socket, and what it writes its messages to.
    Started(u32),
    Killed,
    /// Its status.
    Ended(Option<i32>),
    Failed(String),
}

/// A process that was started.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    id: u32,
    parent: Parent,
}

/// Whose child a process is.
#[derive(Clone, Debug)]
enum Parent {
    This(Arc<Mutex<Child>>),
    /// The keeper, which tells once how it ended.
    Keeper(Arc<OnceLock<ExitStatus>>),
}

/// A process with the other end of its standard input, and of its standard error.
pub(crate) type Started = (Process, OwnedFd, OwnedFd);

impl Process {
    /// Starts a process, which inherits nothing but a socket, which is its standard input, and a pipe for its messages.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(crate) fn start(command: Command) -> io::Result<Started> {
        let (socket, theirs) = socketpair()?;
        let (process, messages) = Self::start_on(command, theirs, None)?;
        Ok((process, socket, messages))
    }

    /// The same with a socket that is there, and a file as standard output where one is given. Answers with the pipe for its messages.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub(crate) fn start_on(
        mut command: Command,
        socket: OwnedFd,
        output: Option<OwnedFd>,
    ) -> io::Result<(Self, OwnedFd)> {
        inherit_standard(&mut command);
        end_with_parent(&mut command);
        let output = output.map_or_else(Stdio::null, Stdio::from);
        let start = move || command.stdin(socket).stdout(output).stderr(Stdio::piped()).spawn();
        let mut child = ask(start)??;
        let messages = child.stderr.take().ok_or_else(|| io::Error::other("it has no pipe"))?.into();
        Ok((Self { id: child.id(), parent: Parent::This(Arc::new(Mutex::new(child))) }, messages))
    }

    /// Starts a worker, here or by the keeper, whose program it is then. One that runs models is told where their libraries are.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub(crate) fn start_worker(program: &ChildProgram, runs_models: bool) -> io::Result<Started> {
        if KEEPER.get().is_some() {
            return match request(Request::Start { runs_models })? {
                (Answer::Started(id), mut files) => match (files.pop(), files.pop()) {
                    (Some(messages), Some(socket)) => {
                        Ok((Self { id, parent: Parent::Keeper(Arc::default()) }, socket, messages))
                    }
                    _ => Err(io::ErrorKind::InvalidData.into()),
                },
                _ => Err(io::ErrorKind::InvalidData.into()),
            };
        }
        let mut command = Command::new(&program.path);
        command.args(&program.arguments).current_dir("/").env_clear();
        // A cache in the user's home is one guest's to fill and another's to read; ours is keyed by content.
        command.env("CUDA_CACHE_DISABLE", "1").env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        // What goes wrong for the guest is reported to the guest, which could repeat it for ever.
        command.env("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "error".into()));
        for name in ["LD_LIBRARY_PATH", "ROCM_PATH", "VM_ROCM_HIP", "VM_ROCM_LLVM"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if runs_models {
            crate::devices::npus::name_libraries(&mut command);
        }
        Self::start(command)
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Kills it, unless it has ended.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match &self.parent {
            Parent::This(child) => with(child, Child::kill),
            Parent::Keeper(ended) if ended.get().is_some() => Ok(()),
            Parent::Keeper(_) => request(Request::Kill(self.id)).map(drop),
        }
    }

    /// Waits for the end of a child of this process, and answers with how that was.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(crate) fn wait(&self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            self.ends_within(None)?;
        }
    }

    /// Whether a child of this process ends, or has ended, within a time; without one it is waited for as long as that takes.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn ends_within(&self, timeout: Option<Duration>) -> io::Result<bool> {
        // Its number is its own until it is waited for.
        let id = i32::try_from(self.id).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let process = match pidfd_open(id, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(true),
            process => process?,
        };
        let timeout = timeout.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }

    /// Whether a child of this process has ended; no when the other end of a connection has gone before.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(crate) fn ends_before(&self, connection: impl AsFd) -> io::Result<bool> {
        let id = i32::try_from(self.id).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let process = match pidfd_open(id, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(true),
            process => process?,
        };
        loop {
            let mut fds = [PollFd::new(&process, PollFlags::IN), PollFd::new(&connection, PollFlags::RDHUP)];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Ok(!fds[0].revents().is_empty()),
            }
        }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(crate) fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        let ended = match &self.parent {
            Parent::This(child) => return with(child, Child::try_wait),
            Parent::Keeper(ended) => ended,
        };
        if ended.get().is_none() {
            match request(Request::Wait(self.id))? {
                // Nobody else sets it.
                (Answer::Ended(Some(status)), _) => drop(ended.set(ExitStatus::from_raw(status))),
                (Answer::Ended(None), _) => {}
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        Ok(ended.get().copied())
    }
}

fn with<T: Send + 'static>(child: &Arc<Mutex<Child>>, act: fn(&mut Child) -> io::Result<T>) -> io::Result<T> {
    let child = child.clone();
    ask(move || act(&mut child.lock().unwrap_or_else(PoisonError::into_inner)))?
}

/// From here on this process asks `keeper`, the other end of what that [serves](serve).
pub(crate) fn ask_keeper(keeper: OwnedFd) {
    // Nobody has asked before.
    let _ = KEEPER.set(Mutex::new(keeper));
}

fn request(request: Request) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let keeper = KEEPER.get().ok_or(io::ErrorKind::NotConnected)?;
    let keeper = keeper.lock().unwrap_or_else(PoisonError::into_inner);
    packets::send(&*keeper, &request, &[])?;
    match packets::receive(&*keeper)?.ok_or(io::ErrorKind::NotConnected)? {
        (Answer::Failed(reason), _) => Err(io::Error::other(reason)),
        answered => Ok(answered),
    }
}

/// Serves a VMM until that has gone: starts its workers, which are this `program`, and ends them. All of them end with it. `refuse`
/// gets what it should not have done.
pub(crate) fn serve(socket: &OwnedFd, program: &ChildProgram, refuse: impl FnOnce(String)) {
    let mut workers: BTreeMap<u32, Process> = BTreeMap::new();
    let mut started = 0;
    loop {
        let request = match packets::receive::<Request>(socket) {
            Ok(Some((request, _))) => request,
            Ok(None) => break,
            Err(error) => {
                refuse(format!("made an invalid request for a worker ({error})"));
                break;
            }
        };
        let unknown = || io::Error::from(io::ErrorKind::NotFound);
        let answer = match request {
            Request::Start { .. } if workers.len() >= MOST => Err(io::ErrorKind::QuotaExceeded.into()),
            Request::Start { runs_models } => {
                started += 1;
                if started > MOST {
                    // A VMM that was taken over paces nothing itself.
                    sleep(WORKER_INTERVAL);
                }
                Process::start_worker(program, runs_models).map(|(process, theirs, messages)| {
                    let id = process.id();
                    workers.insert(id, process);
                    (Answer::Started(id), vec![theirs, messages])
                })
            }
            Request::Kill(id) => workers
                .get(&id)
                .map_or_else(|| Err(unknown()), Process::kill)
                .map(|()| (Answer::Killed, Vec::new())),
            Request::Wait(id) => {
                let status = workers.get(&id).map_or_else(|| Err(unknown()), Process::try_wait);
                if let Ok(Some(_)) = status {
                    workers.remove(&id);
                }
                status.map(|status| (Answer::Ended(status.map(|status| status.into_raw())), Vec::new()))
            }
        };
        let (answer, files) = answer.unwrap_or_else(|error| (Answer::Failed(error.to_string()), Vec::new()));
        let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        // It asks one thing at a time, so there is room; one that does not listen gets nothing.
        if packets::offer(socket, &answer, &files).is_err() {
            break;
        }
    }
    for process in workers.values() {
        // It fails on a process that has ended.
        let _ = process.kill();
    }
    for process in workers.values() {
        end_of(process);
    }
}

/// How a process ended that was killed; `None` when it is not gone within the deadline.
pub(crate) fn end_of(process: &Process) -> Option<String> {
    let until = Instant::now() + WORKER_END;
    loop {
        match process.try_wait() {
            Ok(Some(status)) => {
                return Some(match (status.code(), status.signal()) {
                    (Some(code), _) => format!("ended with status {code}"),
                    (_, Some(libc::SIGKILL)) => "was killed".into(),
                    (_, Some(libc::SIGSYS)) => "was ended for a system call that it may not make".into(),
                    (_, Some(signal)) => format!("was ended by signal {signal}"),
                    _ => "ended".into(),
                });
            }
            Ok(None) if Instant::now() < until => sleep(Duration::from_millis(1)),
            Ok(None) | Err(_) => return None,
        }
    }
}

/// A pair of sockets for packets.
///
/// # Errors
/// The Linux kernel's.
pub(crate) fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Has the thread do something, and waits for that.
fn ask<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    static STARTER: OnceLock<Option<Sender<Order>>> = OnceLock::new();
    let none = || io::Error::other("the thread that starts workers can't be had");
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        let serve = move || orders.into_iter().for_each(|order| order());
        std::thread::Builder::new().name("starter".into()).spawn(serve).ok().map(|_| sender)
    });
    let (answer, answered) = sync_channel(1);
    // Whoever asked waits for it.
    let order: Order = Box::new(move || drop(answer.send(work())));
    starter.as_ref().and_then(|starter| starter.send(order).ok()).ok_or_else(none)?;
    answered.recv().map_err(|_| none())
}
