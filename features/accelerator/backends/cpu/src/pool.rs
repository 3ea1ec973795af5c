//! The threads that run blocks. A launch is cut into runs of neighbouring blocks, and whoever is free takes the next.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vm_accel::Grid;

use crate::kernel::CpuKernel;
use crate::sys::Scratch;

/// Bytes of stack: a compiled kernel may need up to 32 MiB. Only what is used is backed by memory.
pub(crate) const STACK: usize = 64 << 20;
/// Runs of blocks for each thread, so that none is left with much when the others are done.
const RUNS: u64 = 16;
/// The most that the thread which launches does by itself, as [`CpuKernel::work`] counts it: to wake another takes as long.
const ALONE: u64 = 1 << 16;
/// Behind that it has others help after all: blocks may take longer than those before.
const LATE: Duration = Duration::from_micros(100);
/// The most blocks of a run: between two, a launch can be stopped or given up.
const LONGEST: u64 = 4096;

/// A launch.
pub(crate) struct Work {
    kernel: Arc<CpuKernel>,
    params: Box<[u64]>,
    grid: Grid,
    blocks: u64,
    run: u64,
    /// Does the thread that launched it run blocks, too?
    helped: bool,
    next: AtomicU64,
    /// Threads that may still be at it.
    busy: AtomicUsize,
    given_up: AtomicBool,
    failed: Mutex<Option<io::Error>>,
    /// Memory of which pages may be missing.
    memory: Option<Range<u64>>,
    /// Where a missing one was touched first.
    fault: OnceLock<u64>,
}

impl Work {
    /// Takes runs of blocks until there are none left, and does `late` once if that takes longer than it was to.
    fn help(&self, scratch: &mut Scratch, stop: &AtomicBool, mut late: Option<&dyn Fn()>) {
        if let Err(error) = scratch.reserve(self.kernel.scratch()) {
            *lock(&self.failed) = Some(error);
            self.given_up.store(true, Ordering::Release);
            return;
        }
        let (begin, mut done) = (Instant::now(), 0);
        while !self.given_up.load(Ordering::Acquire) && !stop.load(Ordering::Acquire) {
            let first = self.next.fetch_add(self.run, Ordering::Relaxed);
            if first >= self.blocks {
                return self.kernel.took(done, begin.elapsed());
            }
            // SAFETY: whoever launched this promised it, and waits for the end of it.
            if unsafe { self.kernel.is_stopped(&self.params) } {
                self.given_up.store(true, Ordering::Release);
                return;
            }
            let end = self.blocks.min(first + self.run);
            let memory = self.memory.as_ref();
            // SAFETY: as above; the scratch was made large enough, and `blocks` are the grid's.
            let fault = unsafe { self.kernel.run(&self.params, self.grid, first, end, scratch, memory) };
            if let Some(at) = fault {
                let _ = self.fault.set(at);
                self.given_up.store(true, Ordering::Release);
                // SAFETY: as above.
                unsafe { self.kernel.stop(&self.params) };
                return;
            }
            done += end - first;
            if late.is_some() && begin.elapsed() > LATE {
                late.take().inspect(|late| late());
            }
        }
    }
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<VecDeque<Arc<Work>>>,
    wake: Condvar,
    /// Somebody left a launch.
    left: Condvar,
    stop: AtomicBool,
}

/// Threads beside those of the queues.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Threads so that, with the one that launches, `threads` run blocks.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn start(threads: usize) -> io::Result<Pool> {
        let shared = Arc::new(Shared::default());
        let mut pool = Pool { shared: Arc::clone(&shared), helpers: Vec::new() };
        for number in 1..threads {
            let shared = Arc::clone(&shared);
            let name = format!("vm-cpu {number}");
            let helper = std::thread::Builder::new().name(name).stack_size(STACK);
            pool.helpers.push(helper.spawn(move || shared.serve())?);
        }
        Ok(pool)
    }

    /// Threads that run blocks, with the one that launches.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs a launch and waits for its end; `stop` and its own cancel flag give it up between two runs of blocks. The calling thread
    /// helps with its scratch memory; without any, which is for threads whose stacks may be too small, the others do it alone. So many
    /// others may run blocks at most. Where pages of `memory` are missing, it ends at the first that it touches, and gives the address.
    ///
    /// # Errors
    /// There is no scratch memory for it, or no thread.
    ///
    /// # Safety
    /// `params` was packed for this kernel, the memory that it names is there meanwhile, but for pages of `memory`, of which the handler of
    /// faults knows, and no number in `grid` is 0.
    #[expect(clippy::too_many_arguments)]
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Arc<CpuKernel>,
        params: &[u64],
        grid: Grid,
        scratch: Option<&mut Scratch>,
        others: usize,
        stop: &AtomicBool,
        memory: Option<&Range<u64>>,
    ) -> io::Result<Option<u64>> {
        let blocks = grid.0.iter().fold(1u64, |product, size| product.saturating_mul(u64::from(*size)));
        let threads = self.threads() as u64;
        let run = kernel.run_of(blocks.div_ceil(threads * RUNS).clamp(1, LONGEST));
        let own = u64::from(scratch.is_some());
        let most =
            blocks.div_ceil(run).saturating_sub(own).min(others.min(self.helpers.len()) as u64) as usize;
        let helpers = if own == 1 && kernel.work(blocks) <= ALONE { 0 } else { most };
        if scratch.is_none() && helpers == 0 {
            return Err(io::Error::other("there is no thread to run it"));
        }
        let work = Arc::new(Work {
            kernel: Arc::clone(kernel),
            params: params.into(),
            grid,
            blocks,
            run,
            helped: scratch.is_some(),
            next: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            given_up: AtomicBool::new(false),
            failed: Mutex::new(None),
            memory: memory.cloned(),
            fault: OnceLock::new(),
        });
        let call = |helpers: usize| {
            work.busy.fetch_add(helpers, Ordering::AcqRel);
            lock(&self.shared.waiting).extend((0..helpers).map(|_| Arc::clone(&work)));
            if helpers == 1 {
                self.shared.wake.notify_one();
            } else {
                self.shared.wake.notify_all();
            }
        };
        if helpers > 0 {
            call(helpers);
        }
        if let Some(scratch) = scratch {
            let late = || call(most);
            work.help(scratch, stop, (helpers < most).then_some(&late as &dyn Fn()));
        }
        if stop.load(Ordering::Acquire) {
            work.given_up.store(true, Ordering::Release);
        }
        let mut waiting = lock(&self.shared.waiting);
        loop {
            if work.helped || work.next.load(Ordering::Acquire) >= blocks {
                // Those who have not come yet need not.
                let before = waiting.len();
                waiting.retain(|other| !Arc::ptr_eq(other, &work));
                work.busy.fetch_sub(before - waiting.len(), Ordering::AcqRel);
            }
            if work.busy.load(Ordering::Acquire) == 0 {
                break;
            }
            waiting = self.shared.left.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        drop(waiting);
        match lock(&work.failed).take() {
            Some(error) => Err(error),
            None => Ok(work.fault.get().copied()),
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut scratch = Scratch::new();
        let mut waiting = lock(&self.waiting);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let Some(work) = waiting.pop_front() else {
                waiting = self.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(waiting);
            work.help(&mut scratch, &self.stop, None);
            waiting = lock(&self.waiting);
            // Whoever waits without having helped sees by the first who leaves that those to come need not.
            if work.busy.fetch_sub(1, Ordering::AcqRel) == 1 || !work.helped {
                self.left.notify_all();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let waiting = lock(&self.shared.waiting);
        self.shared.stop.store(true, Ordering::Release);
        drop(waiting);
        self.shared.wake.notify_all();
        for helper in self.helpers.drain(..) {
            if helper.join().is_err() {
                tracing::error!("a thread that runs blocks panicked");
            }
        }
    }
}
