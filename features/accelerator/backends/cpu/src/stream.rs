//! A queue's commands, run one after the other by a thread of the queue's own.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use vm_accel::{Grid, Timeline};

use crate::external::DmaBuf;
use crate::heap::{self, Heap};
use crate::kernel::CpuKernel;
use crate::pool::Pool;
use crate::sys::Scratch;

/// How often a stream that waits for another polls whether its queue is being dropped.
const POLL: Duration = Duration::from_millis(10);

/// One command. Addresses are those of memory that was allocated by a queue or registered with one; it is there until the
/// command has run, and what a `Free` names is used by none behind it. Whoever sends one promises that: it is what safe code
/// can't say wrong of a `Region`, and what `Queue::launch` and `Queue::replay` are unsafe for.
#[derive(Clone)]
pub(crate) enum Command {
    Fill {
        address: u64,
        bytes: u64,
        value: u8,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: u64,
    },
    Launch {
        kernel: Arc<CpuKernel>,
        params: Arc<[u64]>,
        grid: Grid,
    },
    Free {
        address: u64,
    },
    Record(Arc<Mark>),
    /// Nothing behind it runs before the mark, of any stream, is reached.
    Wait(Arc<Mark>),
    /// Nothing behind it runs before another API has come so far.
    Await {
        timeline: Arc<dyn Timeline>,
        value: u64,
    },
    /// Tells another API how far this has come.
    Signal {
        timeline: Arc<dyn Timeline>,
        value: u64,
    },
    /// Begins the turn at a dma-buf.
    Begin(Arc<DmaBuf>),
    /// Ends it.
    End(Arc<DmaBuf>),
    Replay(Arc<[Command]>),
    Stop,
}

/// A point in the stream.
#[derive(Default)]
pub(crate) struct Mark {
    at: Mutex<Option<Instant>>,
    reached: Condvar,
    /// To be unparked then.
    threads: Mutex<Vec<Thread>>,
}

impl Mark {
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it was reached, if it was.
    pub(crate) fn at(&self) -> Option<Instant> {
        *self.lock()
    }

    fn reach(&self) {
        *self.lock() = Some(Instant::now());
        self.reached.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads.iter().for_each(Thread::unpark);
    }

    /// Unparks a thread when it is reached.
    pub(crate) fn notify(&self, thread: &Thread) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.iter().all(|other| other.id() != thread.id()) {
            threads.push(thread.clone());
        }
        drop(threads);
        if self.at().is_some() {
            thread.unpark();
        }
    }

    /// Waits until it is reached; gives whether it was, at the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let mut at = self.lock();
        while at.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            at = self.reached.wait_timeout(at, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// What the queue and its thread share.
#[derive(Default)]
pub(crate) struct Stream {
    /// That of all streams of the context.
    pub(crate) heap: Arc<Heap>,
    /// The queue is being dropped: what has not begun does not.
    pub(crate) stop: AtomicBool,
    /// Why nothing runs any more.
    pub(crate) lost: Mutex<Option<String>>,
}

impl Stream {
    /// Runs commands until [`Command::Stop`] or the end of the channel.
    pub(crate) fn serve(&self, commands: &Receiver<Command>, pool: &Pool) {
        let mut scratch = Scratch::new();
        while let Ok(command) = commands.recv() {
            if matches!(command, Command::Stop) {
                return;
            }
            self.run(&command, pool, &mut scratch);
        }
    }

    fn run(&self, command: &Command, pool: &Pool, scratch: &mut Scratch) {
        match command {
            // Marks are reached whatever happens, so that nobody waits for ever.
            Command::Record(mark) => mark.reach(),
            // SAFETY: whoever had the memory gave it back, and commands that use it have run.
            Command::Free { address } => unsafe { self.heap.free(*address) },
            // So that the other side does not wait for ever.
            Command::Signal { timeline, value } => self.lose(timeline.signal(*value).err()),
            Command::End(buffer) => self.lose(buffer.end().err()),
            _ if self.stop.load(Ordering::Acquire) || self.is_lost() => {}
            // SAFETY: the region was part of memory that is freed by a command behind this one at the earliest, or by the
            // host after that has run; the host reaches it by copies only.
            Command::Fill { address, bytes, value } => unsafe { heap::fill(*address, *bytes, *value) },
            // SAFETY: as above, for both.
            Command::Copy { target, source, bytes } => unsafe { heap::copy(*target, *source, *bytes) },
            Command::Launch { kernel, params, grid } => {
                // SAFETY: the queue saw that the arguments have the kernel's form, and the grid no 0; whoever launched it promised
                // the rest.
                let ended = unsafe {
                    pool.launch(kernel, params, *grid, Some(scratch), usize::MAX, &self.stop, None)
                };
                self.lose(
                    ended
                        .err()
                        .map(|error| format!("no scratch memory for kernel {}: {error}", kernel.name())),
                );
            }
            Command::Wait(mark) => {
                while !mark.wait(Instant::now() + POLL) && !self.stop.load(Ordering::Acquire) {}
            }
            Command::Await { timeline, value } => loop {
                match timeline.wait(*value, Instant::now() + POLL) {
                    Ok(false) if !self.stop.load(Ordering::Acquire) => {}
                    Ok(_) => break,
                    Err(error) => break self.lose(Some(error)),
                }
            },
            Command::Begin(buffer) => loop {
                match buffer.is_idle(POLL) {
                    Ok(true) => break self.lose(buffer.begin().err()),
                    Ok(false) if self.stop.load(Ordering::Acquire) => break,
                    Ok(false) => {}
                    Err(error) => break self.lose(Some(error)),
                }
            },
            Command::Replay(commands) => commands.iter().for_each(|command| self.run(command, pool, scratch)),
            Command::Stop => {}
        }
    }

    /// Lets nothing run any more, if there is a cause.
    fn lose(&self, cause: Option<impl ToString>) {
        if let Some(cause) = cause {
            let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            lost.get_or_insert_with(|| cause.to_string());
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}
