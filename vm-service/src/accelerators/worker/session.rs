//! Serves a link: takes its batches, hands their operations to the accelerator, and answers.

use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use vm_accel::{Accelerator, Limits, Worker};

use super::fences::{Fences, Pending};
use super::link::Link;
use super::log::Log;
use super::pace::Pace;
use super::poll::Poll;
use super::ram::Ram;
use super::server::{Answer, Compiler, GRACE, Quotas, Server, most};
use super::usage::Usage;
use super::watch::Watch;
use crate::accelerators::Open;
use crate::accelerators::meter::Meter;

/// How many batches of a link may be under way on the accelerator.
const PENDING: usize = 256;
/// The iterations of cancellable loops that a thread may begin: what a GPU's thread does in days. The deadline is what counts.
const FUEL: u64 = 1 << 48;

/// Processors that it takes to poll for the next batch, beside a guest that polls for the answer to the last; and for the
/// end of a batch, beside that guest, the accelerator's thread, which polls for it too, and one that does the work.
const PROCESSORS: [usize; 2] = [2, 4];

/// The guest, whichever link its batches come over. Clones are the same.
#[derive(Clone)]
pub(super) struct Guest {
    ram: Arc<Ram>,
    quotas: Quotas,
    usage: Usage,
    pace: Arc<Pace>,
    watch: Watch,
    /// The longest that is polled for the next batch, and for the end of one.
    polls: [Duration; 2],
    slice: Duration,
    /// Why the guest can be served no further.
    broken: mpsc::Sender<String>,
}

impl Guest {
    /// A guest that holds nothing, and has used as much of its time as `meter` says.
    ///
    /// # Errors
    /// When that can't be read.
    pub(super) fn new(
        open: &Open,
        ram: Arc<Ram>,
        meter: Meter,
        watch: Watch,
        broken: mpsc::Sender<String>,
    ) -> Result<Self, String> {
        let time = Duration::from_micros(open.deadline_us);
        let quotas = Quotas { memory: open.memory, limits: Limits { fuel: FUEL, time } };
        let usage = Usage::new(most(&quotas, &ram));
        let slice = Duration::from_micros(open.time_slice_us);
        let pace = Arc::new(Pace::new(slice, meter)?);
        let poll = Duration::from_micros(open.poll_us);
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let polls = PROCESSORS.map(|least| if processors < least { Duration::ZERO } else { poll });
        Ok(Self { ram, quotas, usage, pace, watch, polls, slice, broken })
    }

    /// The guest, with how long is polled for its next batch and for the end of one.
    #[cfg(test)]
    pub(super) fn polling(self, polls: [Duration; 2]) -> Self {
        Self { polls, ..self }
    }

    /// Reports that the guest can be served no further.
    pub(super) fn broken(&self, reason: String) {
        // Without the main thread, whose the other end is, there is no process.
        let _ = self.broken.send(reason);
    }
}

/// Serves a link until it ends; then all that came over it is released.
///
/// # Errors
/// When the driver broke its queue, the accelerator failed, or this thread panicked.
pub(super) fn serve<A: Accelerator, L: Link>(
    worker: &Worker<A>,
    compiler: Compiler,
    link: L,
    guest: &Guest,
) -> Result<(), String> {
    caught("serves the guest", || serve_link(worker, compiler, link, guest))
}

/// Runs what must not end without a word: whoever waits for it would wait for ever.
fn caught(what: &str, run: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    // Nothing that was at hand is used again: the worker ends.
    let ended = catch_unwind(AssertUnwindSafe(run));
    ended.unwrap_or_else(|payload| {
        // Its own end may panic too.
        std::mem::forget(payload);
        Err(format!("the thread that {what} panicked; see the worker's messages above"))
    })
}

fn serve_link<A: Accelerator, L: Link>(
    worker: &Worker<A>,
    compiler: Compiler,
    link: L,
    guest: &Guest,
) -> Result<(), String> {
    let teller = guest.clone();
    let Guest { ram, quotas, usage, pace, watch, polls, slice, .. } = guest.clone();
    let link = Arc::new(link);
    let deadline = quotas.limits.time;
    let log = Arc::new(Mutex::new(Log::default()));
    let mut server = Server::new(worker.clone(), compiler, ram, quotas, usage, log.clone(), watch.clone());
    let (pending, batches) = mpsc::sync_channel(PENDING);
    let fences = Arc::new(Fences::new(link.clone(), log, watch.clone(), deadline));
    let others = fences.clone();
    // This thread may wait for a batch that never comes: what ends the other one is reported at once.
    let run = move || {
        if let Err(reason) = caught("waits for fences", || others.run(&batches)) {
            teller.broken(reason);
        }
    };
    let thread = std::thread::Builder::new()
        .name("fences".into())
        .spawn(run)
        .map_err(|error| format!("a thread can't be started: {error}"))?;
    let mut take = || -> Result<(), String> {
        let [mut requests, mut ends] = polls.map(|most| Poll::new(most, slice));
        loop {
            let idle = Instant::now();
            requests.until(|| link.ready());
            let Some(request) = link.next()? else { return Ok(()) };
            requests.took(idle.elapsed());
            let Some(batch) = request.batch else {
                link.answer(&request.place, &Answer::refused(vm_paravirt::Status::Malformed))?;
                continue;
            };
            let permit = pace.permit();
            let executed = server.execute(&batch, request.room);
            if let Some(reason) = executed.lost {
                link.answer(&request.place, &executed.answer)?;
                return Err(reason);
            }
            if executed.fences.is_empty() {
                permit.computed();
                link.answer(&request.place, &executed.answer)?;
                continue;
            }
            let reply = if executed.waits() {
                Some(request.place)
            } else {
                link.answer(&request.place, &executed.answer)?;
                None
            };
            let batch = Pending { executed, reply, permit, since: Instant::now() };
            if !fences.end_soon(batch, &mut ends, &pending)? {
                // The other thread has ended, and says why.
                return Ok(());
            }
        }
    };
    let ended = take();
    drop(pending);
    // What is under way has deadlines of its own.
    let ended =
        ended.and_then(|()| thread.join().map_err(|_| "the thread that waits for fences ended".into()));
    let releasing = watch.begin("the release of a program's buffers", deadline.saturating_add(GRACE));
    drop(server);
    drop(releasing);
    ended
}
