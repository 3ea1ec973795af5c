//! Sessions of programs whose connections carry no files: of guests and of other machines.
//!
//! Such a program has a connection for its session, and one more for each lane. Each begins with a [`Preamble`], which is all that is read of it here
//! but for the session's orders, a few words each. Who starts a session is given a token, and connections with that token go to its worker.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};
use vm_bridge::orders::{self, Order};
use vm_bridge::wire::preamble::{self, Preamble, Token, random};
use vm_bridge::wire::{code, control, facts, nvml};

use super::window::Window;
use super::workers::Workers;
use crate::process::end_of;

/// The most programs at a time. Each takes some six descriptors, of the 1,024 that processes have as a rule.
pub(super) const PROGRAMS: usize = 128;
/// The most connections of which it is not known yet what they are, or that their workers don't have yet.
const UNKNOWN: usize = 64;
/// How long one may take to say that, and to give an order that it has begun.
const SAY: Duration = Duration::from_secs(10);
/// How long a worker may take to answer an order: its driver opens first.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a worker may take to end with its session before it is killed.
pub(super) const END: Duration = Duration::from_secs(2);

/// Takes connections, and starts workers for sessions.
#[derive(Clone, Debug)]
pub(super) struct Gateway(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    workers: Arc<Workers>,
    window: Option<Window>,
    /// The connections to workers, by which they are given orders one at a time.
    sessions: Mutex<HashMap<Token, Arc<Mutex<UnixStream>>>>,
    unknown: AtomicUsize,
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gateway {
    pub(super) fn new(workers: Arc<Workers>, window: Option<Window>) -> Self {
        Self(Arc::new(Inner { workers, window, sessions: Mutex::default(), unknown: AtomicUsize::new(0) }))
    }

    /// Takes a connection, on a thread of its own. One that can't be served is closed.
    pub(super) fn accept(&self, connection: OwnedFd) {
        if self.0.unknown.fetch_add(1, Ordering::SeqCst) >= UNKNOWN {
            self.0.unknown.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!("a connection is closed: {UNKNOWN} others are not yet with their workers");
            return;
        }
        let this = self.clone();
        let serve = move || {
            let stream = UnixStream::from(connection);
            let mut bytes = [0; preamble::SIZE];
            let said = read_by(&stream, &mut bytes, Instant::now() + SAY)
                .and_then(|()| Preamble::from_bytes(bytes).map_err(io::Error::other));
            let passed = match said {
                Ok(Preamble::Session) => None,
                Ok(Preamble::Lane(token)) => Some(this.0.pass(control::LANE, token, &stream)),
                Ok(Preamble::Callbacks(token)) => Some(this.0.pass(control::CALLBACKS, token, &stream)),
                Ok(Preamble::Ring(token)) => Some(this.0.pass_ring(token, &stream)),
                Err(error) => Some(Err(error)),
            };
            this.0.unknown.fetch_sub(1, Ordering::SeqCst);
            let served = passed.unwrap_or_else(|| this.0.session(&stream));
            if let Err(error) = served {
                tracing::debug!(%error, "a connection of a CUDA program is closed");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("program".into()).spawn(serve) {
            self.0.unknown.fetch_sub(1, Ordering::SeqCst);
            tracing::error!(%error, "a CUDA program can't be served: no thread can be started");
        }
    }
}

impl Inner {
    /// Hands a connection to the worker of its session.
    fn pass(&self, order: u64, token: Token, stream: &UnixStream) -> io::Result<()> {
        self.give([order, 0, 0, 0], token, &[stream.as_fd()], stream)
    }

    /// The same, with the part of the window where its lane is.
    fn pass_ring(&self, token: Token, stream: &UnixStream) -> io::Result<()> {
        let mut words = [[0; 8]; 2];
        read_by(stream, words.as_flattened_mut(), Instant::now() + SAY)?;
        let [offset, len] = words.map(u64::from_ne_bytes);
        let window = self.window.as_ref().and_then(|window| window.for_part(offset, len, token));
        let window = window.ok_or(io::ErrorKind::InvalidData)?;
        self.give([control::RING, 0, len, offset], token, &[window, stream.as_fd()], stream)
    }

    /// Gives an order to a session's worker, and tells a program what was answered.
    fn give(
        &self,
        order: Order,
        token: Token,
        files: &[BorrowedFd<'_>],
        mut stream: &UnixStream,
    ) -> io::Result<()> {
        let worker = locked(&self.sessions).get(&token).cloned().ok_or(io::ErrorKind::NotFound)?;
        let answer = {
            let worker = locked(&worker);
            orders::give(&worker, order, &[], files).inspect_err(|_| {
                // Nobody knows what the next answer would be of. It may have ended already.
                let _ = worker.shutdown(Shutdown::Both);
            })?
        };
        stream.write_all(&answer.to_ne_bytes())
    }

    /// Serves a session, from its worker's start to that's end.
    fn session(&self, mut stream: &UnixStream) -> io::Result<()> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(ANSWER))?;
        let token: Token = random()?;
        let hears = ours.try_clone()?;
        let worker = Arc::new(Mutex::new(ours));
        {
            let mut sessions = locked(&self.sessions);
            if sessions.len() >= PROGRAMS {
                tracing::warn!("a CUDA program is refused: there are {PROGRAMS} already");
                return stream.write_all(&u64::from(code::NO_DEVICE).to_ne_bytes());
            }
            sessions.insert(token, worker.clone());
        }
        let result = self.workers.start(theirs.into()).map(|(process, messages)| {
            let served = stream
                .write_all(&[&0u64.to_ne_bytes()[..], &token].concat())
                .and_then(|()| self.orders(stream, token, &worker, &hears));
            if let Some(window) = &self.window {
                window.ends();
            }
            let mut last = [0; 8];
            if let Ok((8, _)) = recv(&hears, &mut last[..], RecvFlags::DONTWAIT) {
                // It has said why it ends.
                let _ = stream.write_all(&last);
            }
            // With its connection the worker ends, and with that the connections which it has.
            let _ = hears.shutdown(Shutdown::Both);
            if !process.ends_within(Some(END)).unwrap_or(false) {
                let _ = process.kill();
            }
            let ended = end_of(&process);
            if let Some(window) = &self.window {
                window.forget(token);
            }
            messages.wait();
            tracing::debug!(worker = process.id(), ?ended, ?served, "a CUDA program has ended");
        });
        locked(&self.sessions).remove(&token);
        // It may have been closed.
        let _ = stream.shutdown(Shutdown::Both);
        result.inspect_err(
            |error| tracing::error!(%error, "a worker can't be started; see `ulimit -n` and `ulimit -u`"),
        )
    }

    /// Passes a session's orders on, until the program or its worker has gone.
    fn orders(
        &self,
        mut stream: &UnixStream,
        token: Token,
        worker: &Mutex<UnixStream>,
        hears: &UnixStream,
    ) -> io::Result<()> {
        while wants(stream, hears)? {
            let mut bytes = [0; control::SIZE];
            let until = Instant::now() + SAY;
            read_by(stream, &mut bytes, until)?;
            let mut order: Order = [0; control::WORDS];
            for (word, bytes) in order.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_ne_bytes(*bytes);
            }
            let mut more = Vec::new();
            let window = match (order, &self.window) {
                ([control::HELLO | control::FACTS | control::MEMORY, ..], _) => None,
                ([control::VARIABLE, _, len, _] | [control::NVML, len, ..], _)
                    if len <= longest(order[0]) =>
                {
                    more.resize(len as usize, 0);
                    read_by(stream, &mut more, until)?;
                    None
                }
                ([control::TAKE | control::GIVE, ..], window) => {
                    let answer = own_order(order, window.as_ref(), token)?;
                    let words: Vec<_> = answer.into_iter().map(u64::to_ne_bytes).collect();
                    stream.write_all(words.as_flattened())?;
                    continue;
                }
                ([control::WINDOW, _, len, offset], Some(window)) => {
                    Some(window.for_part(offset, len, token).ok_or(io::ErrorKind::InvalidData)?)
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            };
            let answer = {
                let worker = locked(worker);
                let answer = orders::give(&worker, order, &more, window.as_slice())?;
                let mut bytes = answer.to_ne_bytes().to_vec();
                if answer == 0 {
                    pass_answer(order[0], &worker, &mut bytes)?;
                }
                bytes
            };
            stream.write_all(&answer)?;
        }
        Ok(())
    }
}

/// The most bytes that follow an order.
fn longest(order: u64) -> u64 {
    if order == control::NVML { nvml::MOST as u64 } else { control::VALUE as u64 }
}

/// Takes what a worker answers an order with, behind its result.
fn pass_answer(order: u64, mut worker: &UnixStream, to: &mut Vec<u8>) -> io::Result<()> {
    let from = to.len();
    let mut more = |len: usize| {
        let at = to.len();
        to.resize(at + len, 0);
        worker.read_exact(&mut to[at..])
    };
    match order {
        control::MEMORY => more(8 * control::MEMORY_WORDS),
        control::FACTS | control::NVML => {
            more(8)?;
            let most = if order == control::FACTS { facts::MOST } else { nvml::MOST };
            let len = to[from..].first_chunk().map_or(u64::MAX, |word| u64::from_ne_bytes(*word));
            let len = usize::try_from(len).ok().filter(|len| *len <= most && len.is_multiple_of(8));
            let at = to.len();
            to.resize(at + len.ok_or(io::ErrorKind::InvalidData)?, 0);
            worker.read_exact(&mut to[at..])
        }
        _ => Ok(()),
    }
}

/// What is answered to an order that is not the worker's.
fn own_order(order: Order, window: Option<&Window>, token: Token) -> io::Result<Vec<u64>> {
    let Some(window) = window else { return Ok(vec![code::NOT_SUPPORTED.into()]) };
    let [control::TAKE, len, is_lane, _] = order else {
        let had = window.give(order[1], token);
        return Ok(vec![if had { 0 } else { code::INVALID_VALUE.into() }]);
    };
    let mark = u64::from_ne_bytes(random()?);
    match window.take(len, token, is_lane == 1, mark) {
        Ok(Some(start)) => Ok(vec![0, start, mark]),
        Ok(None) => Ok(vec![code::OUT_OF_MEMORY.into()]),
        Err(error) => {
            tracing::warn!(%error, "the window has no memory");
            Ok(vec![code::OUT_OF_MEMORY.into()])
        }
    }
}

/// Waits until there is an order: no when the worker has gone.
fn wants(stream: &UnixStream, worker: &UnixStream) -> io::Result<bool> {
    loop {
        // What the worker says is read when it was given an order: only its end is seen here.
        let mut fds =
            [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP), PollFd::new(worker, PollFlags::RDHUP)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) if !fds[1].revents().is_empty() => return Ok(false),
            Ok(_) => return Ok(true),
        }
    }
}

/// Fills `to` before a time.
fn read_by(mut stream: &UnixStream, to: &mut [u8], until: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut to[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    // A lane is read for as long as its program lives.
    stream.set_read_timeout(None)
}
