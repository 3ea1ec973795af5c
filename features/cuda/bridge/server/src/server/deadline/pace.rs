//! The [time slice](crate::server::slice) of a session: when its device was busy, and how long its lanes wait before they put more on it.
//!
//! The streams are looked at every 2 ms on average, at times that a program can't foretell. Where one has work then that does not wait, the device was
//! busy since the look before. So what is shorter counts as often as it is met, which is right on average.
//!
//! A lane waits before a launch, a copy or a fill as long as more is owed than a period pays, but only for what is owed when it begins to wait: a kernel
//! that waits for what is held up gets it. Then it waits until no more is on its way than was done in [`AHEAD`] before, for a period at most.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::{Thread, park_timeout};
use std::time::Duration;

use super::{GROUP, On, Stream, Watch};
use crate::server::session::Session;
use crate::server::slice::{PERIOD, Slice, now};

/// How long before its end a launch may be put on a stream.
pub(super) const AHEAD: Duration = Duration::from_millis(10);
/// The most and least that may be on its way.
const FARTHEST: u32 = 256;
const NEAREST: u32 = 2;
/// Marks that are on their way then, at most.
const MARKS: u32 = 8;
/// How long is between two looks that count, in nanoseconds: from the first, so much at random.
const SOONEST: u64 = 1_000_000;
const SPREAD: u64 = 2_000_000;
/// How often is looked while a lane waits until less is on its way.
const OFTEN: Duration = Duration::from_micros(200);
/// Nobody looks any more after so many looks that saw nothing.
const VAIN: u32 = 32;

/// What keeps a session within a time slice.
#[derive(Debug)]
pub(super) struct Pace {
    slice: Slice,
    /// Marks that are not reached, of streams that don't wait.
    ahead: AtomicU32,
    /// How much may be on its way.
    reach: AtomicU32,
    /// Was too much owed at the last look?
    owes: AtomicBool,
    /// How many lanes wait until less is on its way.
    full: AtomicU32,
    /// Was half of what may be on its way, or all, since the last look?
    pressed: AtomicBool,
    /// Does nobody look, as there is nothing on the streams?
    rests: AtomicBool,
    thread: OnceLock<Thread>,
}

/// What the thread that looks knows of time.
#[derive(Debug)]
pub(super) struct Clock {
    random: RandomState,
    count: u64,
    /// The last look that counted, and whether the device was busy then.
    at: u64,
    was_busy: bool,
    next: u64,
    /// How many looks have seen nothing.
    vain: u32,
}

impl Clock {
    pub(super) fn new(pace: &Pace) -> Self {
        // Nobody else sets it.
        let _ = pace.thread.set(std::thread::current());
        let mut clock =
            Self { random: RandomState::new(), count: 0, at: 0, was_busy: false, next: 0, vain: 0 };
        clock.begin(now(), false);
        clock
    }

    /// Counts from now on.
    fn begin(&mut self, now: u64, busy: bool) {
        self.count += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.count);
        self.at = now;
        self.was_busy = busy;
        self.next = now + SOONEST + hasher.finish() % SPREAD;
    }
}

/// What was seen of a session's streams.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// Does one make no progress?
    pub(super) late: bool,
    /// Has one work that does not wait?
    pub(super) busy: bool,
    /// Has one anything at all?
    pub(super) any: bool,
    /// How many marks are on their way.
    pub(super) ahead: u32,
    /// Was something done soon after it was put there, and is something late?
    pub(super) soon: bool,
    pub(super) slow: bool,
}

impl Pace {
    pub(super) fn new(slice: Slice) -> Self {
        Self {
            slice,
            ahead: AtomicU32::new(0),
            reach: AtomicU32::new(NEAREST),
            owes: AtomicBool::new(false),
            full: AtomicU32::new(0),
            pressed: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// How much a stream is marked behind.
    pub(super) fn group(&self) -> u64 {
        u64::from(self.reach.load(Relaxed) / MARKS).clamp(1, GROUP)
    }

    /// How many marks may be on their way.
    fn limit(&self) -> u32 {
        self.reach.load(Relaxed).min(MARKS)
    }

    fn is_full(&self) -> bool {
        self.ahead.load(SeqCst) >= self.limit()
    }

    /// As much of a time as the slice is of its period.
    pub(super) fn share(&self, of: Duration) -> Duration {
        self.slice.share(of)
    }

    /// One more mark is on its way.
    pub(super) fn marked(&self) {
        let ahead = self.ahead.fetch_add(1, SeqCst) + 1;
        // What has been reached is learned before it would be too many.
        if ahead == self.limit().div_ceil(2) && ahead > 1 {
            self.pressed.store(true, Relaxed);
            self.wake();
        }
    }

    /// Something was put on a stream, or is about to be: it is looked at.
    pub(super) fn put(&self) {
        if self.rests.load(SeqCst) && self.rests.swap(false, SeqCst) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Waits until the streams are to be looked at.
    pub(super) fn sleep(&self, clock: &mut Clock, interval: Duration) {
        if clock.vain <= VAIN {
            // Whatever is put there from the last look but one on is seen, or wakes this thread.
            if clock.vain == VAIN {
                self.rests.store(true, SeqCst);
            }
            let left = Duration::from_nanos(clock.next.saturating_sub(now()));
            return park_timeout(if self.full.load(SeqCst) > 0 { left.min(OFTEN) } else { left });
        }
        if self.rests.load(SeqCst) {
            park_timeout(interval);
        }
        if !self.rests.load(SeqCst) {
            clock.vain = 0;
        }
        clock.begin(now(), false);
    }

    /// Counts what was seen.
    pub(super) fn count(&self, clock: &mut Clock, looked: &Looked) {
        let now = now();
        if looked.any {
            clock.vain = 0;
            self.rests.store(false, SeqCst);
        }
        if now >= clock.next {
            if looked.busy {
                // Where nothing was seen for long it was not busy for all of that.
                let least = if clock.was_busy { 0 } else { now.saturating_sub(PERIOD.as_nanos() as u64) };
                self.slice.charge(clock.at.max(least), now);
            }
            if !looked.any {
                clock.vain = clock.vain.saturating_add(1);
            }
            clock.begin(now, looked.busy);
        }
        self.owes.store(!self.slice.wait(now).is_zero(), SeqCst);
        let reach = self.reach.load(Relaxed);
        if looked.slow {
            self.reach.store((reach / 2).max(NEAREST), Relaxed);
        } else if looked.soon && (self.pressed.swap(false, Relaxed) || self.full.load(SeqCst) > 0) {
            self.reach.store((reach * 2).min(FARTHEST), Relaxed);
        }
    }

    /// So many marks are on their way.
    pub(super) fn are_ahead(&self, count: u32) {
        self.ahead.store(count, SeqCst);
    }
}

impl Watch {
    /// Holds up a call that puts work on a stream, as long as the slice is used up.
    pub(super) fn hold(&self, session: &Session, stream: &Stream) {
        let Some(pace) = &self.pace else { return };
        let is_free = !pace.owes.load(Relaxed) && !pace.rests.load(Relaxed) && !pace.is_full();
        if is_free || self.is_captured(session, stream) {
            return;
        }
        let owed = pace.slice.wait(now());
        if !owed.is_zero() {
            session.turn.hold(owed, || false);
        }
        if pace.is_full() {
            pace.full.fetch_add(1, SeqCst);
            pace.wake();
            session.turn.hold(PERIOD, || !pace.is_full());
            pace.full.fetch_sub(1, SeqCst);
        }
    }

    /// Something is put on a stream.
    pub(super) fn puts(&self) {
        if let Some(pace) = &self.pace {
            pace.put();
        }
    }

    /// Is what is put there recorded, and not on its way?
    fn is_captured(&self, session: &Session, stream: &Stream) -> bool {
        let on = On { driver: session.driver(), context: stream.context };
        session.may_capture() && on.within(|on| on.is_captured(stream.handle))
    }
}
