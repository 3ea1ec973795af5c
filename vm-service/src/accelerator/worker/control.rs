//! The worker's main thread: it gives up what it does not need, opens the accelerator, and does what the VMM says.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_accel::{Accelerator, Limits, Worker};

use super::backend::{self, Opened};
use super::fences::{Fences, Pace, Pending};
use super::log::Log;
use super::queue::Ring;
use super::ram::Ram;
use super::server::{Answer, Compile, Quotas, Server};
use super::watch::Watch;
use crate::accelerator::channel::{self, Order, Report};
use crate::accelerator::{Open, sandbox, sys};

/// How often the deadlines are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How many batches may be under way on the accelerator.
const PENDING: usize = 256;
/// The rounds of watched loops that a thread may take: what a GPU's thread does in days. The deadline is what counts.
const ROUNDS: u64 = 1 << 48;

/// The worker, from its start to its end: it ends when the VMM does, or with a reason. Standard input is its socket.
pub(crate) fn main() -> Result<(), String> {
    let socket = sandbox::enter()?;
    run(&socket).inspect_err(|reason| {
        // The VMM may have gone, which is then the reason.
        let _ = channel::send(&socket, &Report::Failed(reason.clone()), &[]);
    })
}

fn run(socket: &OwnedFd) -> Result<(), String> {
    let gone = |error: io::Error| format!("the VMM can't be heard: {error}");
    let (open, files) = match channel::receive::<Order>(socket).map_err(gone)? {
        Some((Order::Open(open), files)) => (open, files),
        Some((other, _)) => return Err(format!("the first order is {other:?}")),
        None => return Ok(()),
    };
    let ram = Arc::new(Ram::new(&open.ram, files)?);
    let opened = backend::open(&open.device, open.memory, Duration::from_micros(open.deadline_us))?;
    let memory = ram.map().map_err(|error| format!("the guest's RAM can't be mapped: {error}"))?;
    sandbox::confine(opened.confinement)?;
    let ready = Report::Ready { name: opened.name.clone(), target: opened.target.clone() };
    channel::send(socket, &ready, &[]).map_err(gone)?;
    let watch = Watch::default();
    let mut waiting = Some((opened, memory));
    let (broken, breaks) = mpsc::channel();
    loop {
        if let Ok(reason) = breaks.try_recv() {
            channel::send(socket, &Report::Broken(reason), &[]).map_err(gone)?;
        }
        if let Some(what) = watch.overdue(Instant::now()) {
            let text = format!("{what} takes longer than it may");
            channel::send(socket, &Report::Overdue(text), &[]).map_err(gone)?;
        }
        if !readable(socket.as_fd(), LOOK).map_err(gone)? {
            continue;
        }
        match channel::receive::<Order>(socket).map_err(gone)? {
            None => return Ok(()),
            Some((Order::Ping, _)) => channel::send(socket, &Report::Here, &[]).map_err(gone)?,
            Some((Order::Start(start), files)) => {
                let Some((opened, memory)) = waiting.take() else {
                    return Err("it was started twice".into());
                };
                let eventfds = files.into_iter().map(sys::eventfd).collect();
                match Ring::new(memory, &start, eventfds) {
                    Ok(ring) => {
                        let ring = Arc::new(ring);
                        let work = Work {
                            ring,
                            ram: ram.clone(),
                            open: open.clone(),
                            watch: watch.clone(),
                            broken: broken.clone(),
                        };
                        start_serving(opened, work)?;
                    }
                    Err(reason) => channel::send(socket, &Report::Broken(reason), &[]).map_err(gone)?,
                }
            }
            Some((Order::Open(_), _)) => return Err("it was opened twice".into()),
        }
    }
}

/// What the serving threads work on.
pub(super) struct Work {
    pub(super) ring: Arc<Ring>,
    pub(super) ram: Arc<Ram>,
    pub(super) open: Open,
    pub(super) watch: Watch,
    /// Why the guest can be served no further.
    pub(super) broken: mpsc::Sender<String>,
}

fn start_serving(opened: Opened, work: Work) -> Result<(), String> {
    let broken = work.broken.clone();
    let thread = std::thread::Builder::new().name("queue".into()).spawn(move || {
        if let Err(reason) = (opened.serve)(work) {
            // The main thread, whose it is, lives as long as the process.
            let _ = broken.send(reason);
        }
    });
    thread.map(drop).map_err(|error| format!("a thread can't be started: {error}"))
}

/// Serves the queue with an accelerator, until the driver breaks it or the accelerator fails.
pub(super) fn serve<A: Accelerator>(
    worker: Worker<A>,
    compiler: Box<dyn Compile>,
    work: Work,
) -> Result<(), String> {
    let Work { ring, ram, open, watch, broken } = work;
    let deadline = Duration::from_micros(open.deadline_us);
    let quotas = Quotas { memory: open.memory, limits: Limits { rounds: ROUNDS, time: deadline } };
    let log = Arc::new(Mutex::new(Log::default()));
    let pace = Arc::new(Pace::new(Duration::from_micros(open.time_slice_us)));
    let mut server = Server::new(worker, compiler, ram, quotas, log.clone(), watch.clone());
    let (pending, batches) = mpsc::sync_channel(PENDING);
    let fences = Fences { ring: ring.clone(), pace: pace.clone(), log, watch, deadline };
    // The queue's own thread may wait for a doorbell that never comes: what ends this one is told at once.
    let run = move || {
        if let Err(reason) = fences.run(&batches) {
            let _ = broken.send(reason);
        }
    };
    let thread = std::thread::Builder::new()
        .name("fences".into())
        .spawn(run)
        .map_err(|error| format!("a thread can't be started: {error}"))?;
    let mut queue = || -> Result<(), String> {
        loop {
            let request = ring.next()?;
            let Some(batch) = request.batch else {
                ring.answer(&request.reply, &Answer::refused(vm_paravirt::Status::Malformed))?;
                continue;
            };
            pace.wait();
            let begun = Instant::now();
            let executed = server.execute(&batch, request.reply.bytes());
            if executed.fences.is_empty() {
                ring.answer(&request.reply, &executed.answer)?;
                continue;
            }
            let reply = if executed.waits() {
                Some(request.reply)
            } else {
                ring.answer(&request.reply, &executed.answer)?;
                None
            };
            pace.begin();
            if pending.send(Pending { executed, reply, begun }).is_err() {
                // The other thread has ended, and says why.
                return Ok(());
            }
        }
    };
    let ended = queue();
    drop(pending);
    ended.and_then(|()| thread.join().map_err(|_| "the thread that waits for fences panicked".into()))
}

fn readable(socket: BorrowedFd<'_>, patience: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(patience).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(count) => Ok(count > 0),
    }
}
