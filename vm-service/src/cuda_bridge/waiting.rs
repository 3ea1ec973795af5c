//! Connections that have not shown yet who they are.
//!
//! Their number is bounded. Where it is reached, a new connection replaces an older one, as refusing newcomers would let a few silent connections lock everyone
//! out. The oldest connection of the peer with the most is closed, where [`KNOWN`] connections of a peer that programs are served for don't count. A connection
//! that has sent something which was not read yet is never closed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use super::capacity::Peer;

/// The most such connections of a listener.
pub(super) const WAITING: usize = 64;
/// How long they have.
pub(super) const SAY: Duration = Duration::from_secs(10);
/// Connections of a peer whose programs are served that don't count: those programs open further lanes.
const KNOWN: usize = 8;
/// How long no connection is looked for that can be closed, when all have sent something.
const LOOK: Duration = Duration::from_millis(10);

/// A socket, which is closed for the thread that serves it when it has to make room.
pub(super) type Socket = Arc<dyn AsFd + Send + Sync>;

/// The connections.
#[derive(Clone)]
pub(super) struct Waiting(Arc<Inner>);

struct Inner {
    most: usize,
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: BTreeMap<u64, Entry>,
    /// How many connections of each peer have shown who they are.
    known: HashMap<Peer, usize>,
}

struct Entry {
    peer: Peer,
    socket: Socket,
    /// Its thread reads what has come.
    is_read: bool,
    is_closed: bool,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").field("waiting", &self.0.state().waiting.len()).finish()
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Inner { most, state: Mutex::default(), left: Condvar::new() }))
    }

    /// Adds a connection. Where there are too many, closes one and waits until its thread has dropped it, so that the number of threads is bounded too.
    pub(super) fn enter(&self, socket: Socket, peer: Peer) -> Entered {
        let mut state = self.0.state();
        while state.waiting.len() >= self.0.most {
            if !state.waiting.values().any(|entry| entry.is_closed) {
                state.close_one();
            }
            state = self.0.left.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        let number = state.next;
        state.next += 1;
        let entry = Entry { peer: peer.clone(), socket: socket.clone(), is_read: false, is_closed: false };
        state.waiting.insert(number, entry);
        drop(state);
        Entered { of: self.clone(), number, peer, socket, is_known: false }
    }
}

impl State {
    fn close_one(&mut self) {
        let mut counts = HashMap::<&Peer, usize>::new();
        self.waiting.values().for_each(|entry| *counts.entry(&entry.peer).or_default() += 1);
        let silent =
            self.waiting.iter().filter(|(_, entry)| !entry.is_read && !is_readable(entry.socket.as_fd()));
        let order = |(number, entry): &(&u64, &Entry)| {
            let count = counts.get(&entry.peer).copied().unwrap_or_default();
            let free = if self.known.contains_key(&entry.peer) { KNOWN } else { 0 };
            (Reverse(count.saturating_sub(free)), **number)
        };
        let Some(number) = silent.min_by_key(order).map(|(number, _)| *number) else { return };
        if let Some(entry) = self.waiting.get_mut(&number) {
            tracing::debug!(peer = ?entry.peer, "a connection that has shown nothing is closed: another needs its place");
            entry.is_closed = true;
            // The other side may have closed it.
            let _ = shutdown(entry.socket.as_fd(), Shutdown::Both);
        }
    }
}

/// Whether bytes have come, or the end.
fn is_readable(socket: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// A connection that was added, until this is dropped.
pub(super) struct Entered {
    of: Waiting,
    number: u64,
    peer: Peer,
    socket: Socket,
    is_known: bool,
}

impl Entered {
    /// Waits for the first bytes and leaves them in the socket. From then on the connection is not closed to make room.
    ///
    /// # Errors
    /// When none arrive in time, the peer closes the connection, or the connection has to make room.
    pub(super) fn await_bytes(&self) -> io::Result<()> {
        self.receive(&mut [0], RecvFlags::PEEK)
    }

    fn await_until(&self, until: Instant) -> io::Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)], Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Fills `to`. Once the last byte has come the connection is not closed any more to make room.
    ///
    /// # Errors
    /// When not all of it comes in time, or the connection has to make room.
    pub(super) fn read(&self, to: &mut [u8]) -> io::Result<()> {
        self.receive(to, RecvFlags::empty())
    }

    fn receive(&self, to: &mut [u8], flags: RecvFlags) -> io::Result<()> {
        let until = Instant::now() + SAY;
        let mut done = 0;
        while done < to.len() {
            self.await_until(until)?;
            self.set_read(true)?;
            match recv(self.socket.as_fd(), &mut to[done..], flags | RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((len, _)) => done += len,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if done < to.len() {
                self.set_read(false)?;
            }
        }
        Ok(())
    }

    fn set_read(&self, is_read: bool) -> io::Result<()> {
        let mut state = self.of.0.state();
        let entry = state.waiting.get_mut(&self.number).filter(|entry| !entry.is_closed);
        entry.ok_or(io::ErrorKind::ConnectionAborted)?.is_read = is_read;
        Ok(())
    }

    /// The connection has shown who it is: it waits no more, and its peer's other connections are closed last as long as this is there.
    pub(super) fn know(&mut self) {
        let mut state = self.of.0.state();
        if !std::mem::replace(&mut self.is_known, true) {
            state.waiting.remove(&self.number);
            *state.known.entry(self.peer.clone()).or_default() += 1;
            self.of.0.left.notify_all();
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut state = self.of.0.state();
        if self.is_known {
            if let Some(known) = state.known.get_mut(&self.peer) {
                *known -= 1;
                if *known == 0 {
                    state.known.remove(&self.peer);
                }
            }
        } else {
            state.waiting.remove(&self.number);
        }
        self.of.0.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn enter(waiting: &Waiting, peer: &Peer) -> (UnixStream, Entered) {
        let (ours, theirs) = UnixStream::pair().expect("a connection");
        ours.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        (ours, waiting.enter(Arc::new(theirs), peer.clone()))
    }

    /// Serves a connection as the gateway does: until it has sent 4 bytes.
    fn serve(entered: Entered) -> std::thread::JoinHandle<io::Result<Entered>> {
        std::thread::spawn(move || {
            let mut entered = entered;
            entered.read(&mut [0; 4])?;
            entered.know();
            Ok(entered)
        })
    }

    fn is_closed(mut stream: &UnixStream) -> bool {
        stream.set_nonblocking(true).expect("a socket");
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_flood_closes_its_own_oldest_connection_and_nobody_elses() {
        let waiting = Waiting::new(4);
        let [flood, other] = [1, 2].map(Peer::User);
        let (first, entered) = enter(&waiting, &other);
        let first_thread = serve(entered);
        let mut floods = Vec::new();
        for number in 0..200 {
            let (stream, entered) = enter(&waiting, &flood);
            floods.push((stream, serve(entered)));
            assert!(waiting.0.state().waiting.len() <= 4, "{number}");
            if number >= 3 {
                assert!(is_closed(&floods[number - 3].0), "{number}: the oldest makes room");
            }
            assert!(!is_closed(&first), "{number}");
        }
        // A third peer's finds a place.
        let (third, entered) = enter(&waiting, &Peer::Guest(7));
        let third_thread = serve(entered);
        for mut stream in [&first, &third] {
            stream.write_all(b"here").expect("sent");
        }
        let known: Vec<_> = [first_thread, third_thread]
            .map(|thread| thread.join().expect("a thread").expect("it is known"))
            .into();
        assert_eq!(waiting.0.state().known.len(), 2);
        drop(known);
        drop(floods.iter().map(|(stream, _)| stream.shutdown(std::net::Shutdown::Both)).collect::<Vec<_>>());
        floods.into_iter().for_each(|(_, thread)| drop(thread.join().expect("a thread")));
        let state = waiting.0.state();
        assert!(state.waiting.is_empty() && state.known.is_empty());
    }

    #[test]
    fn peers_of_running_programs_are_closed_last_and_what_has_come_is_read() {
        let waiting = Waiting::new(3);
        let [runs, new] = [1, 2].map(Peer::User);
        let (_session, mut session) = enter(&waiting, &runs);
        session.know();
        // Two of the program's user, which are older, and one of another.
        let [one, two] = [&runs, &runs].map(|peer| enter(&waiting, peer));
        let (stranger, entered) = enter(&waiting, &new);
        let closed = serve(entered);
        let (mut ready, entered) = enter(&waiting, &Peer::User(3));
        assert!(closed.join().expect("a thread").is_err() && is_closed(&stranger));
        // A connection that has sent its bytes stays, so one of the program's user is closed.
        ready.write_all(b"here").expect("sent");
        let closed = serve(one.1);
        let (late, _late) = enter(&waiting, &Peer::User(4));
        assert!(closed.join().expect("a thread").is_err() && is_closed(&one.0));
        assert!(!is_closed(&two.0) && !is_closed(&late));
        drop(serve(entered).join().expect("a thread").expect("it is read"));
    }

    #[test]
    fn a_peer_with_a_program_that_floods_closes_its_own_connections() {
        let waiting = Waiting::new(KNOWN + 4);
        let (_session, mut session) = enter(&waiting, &Peer::User(1));
        session.know();
        let (other, _other) = enter(&waiting, &Peer::User(2));
        let floods: Vec<_> = (0..30)
            .map(|_| {
                let (stream, entered) = enter(&waiting, &Peer::User(1));
                serve(entered);
                stream
            })
            .collect();
        assert!(!is_closed(&other) && is_closed(&floods[0]));
    }
}
