//! Sessions of programs whose connections carry no files: of guests and of other machines.
//!
//! Such a program has a connection for its session, and one more for each lane. Each begins with a [`Preamble`], which is all that is read of it here
//! but for the session's orders, a few words each. Who starts a session is given a token, and connections with that token go to its worker.
//!
//! The gateway decides which part of the window is whose. A worker gets a part only in an order that is given while its session has that part, and a part is
//! free again only when the worker has confirmed that it maps nothing of it, or has exited.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};
use vm_bridge::orders::{self, Order};
use vm_bridge::wire::preamble::{self, Preamble, Token, random};
use vm_bridge::wire::{code, control, facts, nvml};

use super::capacity::{Amount, Capacity, Peer};
use super::waiting::{Entered, SAY, WAITING, Waiting};
use super::window::{Challenge, Window};
use super::workers::Workers;
use crate::os::process::end_of;

/// The most connections of a session that its worker doesn't have yet. Programs open one at a time.
const OPENING: usize = 8;
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
    capacity: Capacity,
    waiting: Waiting,
    sessions: Mutex<HashMap<Token, Arc<Running>>>,
}

/// A session that runs.
#[derive(Debug)]
struct Running {
    /// The connection to its worker. Whoever has locked it also decides which parts of the window the worker may map, and which are free again.
    worker: Mutex<UnixStream>,
    /// Connections that the worker doesn't have yet.
    opening: AtomicUsize,
}

/// One of these connections, until this is dropped.
struct Opening(Arc<Running>);

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.opening.fetch_sub(1, Ordering::SeqCst);
    }
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gateway {
    pub(super) fn new(workers: Arc<Workers>, capacity: Capacity, window: Option<Window>) -> Self {
        let waiting = Waiting::new(WAITING);
        Self(Arc::new(Inner { workers, window, capacity, waiting, sessions: Mutex::default() }))
    }

    /// Serves a connection of a peer on a thread. Waits while too many connections have not shown yet what they are.
    pub(super) fn accept(&self, connection: OwnedFd, peer: Peer) {
        let stream = Arc::new(UnixStream::from(connection));
        let entered = self.0.waiting.enter(stream.clone(), peer.clone());
        let this = self.clone();
        let serve = move || {
            if let Err(error) = this.0.serve(entered, &stream, &peer) {
                tracing::debug!(%error, "a connection of a CUDA program is closed");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("program".into()).spawn(serve) {
            tracing::error!(%error, "a CUDA program can't be served: no thread can be started");
        }
    }
}

impl Inner {
    fn serve(&self, mut entered: Entered, stream: &UnixStream, peer: &Peer) -> io::Result<()> {
        let mut bytes = [0; preamble::SIZE];
        entered.read(&mut bytes)?;
        let (order, token) = match Preamble::from_bytes(bytes).map_err(io::Error::other)? {
            Preamble::Session => {
                entered.know();
                return self.session(stream, peer);
            }
            Preamble::Lane(token) => (control::LANE, token),
            Preamble::Callbacks(token) => (control::CALLBACKS, token),
            Preamble::Ring(token) => (control::RING, token),
        };
        let opening = self.open(token)?;
        // From now on it counts for its session alone.
        drop(entered);
        self.pass(order, token, &opening.0, stream)
    }

    /// Adds a connection to those that a session's worker doesn't have yet.
    fn open(&self, token: Token) -> io::Result<Opening> {
        let session = locked(&self.sessions).get(&token).cloned().ok_or(io::ErrorKind::NotFound)?;
        let before = session.opening.fetch_add(1, Ordering::SeqCst);
        let opening = Opening(session);
        if before < OPENING {
            Ok(opening)
        } else {
            Err(io::Error::other("the program opens too many at a time"))
        }
    }

    /// Hands a connection to its session's worker, one for a ring with its part of the window, and passes on what that answers.
    fn pass(&self, order: u64, token: Token, session: &Running, mut stream: &UnixStream) -> io::Result<()> {
        let mut words = [[0; 8]; 2];
        if order == control::RING {
            read_by(stream, words.as_flattened_mut(), Instant::now() + SAY)?;
        }
        let [offset, len] = words.map(u64::from_ne_bytes);
        let answer = {
            let worker = locked(&session.worker);
            let (order, window) = match &self.window {
                _ if order != control::RING => ([order, 0, 0, 0], None),
                window => {
                    let file = window.as_ref().and_then(|window| window.for_part(offset, len, token));
                    ([order, 0, len, offset], Some(file.ok_or(io::ErrorKind::InvalidData)?))
                }
            };
            let files: Vec<_> = window.into_iter().chain([stream.as_fd()]).collect();
            orders::give(&worker, order, &[], &files).inspect_err(|_| {
                // Nobody knows what the next answer would be of. It may have ended already.
                let _ = worker.shutdown(Shutdown::Both);
            })?
        };
        stream.write_all(&answer.to_ne_bytes())
    }

    /// Serves a session, from its worker's start to that's end.
    fn session(&self, mut stream: &UnixStream, peer: &Peer) -> io::Result<()> {
        let Some(reserved) = self.capacity.reserve(peer, Amount::SESSION) else {
            tracing::warn!(
                ?peer,
                "a CUDA program is refused: its peer has as many as it may, or the server has"
            );
            return stream.write_all(&u64::from(code::NO_DEVICE).to_ne_bytes());
        };
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(ANSWER))?;
        let token: Token = random()?;
        let hears = ours.try_clone()?;
        let worker = Arc::new(Running { worker: Mutex::new(ours), opening: AtomicUsize::new(0) });
        locked(&self.sessions).insert(token, worker.clone());
        let reserved = Arc::new(reserved);
        let result = self.workers.start(theirs.into(), Some(reserved.clone())).map(|(process, messages)| {
            let served = stream
                .write_all(&[&0u64.to_ne_bytes()[..], &token].concat())
                .and_then(|()| self.orders(stream, token, &worker.worker, &hears));
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
            let mut ended = end_of(&process);
            if ended.is_none() {
                tracing::warn!(
                    worker = process.id(),
                    "a killed worker has not ended yet; its parts of the window stay in use"
                );
                ended = process.wait().map(|status| status.to_string()).ok();
            }
            if let Some(window) = &self.window {
                window.forget(token, ended.is_some());
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
        let mut access = Access::default();
        while wants(stream, hears)? {
            let mut bytes = [0; control::SIZE];
            let until = Instant::now() + SAY;
            read_by(stream, &mut bytes, until)?;
            let mut order: Order = [0; control::WORDS];
            for (word, bytes) in order.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_ne_bytes(*bytes);
            }
            let mut more = Vec::new();
            if let ([control::TAKE | control::CHALLENGE | control::PROVE, ..], window)
            | ([control::GIVE, ..], window @ None) = (order, &self.window)
            {
                let answer = own_order(order, window.as_ref(), token, &mut access);
                let words: Vec<_> = answer.into_iter().map(u64::to_ne_bytes).collect();
                stream.write_all(words.as_flattened())?;
                continue;
            }
            if let [control::VARIABLE, _, len, _] | [control::NVML, len, ..] = order
                && len <= longest(order[0])
            {
                more.resize(len as usize, 0);
                read_by(stream, &mut more, until)?;
            }
            let worker = locked(worker);
            let mut frees = None;
            let window = match (order, &self.window) {
                ([control::HELLO | control::FACTS | control::MEMORY, ..], _) => None,
                ([control::VARIABLE, _, len, _] | [control::NVML, len, ..], _)
                    if len == more.len() as u64 =>
                {
                    None
                }
                ([control::GIVE, start, ..], Some(window)) => {
                    let Some(len) = window.len_of(start, token) else {
                        stream.write_all(&u64::from(code::INVALID_VALUE).to_ne_bytes())?;
                        continue;
                    };
                    order = [control::GIVE, start, len, 0];
                    frees = Some((window, start));
                    None
                }
                ([control::WINDOW, _, len, offset], Some(window)) => {
                    Some(window.for_part(offset, len, token).ok_or(io::ErrorKind::InvalidData)?)
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            };
            let answer = orders::give(&worker, order, &more, window.as_slice())?;
            let mut bytes = answer.to_ne_bytes().to_vec();
            if answer == 0 {
                pass_answer(order[0], &worker, &mut bytes)?;
                if let Some((window, start)) = frees {
                    // The worker has confirmed that it maps nothing of it.
                    window.give(start, token);
                }
            }
            drop(worker);
            stream.write_all(&bytes)?;
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

/// Whether a session's program has proven that it maps the window.
#[derive(Default)]
struct Access<'a> {
    challenge: Option<Challenge<'a>>,
    is_proven: bool,
}

/// What is answered to an order that is not the worker's.
fn own_order<'a>(
    order: Order,
    window: Option<&'a Window>,
    token: Token,
    access: &mut Access<'a>,
) -> Vec<u64> {
    let Some(window) = window else { return vec![code::NOT_SUPPORTED.into()] };
    let failed = |error: io::Error| {
        tracing::warn!(%error, "the window has no memory");
        vec![code::OUT_OF_MEMORY.into()]
    };
    match order {
        [control::CHALLENGE, ..] => {
            access.challenge = None;
            match window.challenge() {
                Ok(Some(challenge)) => vec![0, access.challenge.insert(challenge).offset()],
                Ok(None) => vec![code::OUT_OF_MEMORY.into()],
                Err(error) => failed(error),
            }
        }
        [control::PROVE, first, second, _] => {
            let challenge = access.challenge.take();
            access.is_proven |= challenge.is_some_and(|challenge| challenge.is_answer([first, second]));
            vec![if access.is_proven { 0 } else { code::INVALID_VALUE.into() }]
        }
        [_, len, is_lane, _] if access.is_proven => {
            match random()
                .map(u64::from_ne_bytes)
                .and_then(|mark| Ok((mark, window.take(len, token, is_lane == 1, mark)?)))
            {
                Ok((mark, Some(start))) => vec![0, start, mark],
                Ok((_, None)) => vec![code::OUT_OF_MEMORY.into()],
                Err(error) => failed(error),
            }
        }
        _ => vec![code::NOT_PERMITTED.into()],
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
