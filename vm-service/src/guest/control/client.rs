//! A client's side of a guest's control socket. It waits, and never longer than it is told.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::Value;
use thiserror::Error;
use vm_passthrough::Host;

use super::home::{GuestHome, LOG, in_folder};
use super::lines::Lines;
use super::wire::{Call, Message, Outcome, Request, VERSION};
use crate::api::{AttachRequest, DetachRequest, GuestEvent, GuestStatus, Refusal, StoppedHow};
use crate::deadlines::{CALLER_CHECK, CONTROL_ANSWER};

/// Most bytes of a line that is read. A guest's readiness may be long.
const MAX_LINE: usize = 1 << 20;

/// Most events that may come before an answer.
const MAX_EVENTS: usize = 256;

/// Why a guest did not do what it was asked.
#[derive(Debug, Error)]
pub(crate) enum CallError {
    /// No guest of this name lives.
    #[error("there is no guest named {0} that runs; `vm-service guests` lists those that do")]
    NotRunning(String),
    /// The one of this name that the daemon started last has ended.
    #[error(
        "there is no guest named {0} that runs: it has ended, and `vm-service logs {0}` shows what it logged"
    )]
    HasEnded(String),
    /// It did not answer in time.
    #[error("the guest {guest} did not answer within {} s; `vm-service stop {guest} --now` ends it all the same", .deadline.as_secs())]
    Timeout {
        /// Which.
        guest: String,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// It has ended meanwhile.
    #[error("the guest {0} ended before it answered")]
    Ended(String),
    /// The [`Caller`] disconnected during the wait.
    #[error("the client disconnected before the guest {0} answered")]
    Abandoned(String),
    /// It refused.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// The connection failed.
    #[error("the guest {guest} can't be reached: {source}")]
    Io {
        /// Which.
        guest: String,
        /// Why.
        source: io::Error,
    },
}

/// The socket of the client that sent a request. The default never disconnects.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(Option<Arc<OwnedFd>>);

impl Caller {
    /// The client at the other end of this stream socket.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(Some(Arc::new(socket)))
    }

    /// Returns whether the client has closed its socket. A client that has closed only its half for writing still reads.
    fn has_disconnected(&self) -> bool {
        let Some(socket) = &self.0 else { return false };
        // Hangups are reported without being requested.
        let mut file = [PollFd::new(socket, PollFlags::empty())];
        poll(&mut file, Some(&Timespec::default())).is_ok() && file[0].revents().contains(PollFlags::HUP)
    }
}

/// A connection to a guest.
#[derive(Debug)]
pub(crate) struct Connection {
    guest: String,
    stream: UnixStream,
    lines: Lines,
    next: u64,
    /// How the guest ended, once it has told.
    how: Option<StoppedHow>,
    /// What happened while an answer was waited for.
    events: VecDeque<GuestEvent>,
    /// Ends a wait when it disconnects.
    caller: Caller,
}

type Result<T, E = CallError> = std::result::Result<T, E>;

impl Connection {
    /// Connects to the guest of this name, which answers.
    ///
    /// # Errors
    /// When none lives, or it does not answer.
    pub(crate) fn open(host: &Host, name: &str) -> Result<Self> {
        let mut this = Self::reach(host, name)?;
        this.hello()?;
        Ok(this)
    }

    /// Connects to the guest of this name, whether it answers or not.
    ///
    /// # Errors
    /// When none lives.
    pub(crate) fn reach(host: &Host, name: &str) -> Result<Self> {
        let home = GuestHome::path_of(host, name);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if home.join(LOG).exists() => {
                CallError::HasEnded(name.to_owned())
            }
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                CallError::NotRunning(name.to_owned())
            }
            _ => CallError::Io { guest: name.to_owned(), source },
        };
        let deadline = Instant::now() + CONTROL_ANSWER;
        let stream = loop {
            match reach(&home, "control") {
                // Many are connecting.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                stream => break stream.map_err(failed)?,
            }
        };
        Ok(Self::of(name, stream))
    }

    /// The guest of this name is at the other end.
    pub(crate) fn of(name: &str, stream: UnixStream) -> Self {
        Self {
            guest: name.to_owned(),
            stream,
            lines: Lines::new(MAX_LINE),
            next: 0,
            how: None,
            events: VecDeque::new(),
            caller: Caller::default(),
        }
    }

    /// Ends each later wait with [`CallError::Abandoned`] within [`CALLER_CHECK`] after this caller disconnects.
    pub(crate) fn wait_for(&mut self, caller: &Caller) {
        self.caller = caller.clone();
    }

    /// Agrees with the guest on how to speak.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn hello(&mut self) -> Result<()> {
        self.call(&Request::Hello { versions: vec![VERSION] }, CONTROL_ANSWER).map(drop)
    }

    /// How the guest is.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn status(&mut self) -> Result<GuestStatus> {
        let value = self.call(&Request::Status, CONTROL_ANSWER)?;
        self.read_status(value)
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn power_button(&mut self) -> Result<()> {
        self.call(&Request::PowerButton, CONTROL_ANSWER).map(drop)
    }

    /// Ends the guest; it ends behind the answer.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn stop(&mut self) -> Result<()> {
        self.call(&Request::Stop, CONTROL_ANSWER).map(drop)
    }

    /// Resets the guest's machine, and waits until the guest has restarted.
    ///
    /// # Errors
    /// When it refuses, fails, or does not answer within `deadline`.
    pub(crate) fn reset(&mut self, deadline: Duration) -> Result<()> {
        self.call(&Request::Reset, deadline).map(drop)
    }

    /// Gives the guest a device.
    ///
    /// # Errors
    /// When it refuses, fails, or does not answer within `deadline`.
    pub(crate) fn attach(&mut self, request: AttachRequest, deadline: Duration) -> Result<Value> {
        self.call(&Request::Attach(request), deadline)
    }

    /// Takes a device from the guest.
    ///
    /// # Errors
    /// When it refuses, fails, or does not answer within `deadline`.
    pub(crate) fn detach(&mut self, request: DetachRequest, deadline: Duration) -> Result<Value> {
        self.call(&Request::Detach(request), deadline)
    }

    /// Subscribes to the guest's events, which [`next_event`](Self::next_event) returns, and returns its status. `answer`
    /// limits the wait for each answer; without it, only the end of the connection does.
    ///
    /// # Errors
    /// When the guest refuses, has ended, or does not answer in time.
    pub(crate) fn subscribe(&mut self, answer: Option<Duration>) -> Result<GuestStatus> {
        self.call_within(&Request::Hello { versions: vec![VERSION] }, answer)?;
        let value = self.call_within(&Request::Subscribe, answer)?;
        let status = self.read_status(value)?;
        self.how = self.how.or(status.how);
        Ok(status)
    }

    /// What happens next, for however long that takes.
    ///
    /// # Errors
    /// When the guest has ended.
    pub(crate) fn next_event(&mut self) -> Result<GuestEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if let Message::Event { event } = self.message(None)? {
                return Ok(event);
            }
        }
    }

    /// Waits until the guest has ended, and answers [`CallError::Ended`] when it has.
    pub(crate) fn wait_for_end(&mut self, deadline: Duration) -> CallError {
        let until = Instant::now() + deadline;
        loop {
            if let Err(error) = self.message(Some((until, deadline))) {
                return error;
            }
        }
    }

    /// How the guest ended, as it reported to one who has [subscribed](Self::subscribe).
    pub(crate) fn how(&self) -> Option<StoppedHow> {
        self.how
    }

    /// The ID of the guest's process, for people.
    pub(crate) fn process_id(&self) -> u32 {
        socket_peercred(&self.stream).map_or(0, |peer| peer.pid.as_raw_pid().unsigned_abs())
    }

    /// The guest's process, which lives.
    ///
    /// # Errors
    /// When it does not, or can't be known.
    pub(crate) fn process(&self) -> io::Result<OwnedFd> {
        let process = pidfd_open(socket_peercred(&self.stream)?.pid, PidfdFlags::empty())?;
        // The ID was its own when it began to listen, and is still: nobody else has its end of the connection.
        let mut ended = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        match poll(&mut ended, Some(&Timespec::default()))? {
            0 => Ok(process),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "it has ended")),
        }
    }

    /// Ends a [`next_event`](Self::next_event) of another thread, when called on the clone that this answers.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(crate) fn stream(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    fn call(&mut self, request: &Request, deadline: Duration) -> Result<Value> {
        self.call_within(request, Some(deadline))
    }

    /// Sends a request and waits for its answer, without `answer` until the connection ends.
    fn call_within(&mut self, request: &Request, answer: Option<Duration>) -> Result<Value> {
        let deadline = answer.unwrap_or(CONTROL_ANSWER);
        let io = |source| CallError::Io { guest: self.guest.clone(), source };
        self.next += 1;
        let mut line =
            serde_json::to_vec(&Call { id: self.next, request }).map_err(|error| io(error.into()))?;
        line.push(b'\n');
        self.stream.set_write_timeout(Some(deadline)).map_err(io)?;
        let until = answer.map(|answer| (Instant::now() + answer, answer));
        match self.stream.write_all(&line) {
            // The guest may have said why it closed the connection.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            written => written.map_err(|error| self.failed(error, deadline))?,
        }
        loop {
            match self.message(until)? {
                Message::Answer { id, answer } if id == self.next => {
                    return match answer {
                        Outcome::Ok(value) => Ok(value),
                        Outcome::Error(refusal) => Err(CallError::Refused(refusal)),
                    };
                }
                Message::Answer { id: 0, answer: Outcome::Error(refusal) } => {
                    return Err(CallError::Refused(refusal));
                }
                Message::Event { event } if self.events.len() < MAX_EVENTS => self.events.push_back(event),
                Message::Answer { .. } | Message::Event { .. } => {}
            }
        }
    }

    fn read_status(&self, value: Value) -> Result<GuestStatus> {
        let unread = |error| self.failed(error, Duration::ZERO);
        let status: GuestStatus = serde_json::from_value(value).map_err(|error| unread(error.into()))?;
        if status.name != self.guest {
            let other = io::Error::new(io::ErrorKind::InvalidData, "it says that it is another guest");
            return Err(unread(other));
        }
        // What a guest's process says is opened by others, who may be more than it is.
        Ok(GuestStatus { console: status.console.filter(|path| is_pty(path)), ..status })
    }

    /// The next message, until a time that comes after a deadline.
    fn message(&mut self, until: Option<(Instant, Duration)>) -> Result<Message> {
        let unread = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
        loop {
            match self.lines.next_line() {
                Some(Ok(line)) => match serde_json::from_slice(&line) {
                    Ok(Message::Event { event }) => {
                        self.how = event.how.or(self.how);
                        return Ok(Message::Event {
                            event: GuestEvent { guest: self.guest.clone(), ..event },
                        });
                    }
                    Ok(message) => return Ok(message),
                    // A message that only a newer version knows.
                    Err(error) if error.is_data() => continue,
                    Err(error) => return Err(self.failed(error.into(), Duration::ZERO)),
                },
                Some(Err(_)) => {
                    return Err(self.failed(unread("it sends a line without an end"), Duration::ZERO));
                }
                None => {}
            }
            let deadline = until.map_or(Duration::ZERO, |(_, deadline)| deadline);
            let left = until.map(|(until, _)| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(self.failed(io::ErrorKind::TimedOut.into(), deadline));
            }
            let check = self.caller.0.is_some().then_some(CALLER_CHECK);
            let timeout = [left, check].into_iter().flatten().min();
            let mut bytes = [0; 4096];
            let read = self.stream.set_read_timeout(timeout).and_then(|()| self.stream.read(&mut bytes));
            match read {
                // The loop checks the deadline.
                Err(error) if check.is_some() && error.kind() == io::ErrorKind::WouldBlock => {
                    if self.caller.has_disconnected() {
                        return Err(CallError::Abandoned(self.guest.clone()));
                    }
                }
                Ok(0) => return Err(CallError::Ended(self.guest.clone())),
                Ok(read) => self.lines.push(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error, deadline)),
            }
        }
    }

    fn failed(&self, source: io::Error, deadline: Duration) -> CallError {
        let guest = self.guest.clone();
        match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => CallError::Timeout { guest, deadline },
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => CallError::Ended(guest),
            _ => CallError::Io { guest, source },
        }
    }
}

/// Whether this is the path of a pseudo-terminal.
fn is_pty(path: &str) -> bool {
    path.strip_prefix("/dev/pts/").is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether the guest of this directory has its control socket.
pub(super) fn is_served(home: &Path) -> bool {
    reach(home, "control").map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
}

/// Connects to a socket of a directory, without waiting.
///
/// # Errors
/// When nobody listens there, or many are connecting.
pub(crate) fn reach(folder: &Path, name: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    in_folder(folder, name, |path| Ok(connect(&socket, &SocketAddrUnix::new(path)?)?))?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
