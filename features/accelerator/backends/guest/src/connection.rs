//! The connection to the host that all queues of an accelerator share.
//!
//! ```text
//! queues ──▶ gathered ──(nothing is under way, a wait, or it is full)──▶ host
//!    ▲                                                                   │
//!    └──── reached, failed ◀── whoever waits, or the thread ◀── replies ◀┘
//! ```
//!
//! Who waits reads replies himself for a while, as they come soon as a rule. The thread reads those that nobody else does, as long as
//! something depends on them: operations that were gathered, an event's time, somebody who sleeps.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use vm_accel::{Error, Result};
use vm_paravirt_guest::linux::{Part, Stream, Window};
use vm_paravirt_guest::protocol::{BatchWriter, LogReader, NoRoom, Reply, Status};
use vm_paravirt_guest::{Frame, Transport as _};

use crate::address::Numbers;
use crate::error::{self, Limits};

/// Batches that may be under way. The host takes as many, and answers most of them at once.
const UNDER_WAY: usize = 64;
/// How long who waits reads replies himself: to sleep and be woken takes longer than a short kernel.
const EAGER: Duration = Duration::from_micros(200);
/// The most bytes of a batch that goes in a frame as the stream makes them.
const SMALL: usize = 64 << 10;
/// How long the thread sleeps at most, should it not be woken.
const NAP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The connection. Dropping it ends it, and the host releases what came over it.
#[derive(Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the connection's users, its thread, and events have of it.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// For who waits: a reply was read.
    changed: Condvar,
    /// For the thread: something depends on it.
    needed: Condvar,
    socket: OwnedFd,
    window: Window,
    limits: Limits,
}

#[derive(Debug)]
struct State {
    stream: Stream,
    /// Operations that were not sent, and the bytes of their batch.
    gathered: Option<(Frame<Vec<u8>>, usize)>,
    spare: Vec<Frame<Vec<u8>>>,
    under_way: HashMap<u16, Sent>,
    /// Replies that somebody waits for by name.
    answers: HashMap<u16, Frame<Vec<u8>>>,
    /// Operations so far; those before the last fence that was given; those that the host is known to have done.
    given: u64,
    fenced: u64,
    reached: u64,
    /// Events with a time, and what they come behind.
    stamps: Vec<(u64, Arc<OnceLock<Instant>>)>,
    /// To be unparked when the host answers.
    threads: Vec<Thread>,
    /// Whether the last wait ended while it was polled for.
    eager: bool,
    users: HashMap<u64, User>,
    next_user: u64,
    /// What failed and is being asked about.
    asked: Option<Failure>,
    lost: Option<Error>,
    sleepers: usize,
    closing: bool,
    numbers: Numbers,
    next_module: u32,
    parts: BTreeMap<u64, Imported>,
    limits: Limits,
}

/// Who gives operations, and is told what fails.
#[derive(Debug, Default)]
struct User {
    last: u64,
    failed: Option<Error>,
}

/// A batch that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// Nobody waits for it.
    Gathered,
    /// It ends with a fence behind so many operations.
    Fence(u64),
    /// Somebody waits for its reply.
    Call,
    /// It asks for the words to a failure.
    Log,
}

/// A failure whose words are not known yet.
#[derive(Debug)]
struct Failure {
    status: Status,
    at_fence: bool,
    users: Vec<u64>,
}

/// A part of the window that the host has as a buffer.
#[derive(Debug)]
struct Imported {
    buffer: u32,
    part: Part,
}

/// What became of a call: how its first operation that failed ended, with the host's words.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: Status,
    pub(crate) words: String,
}

impl Refused {
    /// The error, where there is no better word for it.
    pub(crate) fn error(&self, limits: Limits) -> Error {
        error::of(self.status, false, &self.words, limits)
    }
}

/// An operation, or some, as a batch has them.
pub(crate) type Fill<'a> = &'a dyn Fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>;

impl Connection {
    /// Over a stream whose device has this window.
    pub(crate) fn open(stream: Stream, window: Window, limits: Limits) -> Result<Self> {
        let failed = |what| move |error: std::io::Error| Error::Host { what, cause: error.to_string() };
        let socket = stream.as_fd().try_clone_to_owned().map_err(failed("sharing a stream"))?;
        let state = State {
            stream,
            gathered: None,
            spare: Vec::new(),
            under_way: HashMap::new(),
            answers: HashMap::new(),
            given: 0,
            fenced: 0,
            reached: 0,
            stamps: Vec::new(),
            threads: Vec::new(),
            eager: true,
            users: HashMap::new(),
            next_user: 0,
            asked: None,
            lost: None,
            sleepers: 0,
            closing: false,
            numbers: Numbers::default(),
            next_module: 0,
            parts: BTreeMap::new(),
            limits,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            needed: Condvar::new(),
            socket,
            window,
            limits,
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("vm-guest replies".into())
            .spawn(move || theirs.read_replies())
            .map_err(failed("starting a thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.needed.notify_all();
        // It fails where the host was faster.
        let _ = shutdown(&self.shared.socket, Shutdown::Both);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that reads replies panicked");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new user.
    pub(crate) fn join(&self) -> u64 {
        let mut state = self.lock();
        let user = state.next_user;
        state.next_user += 1;
        let last = state.given;
        state.users.insert(user, User { last, failed: None });
        user
    }

    /// A user who gives nothing any more.
    pub(crate) fn leave(&self, user: u64) {
        self.lock().users.remove(&user);
    }

    /// Whether it can be used.
    pub(crate) fn check(&self) -> Result<()> {
        self.lock().check()
    }

    /// What the host allows a launch.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// How many operations the host is known to have done.
    pub(crate) fn reached(&self) -> u64 {
        self.lock().reached
    }

    /// How many operations were given so far.
    pub(crate) fn position(&self) -> u64 {
        self.lock().given
    }

    /// Gives operations, which nobody waits for.
    pub(crate) fn give(&self, user: u64, operations: &mut dyn Iterator<Item = Fill<'_>>) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        for operation in operations {
            state.push(operation)?;
        }
        let given = state.given;
        state.users.entry(user).or_default().last = given;
        if state.under_way.is_empty() {
            state.flush(Sent::Gathered)?;
        } else {
            // It reads the reply that is awaited, and sends this.
            self.needed.notify_one();
        }
        Ok(())
    }

    /// Gives operations of up to `bytes` bytes as a batch of their own, and waits for what becomes of them. The reply is looked at
    /// where all ended well.
    pub(crate) fn call<T>(
        &self,
        deadline: Instant,
        bytes: usize,
        operations: Fill<'_>,
        look: impl FnOnce(Reply<'_>) -> Result<T>,
    ) -> Result<Result<T, Refused>> {
        let frame = self.exchange(deadline, bytes, operations)?;
        let reply = frame.reply().map_err(|error| self.lock().lose(error::lost(error)))?;
        let Err((_, status)) = reply.check() else {
            let found = look(reply)?;
            self.lock().reuse(frame);
            return Ok(Ok(found));
        };
        if status == Status::Lost {
            return Err(self.lock().lose(Error::Lost { cause: status.to_string() }));
        }
        let log = self.exchange(deadline, 0, &|batch| batch.log())?;
        Ok(Err(Refused { status, words: words(&log) }))
    }

    /// Sends a batch, and waits for its reply.
    fn exchange(&self, deadline: Instant, bytes: usize, operations: Fill<'_>) -> Result<Frame<Vec<u8>>> {
        let mut state = self.lock();
        state.check()?;
        state.flush(Sent::Gathered)?;
        let mut frame = match bytes > SMALL {
            true => Frame::new(vec![0; bytes + SMALL], vec![0; SMALL]),
            false => state.frame(),
        };
        let mut batch = frame.batch().map_err(error::host("writing a batch"))?;
        operations(&mut batch).map_err(|error| error::host("writing a batch")(error.into()))?;
        let (count, bytes) = (batch.len() as u64, batch.finish());
        state.given += count;
        let tag = state.send(frame, bytes, Sent::Call)?;
        drop(state);
        self.wait_for(deadline, |state| Ok(state.answers.remove(&tag)))
    }

    /// Whether the host has done all before `position`; if it is not known, it is asked.
    ///
    /// # Errors
    /// What failed for this user since it was told last.
    pub(crate) fn done(&self, user: Option<u64>, position: u64) -> Result<bool> {
        let mut state = self.lock();
        self.take(&mut state);
        state.done(user, position)
    }

    /// Has a thread unparked when the host is closer to having done all before `position`, or at once if it has: then
    /// [`done`](Self::done) is to be asked.
    pub(crate) fn notify(&self, position: u64, thread: &Thread) -> Result<()> {
        let mut state = self.lock();
        self.take(&mut state);
        if state.closing || state.lost.is_some() || state.reached >= position {
            thread.unpark();
            return Ok(());
        }
        if state.fenced < position {
            state.fence()?;
        }
        if state.threads.iter().all(|other| other.id() != thread.id()) {
            state.threads.push(thread.clone());
        }
        self.needed.notify_one();
        Ok(())
    }

    /// Waits until the host has done all before `position`.
    ///
    /// # Errors
    /// [`Error::Deadline`]; as [`done`](Self::done).
    pub(crate) fn wait(&self, user: Option<u64>, position: u64, deadline: Instant) -> Result<()> {
        self.wait_for(deadline, |state| Ok(state.done(user, position)?.then_some(())))
    }

    /// Asks for the time at which the host will have done all so far, and tells how much that is.
    pub(crate) fn stamp(&self, user: u64) -> Result<(u64, Arc<OnceLock<Instant>>)> {
        let mut state = self.lock();
        state.check()?;
        state.fence()?;
        let (position, stamp) = (state.fenced, Arc::new(OnceLock::new()));
        state.stamps.push((position, Arc::clone(&stamp)));
        state.users.entry(user).or_default().last = position;
        self.needed.notify_one();
        Ok((position, stamp))
    }

    /// A number that no buffer has.
    pub(crate) fn take_number(&self) -> u32 {
        self.lock().numbers.take()
    }

    pub(crate) fn give_number(&self, number: u32) {
        self.lock().numbers.give(number);
    }

    /// A number that no module has: there are never as many as there are numbers.
    pub(crate) fn module_number(&self) -> u32 {
        let mut state = self.lock();
        state.next_module = state.next_module.wrapping_add(1);
        state.next_module
    }

    /// Keeps a part of the window, which the host has as this buffer.
    pub(crate) fn keep(&self, buffer: u32, part: Part) {
        self.lock().parts.insert(part.offset(), Imported { buffer, part });
    }

    /// The part of the window that is mapped at `address`, which nobody finds any more, and its buffer.
    pub(crate) fn release(&self, address: u64) -> Option<(u32, Part)> {
        let offset = address.checked_sub(self.window.address())?;
        self.lock().parts.remove(&offset).map(|Imported { buffer, part }| (buffer, part))
    }

    /// The buffer that an address in the window belongs to, and where in it.
    pub(crate) fn find(&self, address: u64) -> Option<(u32, u64)> {
        let offset = address.checked_sub(self.window.address())?;
        let state = self.lock();
        let (start, imported) = state.parts.range(..=offset).next_back()?;
        // A view of nothing may lie behind the last byte.
        (offset - start <= imported.part.bytes()).then_some((imported.buffer, offset - start))
    }

    /// Takes the replies that are there.
    fn take(&self, state: &mut State) {
        if state.under_way.is_empty() {
            return;
        }
        if state.take() && state.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    fn wait_for<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<T> {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            self.take(&mut state);
            state.check()?;
            let found = ready(&mut state)?;
            let now = Instant::now();
            if let Some(found) = found {
                state.eager = now - begun < EAGER;
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(now);
            if left.is_zero() {
                return Err(Error::Deadline { what: "the host's answer".into() });
            }
            if state.eager && now - begun < EAGER {
                drop(state);
                // The Linux kernel may need the processor to receive something.
                std::thread::yield_now();
                state = self.lock();
                continue;
            }
            state.sleepers += 1;
            self.needed.notify_one();
            let woken = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            state.sleepers -= 1;
        }
    }

    /// What the thread does: it reads replies while something depends on them.
    fn read_replies(&self) {
        let mut state = self.lock();
        while !state.closing && state.lost.is_none() {
            if !state.needs_replies() {
                state = self.needed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            // What can't be waited for, reading reports.
            let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&NAP));
            state = self.lock();
            self.take(&mut state);
        }
        state.unpark();
        self.changed.notify_all();
    }
}

/// What the log in a reply says.
fn words(frame: &Frame<Vec<u8>>) -> String {
    let Some(Ok((_, answer))) = frame.reply().ok().and_then(|reply| reply.results().next()) else {
        return String::new();
    };
    LogReader::new(answer).flatten().map(|entry| entry.text).collect::<Vec<_>>().join("; ")
}

impl State {
    fn check(&self) -> Result<()> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn unpark(&mut self) {
        self.threads.drain(..).for_each(|thread| thread.unpark());
    }

    fn lose(&mut self, cause: Error) -> Error {
        self.unpark();
        self.lost.get_or_insert(cause).clone()
    }

    fn needs_replies(&self) -> bool {
        let gathered = self.gathered.is_some() && !self.under_way.is_empty();
        gathered || !self.stamps.is_empty() || !self.threads.is_empty() || self.sleepers > 0
    }

    /// Adds operations to those that were gathered, which are sent before if there is no room.
    fn push(&mut self, operations: Fill<'_>) -> Result<()> {
        for may_flush in [true, false] {
            let (mut frame, len) = self.gathered.take().unwrap_or_else(|| (self.frame(), 0));
            let mut batch = match len {
                0 => frame.batch(),
                len => frame.resume(len),
            }
            .map_err(error::host("gathering operations"))?;
            let before = batch.len();
            let added = operations(&mut batch);
            self.given += (batch.len() - before) as u64;
            let bytes = batch.seal();
            self.gathered = Some((frame, bytes));
            match added {
                Ok(()) => return Ok(()),
                // What there was no room for goes into the next.
                Err(_) if before > 0 && may_flush => drop(self.flush(Sent::Gathered)?),
                Err(error) => return Err(error::host("writing an operation")(error.into())),
            }
        }
        Ok(())
    }

    /// A frame in no use.
    fn frame(&mut self) -> Frame<Vec<u8>> {
        self.spare.pop().unwrap_or_else(|| self.stream.frame())
    }

    fn reuse(&mut self, mut frame: Frame<Vec<u8>>) {
        // Those for large modules are not kept.
        if frame.request().len() <= SMALL {
            self.spare.push(frame);
        }
    }

    /// Adds a fence behind all that was given, and sends it.
    fn fence(&mut self) -> Result<()> {
        self.push(&|batch| batch.fence())?;
        self.fenced = self.given;
        self.flush(Sent::Fence(self.fenced)).map(drop)
    }

    /// Sends what was gathered. Where as many batches are under way as may be, it waits for the oldest.
    fn flush(&mut self, how: Sent) -> Result<Option<u16>> {
        let Some((frame, bytes)) = self.gathered.take() else { return Ok(None) };
        self.send(frame, bytes, how).map(Some)
    }

    fn send(&mut self, frame: Frame<Vec<u8>>, bytes: usize, how: Sent) -> Result<u16> {
        while self.under_way.len() >= UNDER_WAY {
            match self.stream.wait() {
                Ok((tag, frame)) => self.completed(tag, frame),
                Err(error) => return Err(self.lose(error::lost(error))),
            }
        }
        match self.stream.submit(frame, bytes) {
            Ok(tag) => {
                self.under_way.insert(tag, how);
                Ok(tag)
            }
            Err((error, _)) => Err(self.lose(error::lost(error))),
        }
    }

    /// Takes the replies that are there, and sends what was gathered if nothing is under way then. Whether there were some.
    fn take(&mut self) -> bool {
        let mut some = false;
        while self.lost.is_none() {
            match self.stream.completed() {
                Ok(Some((tag, frame))) => self.completed(tag, frame),
                Ok(None) => break,
                Err(error) => drop(self.lose(error::lost(error))),
            }
            some = true;
        }
        if self.under_way.is_empty() && self.lost.is_none() {
            // A failure is kept for who comes next.
            let _ = self.flush(Sent::Gathered);
        }
        some
    }

    fn completed(&mut self, tag: u16, frame: Frame<Vec<u8>>) {
        let Some(sent) = self.under_way.remove(&tag) else { return };
        if sent == Sent::Call {
            self.answers.insert(tag, frame);
            return;
        }
        let reply = match frame.reply() {
            Ok(reply) => reply,
            Err(error) => return drop(self.lose(error::lost(error))),
        };
        let failed = reply.check().err();
        let last = reply.results().last();
        // A fence that was not begun tells nothing.
        let fenced = matches!(last, Some(Ok((status, _))) if status != Status::Skipped);
        if let Sent::Log = sent {
            let words = words(&frame);
            self.tell(&words);
        } else if let Some((operation, status)) = failed {
            let at_fence = matches!(sent, Sent::Fence(_)) && operation + 1 == reply.results().count();
            self.fail(status, at_fence);
        }
        if let Sent::Fence(position) = sent {
            if fenced {
                self.reached = self.reached.max(position);
                let (now, reached) = (Instant::now(), self.reached);
                self.stamps.retain(|(behind, stamp)| {
                    let waits = *behind > reached;
                    if !waits {
                        let _ = stamp.set(now);
                    }
                    waits
                });
            } else {
                // Another is sent by who still waits.
                self.fenced = self.reached;
            }
        }
        if matches!(sent, Sent::Fence(_) | Sent::Log) {
            self.unpark();
        }
        self.reuse(frame);
    }

    /// Something failed, of all who gave something since the host was last known to have done all.
    fn fail(&mut self, status: Status, at_fence: bool) {
        if status == Status::Lost {
            self.lose(Error::Lost { cause: status.to_string() });
            return;
        }
        let reached = self.reached;
        let users = self.users.iter().filter(|(_, user)| user.last > reached).map(|(number, _)| *number);
        let users: Vec<_> = users.collect();
        match &mut self.asked {
            // The same answer has the words to both.
            Some(failure) => failure.users.extend(users),
            none => {
                *none = Some(Failure { status, at_fence, users });
                // A frame of its own, as operations are gathered in the other.
                let mut frame = self.frame();
                let bytes = frame.batch().map_err(error::lost).and_then(|mut batch| {
                    batch.log().map_err(|error| error::lost(error.into()))?;
                    Ok(batch.finish())
                });
                match bytes {
                    Ok(bytes) => drop(self.send(frame, bytes, Sent::Log)),
                    Err(error) => drop(self.lose(error)),
                }
            }
        }
    }

    /// Tells a failure to those whose it is.
    fn tell(&mut self, words: &str) {
        let Some(Failure { status, at_fence, users }) = self.asked.take() else { return };
        let error = error::of(status, at_fence, words, self.limits);
        for user in users {
            if let Some(user) = self.users.get_mut(&user) {
                user.failed.get_or_insert_with(|| error.clone());
            }
        }
    }

    fn done(&mut self, user: Option<u64>, position: u64) -> Result<bool> {
        if self.closing {
            return Ok(true);
        }
        self.check()?;
        if self.reached < position {
            if self.fenced < position {
                self.fence()?;
            }
            return Ok(false);
        }
        let Some(number) = user else { return Ok(true) };
        if self.asked.as_ref().is_some_and(|failure| failure.users.contains(&number)) {
            return Ok(false);
        }
        self.users.get_mut(&number).and_then(|user| user.failed.take()).map_or(Ok(true), Err)
    }
}
