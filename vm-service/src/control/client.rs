//! A client's side of a guest's control socket. It waits, and never longer than it is told.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;
use thiserror::Error;
use vm_passthrough::Host;

use super::home::{GuestHome, in_folder};
use super::lines::Lines;
use super::wire::{AttachRequest, Call, DetachRequest, Message, Outcome, Request, VERSION};
use crate::deadlines::CONTROL_ANSWER;
use crate::json::{GuestEvent, GuestStatus, Refusal};

/// Most bytes of a line that is read. A guest's readiness may be long.
const MAX_LINE: usize = 1 << 20;

/// Why a guest did not do what it was asked.
#[derive(Debug, Error)]
pub(crate) enum CallError {
    /// No guest of this name lives.
    #[error("there is no guest named {0} that runs; `vm-service guests` lists those that do")]
    NotRunning(String),
    /// It did not answer in time.
    #[error("the guest {guest} did not answer within {} s; see its process", .deadline.as_secs())]
    Timeout {
        /// Which.
        guest: String,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// It has ended meanwhile.
    #[error("the guest {0} ended before it answered")]
    Ended(String),
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

/// A connection to a guest.
#[derive(Debug)]
pub(crate) struct Connection {
    guest: String,
    stream: UnixStream,
    lines: Lines,
    next: u64,
}

type Result<T, E = CallError> = std::result::Result<T, E>;

impl Connection {
    /// Connects to the guest of this name.
    ///
    /// # Errors
    /// When none lives, or it does not answer.
    pub(crate) fn open(host: &Host, name: &str) -> Result<Self> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                CallError::NotRunning(name.to_owned())
            }
            _ => CallError::Io { guest: name.to_owned(), source },
        };
        let deadline = Instant::now() + CONTROL_ANSWER;
        let stream = loop {
            match reach(&GuestHome::path_of(host, name)) {
                // Many are connecting.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                stream => break stream.map_err(failed)?,
            }
        };
        let mut this = Self { guest: name.to_owned(), stream, lines: Lines::new(MAX_LINE), next: 0 };
        this.call(&Request::Hello { versions: vec![VERSION] }, CONTROL_ANSWER)?;
        Ok(this)
    }

    /// How the guest is.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn status(&mut self) -> Result<GuestStatus> {
        let value = self.call(&Request::Status, CONTROL_ANSWER)?;
        self.read_as(value)
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

    /// Resets the guest's machine.
    ///
    /// # Errors
    /// When it refuses or does not answer.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.call(&Request::Reset, CONTROL_ANSWER).map(drop)
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

    /// How the guest is, and from now on what happens to it, as [`next_event`](Self::next_event) answers.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn subscribe(&mut self) -> Result<GuestStatus> {
        let value = self.call(&Request::Subscribe, CONTROL_ANSWER)?;
        self.read_as(value)
    }

    /// What happens next, for however long that takes.
    ///
    /// # Errors
    /// When the guest has ended.
    pub(crate) fn next_event(&mut self) -> Result<GuestEvent> {
        loop {
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

    /// Ends a [`next_event`](Self::next_event) of another thread, when called on the clone that this answers.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(crate) fn stream(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    fn call(&mut self, request: &Request, deadline: Duration) -> Result<Value> {
        let io = |source| CallError::Io { guest: self.guest.clone(), source };
        self.next += 1;
        let mut line =
            serde_json::to_vec(&Call { id: self.next, request }).map_err(|error| io(error.into()))?;
        line.push(b'\n');
        self.stream.set_write_timeout(Some(deadline)).map_err(io)?;
        let until = Instant::now() + deadline;
        self.stream.write_all(&line).map_err(|error| self.failed(error, deadline))?;
        loop {
            match self.message(Some((until, deadline)))? {
                Message::Answer { id, answer } if id == self.next => {
                    return match answer {
                        Outcome::Ok(value) => Ok(value),
                        Outcome::Error(refusal) => Err(CallError::Refused(refusal)),
                    };
                }
                Message::Answer { id: 0, answer: Outcome::Error(refusal) } => {
                    return Err(CallError::Refused(refusal));
                }
                Message::Answer { .. } | Message::Event { .. } => {}
            }
        }
    }

    fn read_as<T: serde::de::DeserializeOwned>(&self, value: Value) -> Result<T> {
        serde_json::from_value(value).map_err(|error| self.failed(error.into(), Duration::ZERO))
    }

    /// The next message, until a time that comes after a deadline.
    fn message(&mut self, until: Option<(Instant, Duration)>) -> Result<Message> {
        let unread = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
        loop {
            match self.lines.next_line() {
                Some(Ok(line)) => match serde_json::from_slice(&line) {
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
            let mut bytes = [0; 4096];
            let read = self.stream.set_read_timeout(left).and_then(|()| self.stream.read(&mut bytes));
            match read {
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

/// Whether the guest of this directory has its control socket.
pub(super) fn is_served(home: &Path) -> bool {
    reach(home).map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
}

/// Connects to the guest of this directory, without waiting.
fn reach(home: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    in_folder(home, "control", |path| Ok(connect(&socket, &SocketAddrUnix::new(path)?)?))?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
