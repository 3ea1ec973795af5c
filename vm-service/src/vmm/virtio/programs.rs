//! The programs of a guest that connect to its accelerator over vsock: they are listened for, and handed to the worker.
//!
//! Everybody who has vsock can connect: programs of the host, and every other guest. A thread of its own takes all connections
//! as they come, so that others can't fill the queue for long, closes those that are not the guest's, and keeps a few of the
//! guest's until the worker takes them. Only these have a worker started.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vsock::{VMADDR_CID_HOST, VsockListener};

use super::supervisor::{Maker, supervise};
use super::vsock::Peer;
use super::worker::Worker;
use crate::accelerators::WorkerProcess;
use crate::vmm::{Stop, sys};

/// Stands for a port that is free.
const PORT_ANY: u32 = u32::MAX;
/// How many connections of the guest wait for its worker.
const WAITING: usize = 16;
/// How long nobody is listened to when this process can't take a connection: it has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Where programs connect.
pub(super) trait Listen: Send + 'static {
    /// Readable when somebody wants to.
    fn wants(&self) -> BorrowedFd<'_>;
    /// Takes a connection, if there is one, with the context id that it comes from.
    ///
    /// # Errors
    /// The Linux kernel's.
    fn take(&self) -> io::Result<(OwnedFd, u32)>;
}

impl Listen for VsockListener {
    fn wants(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    fn take(&self) -> io::Result<(OwnedFd, u32)> {
        self.accept().map(|(socket, from)| (socket.into(), from.cid()))
    }
}

/// The connections of one guest.
pub(super) struct Programs {
    guest: Arc<Guest>,
    /// Signalled at each reset of its vsock device.
    resets: EventFd,
    /// Starts to take connections, once.
    begin: Mutex<Option<Begin>>,
    accepting: OnceLock<Worker>,
}

type Begin = Box<dyn FnOnce() -> io::Result<Worker> + Send>;

struct Guest {
    peer: Arc<Peer>,
    /// Connections that no worker has yet, each with how often the guest's device had been reset.
    waiting: Mutex<VecDeque<(OwnedFd, u64)>>,
    /// Signalled when one is added.
    arrived: EventFd,
}

impl Programs {
    /// Listens at a port that is free, where connections wait until it [begins](Self::begin). Answers with the port too.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn listen(peer: Arc<Peer>) -> io::Result<(Self, u32)> {
        let listener = VsockListener::bind_with_cid_port(VMADDR_CID_HOST, PORT_ANY)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok((Self::at(listener, peer)?, port))
    }

    fn at(listener: impl Listen, peer: Arc<Peer>) -> io::Result<Self> {
        let resets = peer.watch()?;
        let arrived = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let guest = Arc::new(Guest { peer, waiting: Mutex::default(), arrived });
        let takes = guest.clone();
        let begin = move || Worker::run("programs", move |end| takes.accept(&listener, end));
        let begin: Mutex<Option<Begin>> = Mutex::new(Some(Box::new(begin)));
        Ok(Self { guest, resets, begin, accepting: OnceLock::new() })
    }

    /// Has a thread take connections from now on.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(super) fn begin(&self) -> io::Result<()> {
        let begin = self.begin.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(begin) = begin {
            // Nobody else sets it.
            let _ = self.accepting.set(begin()?);
        }
        Ok(())
    }

    /// Readable when a program has connected.
    pub(super) fn arrived(&self) -> &EventFd {
        &self.guest.arrived
    }

    /// Readable when the guest's vsock device was reset since [`renew`](Self::renew), which ends what its programs did.
    pub(super) fn resets(&self) -> &EventFd {
        &self.resets
    }

    /// Forgets the connections from before the last reset.
    fn renew(&self) {
        // It fails when it was not signalled.
        let _ = self.resets.read();
        let resets = self.guest.peer.resets();
        self.guest.waiting().retain(|(_, at)| *at == resets);
    }

    /// Hands the connections that wait to `hand`. One that is not taken is closed.
    pub(super) fn hand_over(&self, hand: impl Fn(BorrowedFd<'_>) -> io::Result<()>) {
        // It fails when it was not signalled.
        let _ = self.guest.arrived.read();
        for (socket, _) in std::mem::take(&mut *self.guest.waiting()) {
            if let Err(error) = hand(socket.as_fd()) {
                tracing::debug!(%error, cid = self.guest.peer.cid(), "a program of the guest is not served");
            }
        }
    }

    /// Serves programs until it is asked to end, first with `worker`. Another is made when there is none and the next
    /// program of the guest connects.
    pub(super) fn run(&self, maker: &Maker, mut worker: Option<WorkerProcess>, end: &Stop) {
        while !end.requested() {
            if let Some(worker) = worker.take() {
                // It ends without a reason at a reset, too.
                if let Err(reason) = supervise(worker, end, Some(self)) {
                    maker.tell_end(&reason);
                }
                continue;
            }
            self.renew();
            let [ends, arrived, resets] = [end.event(), self.arrived(), self.resets()].map(sys::borrow);
            let mut fds = [&ends, &arrived, &resets].map(|fd| PollFd::new(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "a guest's programs can't be listened for any more");
                    return;
                }
            }
            if end.requested() || fds[1].revents().is_empty() || self.guest.waiting().is_empty() {
                let _ = self.arrived().read();
                continue;
            }
            match maker.make(end) {
                Ok((made, _)) => worker = Some(made),
                Err(error) => {
                    if !end.requested() {
                        maker.tell_end(&error.to_string());
                    }
                    self.hand_over(|_| Err(io::Error::other("there is no worker")));
                }
            }
        }
    }
}

impl Guest {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(OwnedFd, u64)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes connections until it is asked to end, and keeps those of the guest.
    fn accept(&self, listener: &impl Listen, end: &Stop) {
        let (ends, wants) = (sys::borrow(end.event()), listener.wants());
        while !end.requested() {
            let mut fds = [PollFd::new(&ends, PollFlags::IN), PollFd::new(&wants, PollFlags::IN)];
            if let Err(error) = poll(&mut fds, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "a guest's programs can't be listened for any more");
                return;
            }
            let resets = self.peer.resets();
            match listener.take() {
                Ok((socket, from)) if self.peer.is_from_guest(from) => self.keep(socket, resets),
                Ok((_, from)) => tracing::debug!(from, "a connection that is not the guest's was closed"),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::debug!(%error, "a program of the guest did not connect");
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    fn keep(&self, socket: OwnedFd, resets: u64) {
        let mut waiting = self.waiting();
        if waiting.len() < WAITING {
            waiting.push_back((socket, resets));
            // It fails only when the counter is full, and then it is signalled.
            let _ = self.arrived.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::os::process::ChildProgram;

    const CID: u32 = 42;
    const LONG: Duration = Duration::from_secs(60);

    /// Connections over a Unix socket, which seem to come from where this says.
    struct Fake(UnixListener, Arc<AtomicU32>);

    impl Listen for Fake {
        fn wants(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn take(&self) -> io::Result<(OwnedFd, u32)> {
            let (socket, _) = self.0.accept()?;
            Ok((socket.into(), self.1.load(Ordering::Relaxed)))
        }
    }

    struct Bench {
        folder: tempfile::TempDir,
        programs: Programs,
        from: Arc<AtomicU32>,
    }

    impl Bench {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
            listener.set_nonblocking(true).unwrap();
            let from = Arc::new(AtomicU32::new(CID));
            let peer = Arc::new(Peer::unconnected(CID));
            let programs = Programs::at(Fake(listener, from.clone()), peer).unwrap();
            programs.begin().unwrap();
            Self { folder, programs, from }
        }

        /// Connects from `from`, and waits until that was taken. Answers whether it was closed.
        fn connect(&self, from: u32) -> (UnixStream, bool) {
            self.from.store(from, Ordering::Relaxed);
            let before = self.programs.guest.waiting().len();
            let stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            let until = Instant::now() + LONG;
            loop {
                let closed = matches!((&stream).read(&mut [0]), Ok(0));
                if closed || self.programs.guest.waiting().len() > before {
                    return (stream, closed);
                }
                assert!(Instant::now() < until);
            }
        }
    }

    #[test]
    fn others_are_closed_and_have_no_worker_started() {
        let bench = Bench::new();
        let made = bench.folder.path().join("made");
        let end = Stop::new().unwrap();
        // A worker that leaves a file, and ends.
        let arguments = vec!["-c".into(), format!(": > {}", made.display()).into()];
        let program = ChildProgram { path: "/bin/sh".into(), arguments };
        let maker = Maker::for_test(program);
        std::thread::scope(|scope| {
            scope.spawn(|| bench.programs.run(&maker, None, &end));
            for from in [0, 1, 2, 3, CID + 1, u32::MAX] {
                assert!(bench.connect(from).1, "{from}");
            }
            assert!(!made.exists());
            bench.connect(CID);
            let until = Instant::now() + LONG;
            while !made.exists() {
                assert!(Instant::now() < until);
                std::thread::sleep(Duration::from_millis(1));
            }
            end.request();
        });
    }

    #[test]
    fn so_many_wait_and_a_reset_ends_them() {
        let bench = Bench::new();
        let open: Vec<_> = (0..WAITING).map(|_| bench.connect(CID)).collect();
        assert!(open.iter().all(|(_, closed)| !closed));
        assert!(bench.connect(CID).1);
        bench.programs.guest.peer.reset();
        assert!(sys::signalled(bench.programs.resets()));
        bench.programs.renew();
        assert!(!sys::signalled(bench.programs.resets()));
        for (mut stream, _) in open {
            stream.set_read_timeout(Some(LONG)).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it is open");
        }
        assert!(!bench.connect(CID).1, "the guest connects again");
    }
}
