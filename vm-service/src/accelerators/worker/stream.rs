//! The worker's end of a stream: a socket whose other end is a program of the guest.
//!
//! A program may wait as long as it likes between two frames. A frame that has begun must end in time, and answers must be
//! taken in time; a program that does otherwise, or sends what is no frame, is served no further, and the others go on.

use std::io::{self, BufRead as _, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::net::{Shutdown, shutdown};
use vm_paravirt::{CONFIG_BYTES, Config, FRAME_BYTES, FrameHeader, MAX_REPLY_BYTES, Status};

use super::link::{Link, Request};
use super::server::Answer;

/// How long a frame may take from its first to its last byte, and an answer to be taken.
const TIMEOUT: Duration = Duration::from_secs(10);
/// What is read at once.
const BUFFER: usize = 64 << 10;

/// The socket.
pub(super) struct Stream {
    reader: Mutex<BufReader<Socket>>,
    writer: Mutex<Writer>,
    socket: Arc<OwnedFd>,
    timeout: Duration,
}

/// The reply to a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    /// The batch's tag.
    tag: u32,
    /// Bytes that the program takes.
    room: usize,
}

impl Reply {
    /// To something that is no batch: a header alone.
    const LEAST: Self = Self { tag: 0, room: 16 };
}

impl Stream {
    /// Takes a socket. Nothing is sent before it is first read.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn new(socket: OwnedFd, config: &Config) -> io::Result<Self> {
        Self::with_timeout(socket, config, TIMEOUT)
    }

    pub(super) fn with_timeout(socket: OwnedFd, config: &Config, timeout: Duration) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags | OFlags::NONBLOCK)?;
        let socket = Arc::new(socket);
        let reader = BufReader::with_capacity(BUFFER, Socket { socket: socket.clone(), until: None });
        let config = config.encode();
        Ok(Self { reader: Mutex::new(reader), writer: Mutex::new(Writer::Fresh(config)), socket, timeout })
    }

    /// Says that the program is not served, and why, if it takes that at once.
    pub(super) fn refuse(self, status: Status) {
        self.send(Reply::LEAST, &Answer::refused(status), Duration::ZERO);
    }

    /// The next frame, whole; [`None`] at the stream's end. What is wrong with a frame comes with its tag.
    fn read(&self) -> Result<Option<Request<Reply>>, Broken> {
        self.write(&[], self.timeout);
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.get_mut().until = None;
        if reader.fill_buf()?.is_empty() {
            return Ok(None);
        }
        reader.get_mut().until = Some(Instant::now() + self.timeout);
        let mut header = [0; FRAME_BYTES];
        reader.read_exact(&mut header)?;
        let header = FrameHeader::decode_batch(&header)
            .map_err(|error| Broken::Frame(FrameHeader::tag(&header), error))?;
        let mut batch = vec![0; header.bytes as usize];
        reader.read_exact(&mut batch)?;
        let room = (header.room as usize).min(MAX_REPLY_BYTES);
        Ok(Some(Request { batch: Some(batch), place: Reply { tag: header.tag, room }, room }))
    }

    fn send(&self, Reply { tag, room }: Reply, answer: &Answer, timeout: Duration) {
        let reply = answer.encode(room);
        // A reply has a cap.
        let header = FrameHeader { bytes: reply.len() as u32, room: 0, tag };
        self.write(&[&header.encode()[..], &reply].concat(), timeout);
    }

    /// Writes, behind the greeting. A program that does not take it in time is given no more.
    fn write(&self, bytes: &[u8], timeout: Duration) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + timeout;
        let written = match std::mem::replace(&mut *writer, Writer::Open) {
            Writer::Closed => {
                *writer = Writer::Closed;
                return;
            }
            Writer::Open => Ok(()),
            Writer::Fresh(greeting) => write_all(&self.socket, &greeting, until),
        };
        if let Err(error) = written.and_then(|()| write_all(&self.socket, bytes, until)) {
            tracing::debug!(%error, "a program of the guest takes no answers");
            *writer = Writer::Closed;
            self.close();
        }
    }

    /// Ends it, so that whoever reads it sees its end.
    fn close(&self) {
        // It fails when the program was faster.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl Link for Stream {
    type Place = Reply;

    fn next(&self) -> Result<Option<Request<Reply>>, String> {
        match self.read() {
            Ok(read) => Ok(read),
            Err(broken) => {
                tracing::debug!(%broken, "a program of the guest is served no further");
                if let Broken::Frame(tag, _) = broken {
                    self.send(
                        Reply { tag, ..Reply::LEAST },
                        &Answer::refused(Status::Malformed),
                        self.timeout,
                    );
                }
                Ok(None)
            }
        }
    }

    fn ready(&self) -> bool {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Timespec::default();
        // What can't be asked, `next` reports.
        !reader.buffer().is_empty()
            || poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&now)) != Ok(0)
    }

    /// A program that takes no answers has an end, and does not end the others.
    fn answer(&self, reply: &Reply, answer: &Answer) -> Result<(), String> {
        self.send(*reply, answer, self.timeout);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.close();
    }
}

/// How far the writing has come.
enum Writer {
    /// The greeting has to go out first.
    Fresh([u8; CONFIG_BYTES]),
    Open,
    /// The program takes nothing any more.
    Closed,
}

/// Why a stream can't be read further.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the frame with tag {0}: {1}")]
    Frame(u32, vm_paravirt::Malformed),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

/// A socket that is waited for.
struct Socket {
    socket: Arc<OwnedFd>,
    /// Until when.
    until: Option<Instant>,
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.socket, &mut *buffer) {
                Err(rustix::io::Errno::AGAIN) => wait(&self.socket, PollFlags::IN, self.until)?,
                Err(rustix::io::Errno::INTR) => {}
                read => return Ok(read?),
            }
        }
    }
}

fn write_all(socket: impl AsFd, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(&socket, bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(rustix::io::Errno::AGAIN) => wait(&socket, PollFlags::OUT, Some(until))?,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until a socket can be used, or has ended.
fn wait(socket: impl AsFd, flags: PollFlags, until: Option<Instant>) -> io::Result<()> {
    let timeout = match until {
        None => None,
        Some(until) => {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Some(Timespec::try_from(left).map_err(io::Error::other)?)
        }
    };
    match poll(&mut [PollFd::new(&socket, flags)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
