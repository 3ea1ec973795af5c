//! The guest's side of its control socket: one thread, which never waits for a client.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::Serialize;
use serde_json::Value;

use super::lines::Lines;
use super::wire::{self, Message, Outcome, Request, VERSION};
use crate::api::{AttachRequest, DetachRequest, GuestEvent, GuestStatus, Refusal, RefusalCode};
use crate::deadlines::{CONTROL_CLIENT, CONTROL_END};

/// Most connections. Where one more comes, the one that has asked for nothing the longest is closed.
const MAX_CONNECTIONS: usize = 16;
/// Most requests that are not answered yet.
const MAX_IN_FLIGHT: usize = 64;
/// Most bytes that wait for a client to read them.
const MAX_OUTPUT: usize = 256 << 10;
/// How long no connection is accepted where this process has no descriptors left.
const NO_DESCRIPTORS: Duration = Duration::from_secs(1);

/// What can be asked of a guest. Nothing here may wait: what takes time is answered when it is done, from any thread.
pub(crate) trait Controlled: Send + Sync {
    /// How it is.
    fn status(&self) -> GuestStatus;
    /// Presses its power button.
    fn power_button(&self);
    /// Ends it, as if its power were cut.
    fn stop(&self);
    /// Resets its machine.
    fn reset(&self, answer: Answer);
    /// Gives it a device.
    fn attach(&self, request: AttachRequest, answer: Answer);
    /// Takes a device from it.
    fn detach(&self, request: DetachRequest, answer: Answer);
}

/// What goes to the thread that serves the socket.
#[derive(Clone, Debug)]
pub(crate) struct Outbox(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    posts: Mutex<Vec<Post>>,
    wake: OwnedFd,
}

#[derive(Debug)]
enum Post {
    Answer { connection: u64, id: u64, result: Result<Value, Refusal> },
    Event(GuestEvent),
    End,
}

impl Outbox {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Queue { posts: Mutex::default(), wake })))
    }

    /// Tells all who have subscribed what happened.
    pub(crate) fn event(&self, event: GuestEvent) {
        self.post(Post::Event(event));
    }

    fn post(&self, post: Post) {
        self.0.posts.lock().unwrap_or_else(PoisonError::into_inner).push(post);
        // It fails only when the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Post> {
        // Only the serving thread reads it; it is empty when nobody wrote.
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8]);
        std::mem::take(&mut self.0.posts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Where the answer to a request goes. One that is dropped says that the guest ended first.
#[derive(Debug)]
pub(crate) struct Answer {
    to: Outbox,
    connection: u64,
    id: u64,
    is_sent: bool,
}

impl Answer {
    /// Sends what came of the request.
    pub(crate) fn send(mut self, result: Result<impl Serialize, Refusal>) {
        let result = result.and_then(|value| serde_json::to_value(value).map_err(Refusal::failed));
        self.is_sent = true;
        self.to.post(Post::Answer { connection: self.connection, id: self.id, result });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_sent {
            let result = Err(Refusal::new(RefusalCode::Failed, "the guest ended before that was done"));
            self.to.post(Post::Answer { connection: self.connection, id: self.id, result });
        }
    }
}

/// Serves a guest's control socket while it lives.
#[derive(Debug)]
pub(crate) struct Server {
    outbox: Outbox,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `listener` with what `guest` makes of an outbox, and `first`, a connection that has subscribed.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub(crate) fn start<G: Controlled + 'static>(
        listener: UnixListener,
        first: Option<UnixStream>,
        guest: impl FnOnce(Outbox) -> Arc<G>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let outbox = Outbox::new()?;
        let guest = guest(outbox.clone());
        first.as_ref().map_or(Ok(()), |first| first.set_nonblocking(true))?;
        let first = first.map(|stream| Connection { is_subscribed: true, ..Connection::new(stream) });
        let mut serving = Serving {
            listener,
            guest,
            outbox: outbox.clone(),
            connections: first.map(|first| (0, first)).into_iter().collect(),
            next: 0,
            accepting_from: Instant::now(),
            end: None,
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || serving.serve())?;
        Ok(Self { outbox, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.outbox.post(Post::End);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that serves the guest's control socket panicked");
        }
    }
}

/// What the thread has.
struct Serving<G> {
    listener: UnixListener,
    guest: Arc<G>,
    outbox: Outbox,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    accepting_from: Instant,
    /// Until when clients may take what they are still to be told.
    end: Option<Instant>,
}

struct Connection {
    stream: UnixStream,
    input: Lines,
    output: Vec<u8>,
    is_subscribed: bool,
    in_flight: usize,
    /// When it last asked for something.
    asked: Instant,
    /// Since when it has been in the middle of a line, or does not read.
    stalled: Option<Instant>,
    is_over: bool,
}

impl<G: Controlled> Serving<G> {
    fn serve(&mut self) {
        loop {
            for post in self.outbox.take() {
                self.deliver(post);
            }
            let now = Instant::now();
            self.connections.retain(|_, connection| connection.goes_on(now));
            let is_told = self.connections.values().all(|connection| connection.output.is_empty());
            if self.end.is_some_and(|end| is_told || now >= end) {
                return;
            }
            if let Err(error) = self.wait(now) {
                tracing::error!(%error, "the guest's control socket can't be served any more");
                return;
            }
        }
    }

    fn deliver(&mut self, post: Post) {
        match post {
            Post::Answer { connection, id, result } => {
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.in_flight = connection.in_flight.saturating_sub(1);
                    let answer = result.map_or_else(Outcome::Error, Outcome::Ok);
                    connection.send(&Message::Answer { id, answer });
                }
            }
            Post::Event(event) => {
                let message = Message::Event { event };
                let subscribed = self.connections.values_mut().filter(|connection| connection.is_subscribed);
                subscribed.for_each(|connection| connection.send(&message));
            }
            Post::End => self.end = Some(Instant::now() + CONTROL_END),
        }
    }

    /// Waits until there is something to do, and reads what came.
    fn wait(&mut self, now: Instant) -> io::Result<()> {
        let deadlines = self.connections.values().filter_map(|connection| connection.stalled);
        let deadlines = deadlines.map(|since| since + CONTROL_CLIENT).chain(self.end);
        let is_accepting = self.end.is_none() && now >= self.accepting_from;
        let deadlines = deadlines.chain((!is_accepting && self.end.is_none()).then_some(self.accepting_from));
        let timeout = deadlines.min().map(|at| {
            let left = at.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let mut files = vec![PollFd::new(&self.outbox.0.wake, PollFlags::IN)];
        for connection in self.connections.values() {
            let wanted =
                if connection.output.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            files.push(PollFd::new(&connection.stream, wanted));
        }
        if is_accepting {
            files.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        match poll(&mut files, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            polled => polled?,
        };
        let ready: Vec<bool> = files.iter().skip(1).map(|file| !file.revents().is_empty()).collect();
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for (id, _) in ids.iter().zip(&ready).filter(|(_, ready)| **ready) {
            self.read(*id);
        }
        if is_accepting && ready.last() == Some(&true) {
            self.accept();
        }
        Ok(())
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                    tracing::warn!("the guest's control socket takes no connection for a while: {error}");
                    self.accepting_from = Instant::now() + NO_DESCRIPTORS;
                }
                return;
            }
        };
        if !super::is_trusted(&stream) || stream.set_nonblocking(true).is_err() {
            return;
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            let idle = self.connections.iter().filter(|(_, one)| !one.is_subscribed && one.in_flight == 0);
            let idle = idle.min_by_key(|(_, one)| one.asked).map(|(&id, _)| id);
            match idle.and_then(|id| self.connections.remove(&id)) {
                Some(mut evicted) => evicted.send_busy(),
                None => return Connection::new(stream).send_busy(),
            }
        }
        self.next += 1;
        self.connections.insert(self.next, Connection::new(stream));
    }

    /// Reads what a client sent, and does it.
    fn read(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mut bytes = [0; 4096];
        match connection.stream.read(&mut bytes) {
            Ok(0) => connection.is_over = true,
            Ok(read) => connection.input.push(&bytes[..read]),
            Err(error) if is_later(&error) => {}
            Err(_) => connection.is_over = true,
        }
        while let Some(line) =
            self.connections.get_mut(&id).and_then(|connection| connection.input.next_line())
        {
            match line {
                Ok(line) => self.take(id, &line),
                Err(_) => {
                    self.refuse(id, 0, "a line is longer than 64 KiB");
                    break;
                }
            }
        }
    }

    /// Answers that a connection is used wrongly, and closes it.
    fn refuse(&mut self, id: u64, request: u64, message: &str) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let answer = Outcome::Error(Refusal::new(RefusalCode::Invalid, message));
            connection.send(&Message::Answer { id: request, answer });
            connection.goes_on(Instant::now());
            connection.is_over = true;
        }
    }

    fn take(&mut self, connection: u64, line: &[u8]) {
        let in_flight: usize = self.connections.values().map(|connection| connection.in_flight).sum();
        let Some(from) = self.connections.get_mut(&connection) else { return };
        if from.is_over {
            return;
        }
        from.asked = Instant::now();
        from.in_flight += 1;
        let (id, request) = match wire::parse(line) {
            Ok((id, request)) => (id, Ok(request)),
            Err((id, refusal)) => (id, Err(refusal)),
        };
        let answer = Answer { to: self.outbox.clone(), connection, id, is_sent: false };
        let request = match request {
            Ok(_) if in_flight >= MAX_IN_FLIGHT => {
                let busy = "the guest has 64 requests to answer already; ask again later";
                return answer.send(Err::<(), _>(Refusal::new(RefusalCode::Conflict, busy)));
            }
            Ok(request) => request,
            Err(refusal) => return answer.send(Err::<(), _>(refusal)),
        };
        match request {
            Request::Hello { versions } if !versions.contains(&VERSION) => {
                let message =
                    format!("this guest speaks version {VERSION}, and the client speaks {versions:?}");
                answer.send(Err::<(), _>(Refusal::new(RefusalCode::Conflict, message)));
            }
            Request::Hello { .. } => answer.send(Ok(serde_json::json!({ "version": VERSION }))),
            Request::Status => answer.send(Ok(self.guest.status())),
            Request::Subscribe => {
                from.is_subscribed = true;
                answer.send(Ok(self.guest.status()));
            }
            Request::PowerButton => {
                self.guest.power_button();
                answer.send(Ok(()));
            }
            Request::Stop => {
                self.guest.stop();
                answer.send(Ok(()));
            }
            Request::Reset => self.guest.reset(answer),
            Request::Attach(request) => self.guest.attach(request, answer),
            Request::Detach(request) => self.guest.detach(request, answer),
        }
    }
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            input: Lines::new(wire::MAX_LINE),
            output: Vec::new(),
            is_subscribed: false,
            in_flight: 0,
            asked: Instant::now(),
            stalled: None,
            is_over: false,
        }
    }

    /// Sends a message as soon as the client reads. One who leaves too many is dropped.
    fn send(&mut self, message: &Message) {
        match serde_json::to_vec(message) {
            Ok(line) if self.output.len() + line.len() < MAX_OUTPUT => {
                self.output.extend(line);
                self.output.push(b'\n');
            }
            Ok(_) => self.is_over = true,
            Err(error) => tracing::error!(%error, "a message can't be written"),
        }
    }

    /// Tells the client, which is about to be disconnected, that the guest serves as many as it can.
    fn send_busy(&mut self) {
        let busy = format!("the guest serves {MAX_CONNECTIONS} connections already; try again later");
        let answer = Outcome::Error(Refusal::new(RefusalCode::Busy, busy));
        self.send(&Message::Answer { id: 0, answer });
        self.goes_on(Instant::now());
    }

    /// Writes what the client takes now, and answers whether it is still served.
    fn goes_on(&mut self, now: Instant) -> bool {
        let mut is_moving = false;
        while !self.output.is_empty() && !self.is_over {
            match self.stream.write(&self.output) {
                Ok(written) if written > 0 => {
                    self.output.drain(..written);
                    is_moving = true;
                }
                Err(error) if is_later(&error) => break,
                _ => self.is_over = true,
            }
        }
        let is_stalled = self.input.has_begun() || !self.output.is_empty();
        self.stalled = self.stalled.filter(|_| is_stalled && !is_moving).or(is_stalled.then_some(now));
        !self.is_over && self.stalled.is_none_or(|since| now < since + CONTROL_CLIENT)
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests;
