//! Assemblers that were started before there is anything to assemble.
//!
//! A small kernel takes `ptxas` less time than its own start: it is a program of 36 MB that builds tables first. So some
//! wait with that behind them until they are given their input.
//!
//! `ptxas` opens its input twice and seeks in it, so a pipe won't do. What waits opens a FIFO, which blocks until somebody
//! writes there. Then it is past the name, and this process gives the name to a file in memory, which is what is found
//! when the input is opened again. The name is a descriptor of this process: nothing is left on a disk.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, mknodat, open, unlink};
use rustix::io::{DupFlags, Errno, dup3};
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::geteuid;

use vm_assemble::{Job, Scratch};

use super::job::{self, Order, Program};

/// How long they wait for work before they are given up.
const IDLE: Duration = Duration::from_secs(60);
/// How long one that is still starting is waited for: it is ahead of one that is not.
const START: Duration = Duration::from_secs(1);
/// How often that is polled.
const POLL: Duration = Duration::from_micros(200);
/// What a FIFO holds, so that giving never waits. Longer code takes so long that a start does not count.
const MOST: usize = 64 << 10;
/// So many that could not be used, one after the other, and no more are started.
const FAILURES: u32 = 3;

/// Processes that wait, and the thread that starts them.
#[derive(Debug)]
pub(super) struct Standby {
    pool: Arc<Pool>,
    /// To the thread, which ends when this is gone; `None` if it could not be started.
    orders: OnceLock<Option<Sender<Order>>>,
}

#[derive(Debug)]
struct Pool {
    program: Program,
    count: usize,
    idle: Duration,
    waiting: Mutex<VecDeque<Waiting>>,
    failures: AtomicU32,
    /// The process that started them: a copy of it made by `fork` has none.
    owner: u32,
}

impl Standby {
    /// Keeps `count` processes, once the first was asked for.
    pub(super) fn new(program: Program, count: usize) -> Self {
        Self::with_idle(program, count, IDLE)
    }

    fn with_idle(program: Program, count: usize, idle: Duration) -> Self {
        let pool = Pool {
            program,
            count,
            idle,
            waiting: Mutex::default(),
            failures: AtomicU32::new(0),
            owner: std::process::id(),
        };
        Self { pool: Arc::new(pool), orders: OnceLock::new() }
    }

    /// Has processes started for such orders, in the background.
    pub(super) fn prepare(&self, order: &Order) {
        if !self.pool.usable() {
            return;
        }
        let orders = self.orders.get_or_init(|| {
            let (sender, orders) = channel();
            let pool = Arc::clone(&self.pool);
            // The processes end with the thread that started them, so it is one that stays.
            let thread = thread::Builder::new().name("assemblers".into()).spawn(move || pool.keep(&orders));
            thread.inspect_err(|error| tracing::debug!(%error, "no assembler waits ready")).ok()?;
            Some(sender)
        });
        if let Some(orders) = orders {
            // If the thread is gone, then so are its processes.
            let _ = orders.send(order.clone());
        }
    }

    /// Gives `ptx` to a process that waits for such an order, and has another one started in its place. `None` if there is
    /// none that can be used.
    pub(super) fn take(&self, order: &Order, ptx: &[u8], deadline: Instant) -> Option<Job> {
        if ptx.len() > MOST || !self.pool.usable() {
            return None;
        }
        let waiting = {
            let mut all = self.pool.lock();
            let place = all.iter().position(|waiting| waiting.order == *order);
            place.and_then(|place| all.remove(place))
        };
        self.prepare(order);
        waiting?.give(ptx, deadline).inspect_err(|error| self.failed(&error.to_string())).ok()
    }

    /// One of them could not be used.
    pub(super) fn failed(&self, reason: &str) {
        self.pool.failures.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(reason, "an assembler that waited can't be used");
    }

    /// One of them did its work.
    pub(super) fn worked(&self) {
        self.pool.failures.store(0, Ordering::Relaxed);
    }
}

impl Pool {
    fn usable(&self) -> bool {
        self.owner == std::process::id() && self.failures.load(Ordering::Relaxed) < FAILURES
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does until nobody can give it orders any more.
    fn keep(&self, orders: &Receiver<Order>) {
        loop {
            let order = match orders.recv_timeout(self.idle) {
                Ok(order) => order,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    self.give_up();
                    match orders.recv() {
                        Ok(order) => order,
                        Err(_) => break,
                    }
                }
            };
            while self.lock().iter().filter(|waiting| waiting.order == order).count() < self.count {
                let waiting = match Waiting::start(&self.program, order.clone()) {
                    Ok(waiting) => waiting,
                    Err(error) => {
                        tracing::debug!(%error, "no assembler waits ready");
                        self.failures.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                };
                let mut all = self.lock();
                all.push_back(waiting);
                // Those for other orders make room.
                let oldest = if all.len() > self.count { all.pop_front() } else { None };
                drop(all);
                drop(oldest);
            }
        }
        self.give_up();
    }

    fn give_up(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            std::mem::forget(std::mem::take(&mut *self.lock()));
        }
    }
}

/// One process, before it has its input.
#[derive(Debug)]
struct Waiting {
    order: Order,
    job: Job,
    /// The descriptor that it opens, by a name in `/proc`: a FIFO.
    input: OwnedFd,
}

impl Waiting {
    fn start(program: &Program, order: Order) -> io::Result<Self> {
        let input = fifo()?;
        // Our number as this /proc has it.
        let mut path = OsString::from("/proc/");
        path.push(fs::read_link("/proc/self")?);
        path.push(format!("/fd/{}", input.as_raw_fd()));
        let job = job::start(program, &order, path, &[]).map_err(io::Error::other)?;
        Ok(Self { order, job, input })
    }

    /// Gives it its input. On an error it is ended.
    fn give(mut self, ptx: &[u8], deadline: Instant) -> io::Result<Job> {
        let opened = |flags| {
            open(
                format!("/proc/self/fd/{}", self.input.as_raw_fd()),
                flags | OFlags::NONBLOCK | OFlags::CLOEXEC,
                Mode::empty(),
            )
        };
        let until = deadline.min(Instant::now() + START);
        let mut pause = Duration::ZERO;
        // There is no writer without a reader: once this succeeds, the process has opened the FIFO.
        let writer = loop {
            if self.job.ends_by(Instant::now() + pause)? {
                return Err(io::Error::other(format!("it has ended: {}", self.job.messages())));
            }
            match opened(OFlags::WRONLY) {
                Err(Errno::NXIO) if Instant::now() < until => pause = POLL,
                writer => break writer?,
            }
        };
        if fcntl_getpipe_size(&writer)? < ptx.len() {
            return Err(io::Error::other("its FIFO is too small"));
        }
        // With a reader of our own, its death while we write is no SIGPIPE.
        let reader = opened(OFlags::RDONLY)?;
        let file = Scratch::of("ptx", ptx)?;
        dup3(&file, &mut self.input, DupFlags::CLOEXEC)?;
        if rustix::io::write(&writer, ptx)? != ptx.len() {
            return Err(io::Error::other("its FIFO was not empty"));
        }
        Ok(self.job.with_input([self.input, reader]))
    }
}

/// A FIFO that has no name any more.
fn fifo() -> io::Result<OwnedFd> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!(".vm-cuda-{}-{number}", std::process::id()));
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let fifo = open(&path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    unlink(&path)?;
    let fifo = fifo?;
    let found = fstat(&fifo)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Fifo || found.st_uid != geteuid().as_raw() {
        return Err(io::Error::other(format!("{} was replaced by somebody", path.display())));
    }
    Ok(fifo)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::super::Limits;
    use super::super::job::Kind;
    use super::*;

    fn script(folder: &Path, body: &str) -> Program {
        let path = folder.join("assembler");
        let text = format!("#!/bin/sh\nPATH=/usr/bin:/bin\nlog={}\n{body}\n", folder.join("log").display());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        Program { path, kind: Kind::Ptxas }
    }

    fn order(architecture: &str) -> Order {
        Order { architecture: architecture.into(), level: 3, limits: Limits::default() }
    }

    fn architectures(standby: &Standby) -> Vec<String> {
        standby.pool.lock().iter().map(|waiting| waiting.order.architecture.clone()).collect()
    }

    fn becomes(what: &str, mut holds: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < Duration::from_secs(20), "never seen: {what}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn how_many_wait_and_for_what() {
        let folder = tempfile::tempdir().unwrap();
        let program = script(folder.path(), r#"echo "$2 $4 $$" >>"$log"; cat "$7" >"$6""#);
        let standby = Standby::with_idle(program, 2, Duration::from_millis(500));
        let take = |order: &Order, text: &[u8]| standby.take(order, text, Instant::now() + START);
        assert!(take(&order("sm_80"), b"text").is_none(), "nobody waits yet");
        becomes("two for the first order", || architectures(&standby) == ["sm_80", "sm_80"]);
        standby.prepare(&order("sm_90a"));
        becomes("two for the newest order", || architectures(&standby) == ["sm_90a", "sm_90a"]);
        assert!(take(&order("sm_90a"), &vec![b'x'; MOST + 1]).is_none(), "more than a FIFO holds");
        for text in [&b"text"[..], b"", &[b'x'; MOST]] {
            let mut job = None;
            becomes("one that waits", || {
                job = take(&order("sm_90a"), text);
                job.is_some()
            });
            let written = job.unwrap().end(Instant::now() + Duration::from_secs(20)).unwrap();
            assert_eq!(written.read(1 << 20).unwrap(), text);
        }
        becomes("their end without work", || architectures(&standby).is_empty());
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        for line in log.lines() {
            let [_, level, process] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            assert_eq!(level, "3");
            becomes("its end", || !Path::new("/proc").join(process).exists());
        }
    }

    #[test]
    fn those_that_can_not_be_used_are_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let standby = Standby::new(script(folder.path(), "echo no; exit 1"), 1);
        let begin = Instant::now();
        while standby.pool.usable() {
            assert!(standby.take(&order("sm_80"), b"text", begin + START).is_none());
            assert!(begin.elapsed() < Duration::from_secs(20));
        }
        let missing = Program { path: "/nowhere/ptxas".into(), kind: Kind::Ptxas };
        let standby = Standby::new(missing, 1);
        while standby.pool.usable() {
            assert!(standby.take(&order("sm_80"), b"text", begin + START).is_none());
            assert!(begin.elapsed() < Duration::from_secs(20));
        }
    }
}
