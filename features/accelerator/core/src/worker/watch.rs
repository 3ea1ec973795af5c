//! What stops guarded launches whose time is up: one thread for all workers of the process.
//!
//! It is a thread of its own because the worker's may be the one that hangs: in a call of the driver that waits for the
//! very kernel that does not end, or in a job. It touches nothing but the cancel flags, which the host and the device both
//! see, so it needs neither the queue nor the worker. It begins with the first worker that has a guarded kernel, sleeps
//! until the next deadline, and ends with the last such worker.
//!
//! A worker's launches run one after another, so only one of them can be over its time: the oldest that has not ended.
//! Its time begins when it was given to the device, or, if that was later, when the worker saw the one before it end.
//! While the worker can't poll, a launch that was stopped is taken for ended: so none is stopped that kept its time, and
//! none is forgotten.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vm_abi::Guard;

use crate::error::{Error, Result};

/// The host's address of a cancel flag.
#[derive(Clone, Copy, Debug)]
pub(super) struct CancelFlag(usize);

impl CancelFlag {
    /// The cancel flag at a host address.
    ///
    /// # Safety
    /// Four aligned bytes are there, reached only as atomics by the host, as long as the value is used; for one that was
    /// given to [`CancelFlags::arm`], until it was ended or the cancel flags were closed.
    pub(super) unsafe fn new(host: u64) -> Self {
        Self(host as usize)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: `new` was promised that it is there.
        unsafe { AtomicU32::from_ptr(self.0 as *mut u32) }
    }

    pub(super) fn get(self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    pub(super) fn set(self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    /// Sets it to 0. What is 0 is not written: a write may take the memory away from the device.
    pub(super) fn clear(self) {
        if self.get() != 0 {
            self.set(0);
        }
    }
}

/// The cancel flags of one launch, or of all the launches of a graph.
#[derive(Clone, Debug)]
pub(super) enum Words {
    One(CancelFlag),
    Many(Arc<[CancelFlag]>),
}

impl Words {
    fn stop(&self) {
        match self {
            Self::One(word) => word.set(Guard::STOP),
            Self::Many(words) => words.iter().for_each(|word| word.set(Guard::STOP)),
        }
    }
}

/// The guarded launches of one worker that the device was given.
#[derive(Debug, Default)]
pub(super) struct CancelFlags(Mutex<Armed>);

#[derive(Debug, Default)]
struct Armed {
    /// In the order of the device, with the time that each may take.
    launches: VecDeque<(Words, Duration)>,
    /// How many of them, from the front, were stopped.
    stopped: usize,
    /// When the first that was not stopped is over its time; `None` where there is none, or no end to its time.
    due: Option<Instant>,
    closed: bool,
}

impl Armed {
    /// Begins the time of the first launch that was not stopped.
    fn begin(&mut self, now: Instant) {
        self.due = self.launches.get(self.stopped).and_then(|(_, time)| now.checked_add(*time));
    }

    /// Stops what is over its time.
    fn tick(&mut self, now: Instant) {
        while self.due.is_some_and(|due| due <= now) {
            if let Some((words, _)) = self.launches.get(self.stopped) {
                words.stop();
                self.stopped += 1;
            }
            self.begin(now);
        }
    }
}

impl CancelFlags {
    /// Cancel flags that the watching thread looks after until they are [closed](CancelFlags::close).
    ///
    /// # Errors
    /// [`Error::Host`] where the thread can't be started.
    pub(super) fn new() -> Result<Arc<Self>> {
        let this = Arc::new(Self::default());
        WATCH.look_after(&this)?;
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, Armed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a launch that the device was just given, behind all others.
    pub(super) fn arm(&self, words: Words, time: Duration) {
        let mut armed = self.lock();
        if armed.closed {
            return;
        }
        armed.launches.push_back((words, time));
        if armed.launches.len() == armed.stopped + 1 {
            armed.begin(Instant::now());
            let due = armed.due;
            drop(armed);
            WATCH.wake_before(due);
        }
    }

    /// Takes out the oldest launch, which has ended.
    pub(super) fn end(&self) {
        let mut armed = self.lock();
        armed.launches.pop_front();
        if armed.stopped > 0 {
            armed.stopped -= 1;
        } else {
            // The watching thread wakes up too early rather than too late, and looks again.
            armed.begin(Instant::now());
            let due = armed.due;
            drop(armed);
            WATCH.wake_before(due);
        }
    }

    /// Takes out the newest launch, whose end can't be seen.
    pub(super) fn forget(&self) {
        let mut armed = self.lock();
        armed.launches.pop_back();
        armed.stopped = armed.stopped.min(armed.launches.len());
        armed.begin(Instant::now());
    }

    /// Stops every launch.
    pub(super) fn stop_all(&self) {
        let mut armed = self.lock();
        armed.launches.iter().for_each(|(words, _)| words.stop());
        armed.stopped = armed.launches.len();
        armed.due = None;
    }

    /// Touches no cancel flag any more.
    pub(super) fn close(&self) {
        {
            let mut armed = self.lock();
            armed.closed = true;
            armed.launches.clear();
            armed.stopped = 0;
            armed.due = None;
        }
        WATCH.changed.notify_one();
    }
}

/// The watching thread's own.
struct Watch {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    workers: Vec<Weak<CancelFlags>>,
    running: bool,
    /// When the thread wakes up by itself.
    wakes: Option<Instant>,
}

static WATCH: Watch = Watch {
    state: Mutex::new(State { workers: Vec::new(), running: false, wakes: None }),
    changed: Condvar::new(),
};

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_after(&'static self, worker: &Arc<CancelFlags>) -> Result<()> {
        let mut state = self.lock();
        if !state.running {
            let spawned = std::thread::Builder::new().name("stop-watch".into()).spawn(|| self.run());
            if let Err(error) = spawned {
                let what = "starting the thread that stops guarded launches";
                return Err(Error::Host { what, cause: error.to_string() });
            }
            state.running = true;
        }
        state.workers.push(Arc::downgrade(worker));
        Ok(())
    }

    /// Sees to it that the thread looks at `due`.
    ///
    /// The caller has set what is due before: either the thread has seen that, or it has set `wakes` without it, and
    /// then this sees that it is too late.
    fn wake_before(&self, due: Option<Instant>) {
        let Some(due) = due else { return };
        if self.lock().wakes.is_none_or(|wakes| due < wakes) {
            self.changed.notify_one();
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let mut next: Option<Instant> = None;
            state.workers.retain(|worker| {
                let Some(worker) = worker.upgrade() else { return false };
                let mut armed = worker.lock();
                armed.tick(now);
                next = next.into_iter().chain(armed.due).min();
                !armed.closed
            });
            if state.workers.is_empty() {
                state.running = false;
                return;
            }
            state.wakes = next;
            state = match next {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let left = next.saturating_duration_since(Instant::now());
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn word(place: &AtomicU32) -> CancelFlag {
        // SAFETY: every test keeps its words until its cancel flags are closed.
        unsafe { CancelFlag::new(place.as_ptr() as u64) }
    }

    fn until(condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn only_the_oldest_launch_is_stopped_and_the_next_has_its_whole_time() {
        let words = [const { AtomicU32::new(0) }; 3];
        let armed = CancelFlags::new().unwrap();
        armed.arm(Words::One(word(&words[0])), Duration::from_millis(5));
        armed.arm(Words::Many(Arc::new([word(&words[1])])), LONG);
        armed.arm(Words::One(word(&words[2])), Duration::ZERO);
        let seen = || words.each_ref().map(|word| word.load(Ordering::Acquire));
        until(|| seen()[0] == Guard::STOP);
        assert_eq!(seen(), [Guard::STOP, 0, 0]);
        armed.end();
        assert_eq!(seen(), [Guard::STOP, 0, 0]);
        armed.end();
        until(|| seen()[2] == Guard::STOP);
        assert_eq!(seen(), [Guard::STOP, 0, Guard::STOP]);
        armed.end();
        armed.close();
    }

    #[test]
    fn a_short_deadline_behind_a_long_sleep_wakes_the_thread() {
        let words = [const { AtomicU32::new(0) }; 2];
        let (one, other) = (CancelFlags::new().unwrap(), CancelFlags::new().unwrap());
        one.arm(Words::One(word(&words[0])), LONG);
        std::thread::sleep(Duration::from_millis(5));
        other.arm(Words::One(word(&words[1])), Duration::from_millis(1));
        until(|| words[1].load(Ordering::Acquire) == Guard::STOP);
        assert_eq!(words[0].load(Ordering::Acquire), 0);
        one.stop_all();
        assert_eq!(words[0].load(Ordering::Acquire), Guard::STOP);
        one.close();
        other.close();
    }

    #[test]
    fn a_launch_without_end_and_one_that_is_forgotten_do_no_harm() {
        let words = [const { AtomicU32::new(0) }; 2];
        let armed = CancelFlags::new().unwrap();
        armed.arm(Words::One(word(&words[0])), Duration::MAX);
        armed.arm(Words::One(word(&words[1])), Duration::ZERO);
        armed.forget();
        armed.end();
        std::thread::sleep(Duration::from_millis(5));
        assert!(words.iter().all(|word| word.load(Ordering::Acquire) == 0));
        armed.close();
        armed.arm(Words::One(word(&words[0])), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(words[0].load(Ordering::Acquire), 0);
    }
}
