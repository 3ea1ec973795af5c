//! A stream to the device.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use std::vec;
use std::vec::Vec;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vm_paravirt::{CONFIG_BYTES, Config, FRAME_BYTES, FrameHeader};

use crate::transport::{Completed, Transport, timeout};
use crate::{Error, Frame};

/// The most batches that can be under way.
const OUTSTANDING: usize = 256;
/// How long the device may take to say what it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);
/// What a frame of [`Stream::frame`] has room for.
const FRAME_ROOM: usize = 64 << 10;

/// A stream to the device, as a [`Transport`]. Dropping it ends it, and the host releases all that came over it.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    config: Config,
    timeout: Duration,
    /// The frames that were sent and not returned, by their tags.
    frames: Vec<Option<Frame<Vec<u8>>>>,
    /// Those of them that are answered.
    done: VecDeque<u16>,
    incoming: Incoming,
    /// Why the stream can't be used any more.
    failed: Option<Error>,
}

/// A reply that is on its way.
#[derive(Debug)]
struct Incoming {
    header: [u8; FRAME_BYTES],
    /// Whose reply it is, and its length, once the header is there.
    body: Option<(u16, usize)>,
    /// Bytes that are there of the header or the body.
    have: usize,
}

impl Stream {
    /// Takes a connected socket, at whose other end the device is.
    ///
    /// # Errors
    /// When it does not say in time that it is one, or has another version of the protocol.
    pub fn new(socket: OwnedFd) -> Result<Self, Error> {
        let prepared = rustix::fs::fcntl_getfl(&socket)
            .and_then(|flags| rustix::fs::fcntl_setfl(&socket, flags | OFlags::NONBLOCK));
        prepared.map_err(|error| failed("preparing the socket", error))?;
        let mut bytes = [0; CONFIG_BYTES];
        let (mut have, until) = (0, Instant::now() + GREETING_TIMEOUT);
        while have < bytes.len() {
            match receive(&socket, &mut bytes[have..])? {
                Some(count) => have += count,
                None => wait(&socket, PollFlags::IN, until).map(drop)?,
            }
        }
        let config = Config::decode(&bytes)?;
        Ok(Self {
            socket,
            config,
            timeout: timeout(&config),
            frames: (0..OUTSTANDING).map(|_| None).collect(),
            done: VecDeque::new(),
            incoming: Incoming { header: [0; FRAME_BYTES], body: None, have: 0 },
            failed: None,
        })
    }

    /// A frame for this accelerator, of 64 KiB each way. A larger batch, as one with a large module, takes a frame of its
    /// own.
    pub fn frame(&self) -> Frame<Vec<u8>> {
        Frame::new(vec![0; FRAME_ROOM], vec![0; FRAME_ROOM])
    }

    /// Sends a frame, and takes what comes meanwhile: the device may wait for that before it takes more.
    fn send(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let until = Instant::now() + self.timeout;
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    wait(&self.socket, PollFlags::IN | PollFlags::OUT, until)?;
                    self.take()?;
                }
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    // The device may have said why before it ended the stream.
                    let ended = self.take();
                    return if self.done.is_empty() { ended.and(Err(Error::NeedsReset)) } else { Ok(()) };
                }
                Err(error) => return Err(failed("sending to the device", error)),
            }
        }
        Ok(())
    }

    /// Takes all that has come.
    fn take(&mut self) -> Result<(), Error> {
        loop {
            let Incoming { header, body, have } = &mut self.incoming;
            match *body {
                None => {
                    let Some(count) = receive(&self.socket, &mut header[*have..])? else { return Ok(()) };
                    *have += count;
                    if *have < FRAME_BYTES {
                        continue;
                    }
                    let read = FrameHeader::decode_reply(header)?;
                    let tag = u16::try_from(read.tag).ok().filter(|tag| !self.done.contains(tag));
                    let slot =
                        tag.and_then(|tag| Some((tag, self.frames.get_mut(usize::from(tag))?.as_mut()?)));
                    let Some((tag, frame)) = slot else {
                        return Err(Error::Transport("it answers a batch that it was not given"));
                    };
                    if read.bytes as usize > frame.reply_memory().len() {
                        return Err(Error::Transport("its answer is longer than it may be"));
                    }
                    (*body, *have) = (Some((tag, read.bytes as usize)), 0);
                }
                Some((tag, bytes)) => {
                    // It is there for as long as its answer is not.
                    let slot = self.frames.get_mut(usize::from(tag)).and_then(Option::as_mut);
                    let frame = slot.ok_or(Error::NeedsReset)?;
                    let Some(count) = receive(&self.socket, &mut frame.reply_memory()[*have..bytes])? else {
                        return Ok(());
                    };
                    *have += count;
                    if *have == bytes {
                        frame.set_written(bytes);
                        (*body, *have) = (None, 0);
                        self.done.push_back(tag);
                    }
                }
            }
        }
    }

    /// Remembers why the stream can't be used any more.
    fn checked<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        act(self).inspect_err(|error| self.failed = Some(*error))
    }
}

/// The socket, for who waits for answers by other means: it is readable when some come, or the stream has ended.
impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Transport for Stream {
    type Memory = Vec<u8>;

    fn config(&self) -> &Config {
        &self.config
    }

    fn offer(&mut self, mut frame: Frame<Vec<u8>>, bytes: usize) -> Result<u16, (Error, Frame<Vec<u8>>)> {
        let room = frame.reply_memory().len().min(self.config.reply_bytes as usize);
        let most = frame.request().len().min(self.config.batch_bytes as usize);
        if bytes > most || bytes < FRAME_BYTES || !bytes.is_multiple_of(8) || room < FRAME_BYTES {
            return Err((Error::FrameLength, frame));
        }
        let Some(slot) = self.frames.iter().position(Option::is_none) else {
            return Err((Error::QueueFull, frame));
        };
        frame.set_written(0);
        let header = FrameHeader { bytes: bytes as u32, room: room as u32, tag: slot as u32 };
        let sent = [&header.encode()[..], &frame.request()[..bytes]].concat();
        // Its answer may come before all of it is sent, should it be no good.
        self.frames[slot] = Some(frame);
        self.checked(|this| this.send(&sent)).map(|()| slot as u16).map_err(|error| {
            self.done.retain(|tag| usize::from(*tag) != slot);
            // It is where it was put.
            (error, self.frames[slot].take().unwrap_or_else(|| Frame::new(Vec::new(), Vec::new())))
        })
    }

    /// It knows.
    fn notify(&self) {}

    fn completed(&mut self) -> Result<Option<Completed<Vec<u8>>>, Error> {
        if self.done.is_empty()
            && let Err(error) = self.checked(Self::take)
            && self.done.is_empty()
        {
            return Err(error);
        }
        let tag = self.done.pop_front();
        Ok(tag.and_then(|tag| Some((tag, self.frames.get_mut(usize::from(tag))?.take()?))))
    }

    fn wait(&mut self) -> Result<Completed<Vec<u8>>, Error> {
        let until = Instant::now() + self.timeout;
        loop {
            if let Some(completed) = self.completed()? {
                return Ok(completed);
            }
            self.checked(|this| {
                if this.frames.iter().all(Option::is_none) {
                    return Err(Error::Late);
                }
                wait(&this.socket, PollFlags::IN, until)
            })?;
        }
    }

    fn close(mut self, mut frames: impl FnMut(Frame<Vec<u8>>)) -> Result<(), Error> {
        self.frames.drain(..).flatten().for_each(&mut frames);
        Ok(())
    }
}

fn failed(what: &'static str, error: Errno) -> Error {
    Error::System { what, errno: error.raw_os_error() }
}

/// Receives what is there; [`None`] when nothing is.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
    loop {
        match rustix::io::read(socket, &mut *buffer) {
            Ok(0) | Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::NeedsReset),
            Ok(count) => return Ok(Some(count)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed("receiving from the device", error)),
        }
    }
}

/// Waits until the socket can be used.
fn wait(socket: &OwnedFd, flags: PollFlags, until: Instant) -> Result<(), Error> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::Late);
    }
    let timeout = Timespec::try_from(left).map_err(|_| Error::Late)?;
    match poll(&mut [PollFd::new(socket, flags)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(failed("waiting for the device", error)),
    }
}
