//! The time slice: how long, of every [`PERIOD`], programs may keep a device busy all together, in a file that outlives their workers.
//!
//! Each worker says when it saw the device busy with its program's work. Time is cut into ticks of half a millisecond, of which the file has a bit each,
//! for the last seconds: whoever says first that a tick was busy is charged with it, so that it counts once however many programs were busy, and none is
//! lost in whatever order workers say so. What was charged is owed, and paid at the rate of the slice: one word of the file is the time when all is.
//!
//! A worker that was taken over can write any word: what its programs and those of its server or guest owe, and nobody else's.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::sys::Slots;

/// What a slice is a part of.
pub(super) const PERIOD: Duration = Duration::from_millis(100);
/// The most that is owed: what is beyond that is forgiven.
const MOST: Duration = Duration::from_secs(60 * 60);
/// What counts as busy or not, in nanoseconds.
const TICK: u64 = 500_000;
/// Ticks in a word, behind the number of its turn.
const TICKS: u64 = 32;

/// Words of the file: those of who made it, until when all is paid, how much was charged ever, and ticks.
const DUE: usize = 4;
const CHARGED: usize = 5;
const RING: usize = 8;
const WORDS: usize = 256;

/// Bytes of the file. The first 32 are not of the slice.
pub const BYTES: u64 = 8 * (RING + WORDS) as u64;

/// The time of the machine, the same in all processes, in nanoseconds.
pub(super) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The Linux kernel's is never below zero.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A slice, and what programs that have it together owe.
#[derive(Debug)]
pub struct Slice {
    slice: Duration,
    words: Slots,
}

impl Slice {
    /// The slice that programs with this file have, which is less than the period.
    ///
    /// # Errors
    /// When the file can't be mapped, may shrink or is too short, or the slice is none.
    pub fn open(file: &OwnedFd, slice: Duration) -> io::Result<Self> {
        let words = Slots::map(file)?;
        if words.all().len() < RING + WORDS || slice.is_zero() || slice >= PERIOD {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { slice, words })
    }

    /// As much of a time as the slice is of its period.
    pub(super) fn share(&self, of: Duration) -> Duration {
        of.mul_f64(self.slice.div_duration_f64(PERIOD))
    }

    /// The device was busy from a time to another, which is now.
    pub(super) fn charge(&self, from: u64, to: u64) {
        let charged = take(&self.words.all()[RING..], from, to);
        if charged > 0 {
            self.words.all()[CHARGED].fetch_add(charged, SeqCst);
            owe(&self.words.all()[DUE], charged, self.slice, to);
        }
    }

    /// How long nothing may be put on the device.
    pub(super) fn wait(&self, now: u64) -> Duration {
        let due = self.words.all()[DUE].load(SeqCst).min(now.saturating_add(nanos(MOST)));
        Duration::from_nanos(due.saturating_sub(now.saturating_add(nanos(PERIOD))))
    }
}

/// Takes what of a time nobody has taken: how much that is.
fn take(ring: &[AtomicU64], from: u64, to: u64) -> u64 {
    let (from, to) = (from / TICK, to / TICK);
    let oldest = to.saturating_sub((ring.len() as u64 - 1) * TICKS);
    let mut at = from.max(oldest);
    let mut taken = 0;
    while at < to {
        let (number, bit) = (at / TICKS, at % TICKS);
        let count = (TICKS - bit).min(to - at);
        let mask = ((1 << count) - 1) << bit;
        let slot = &ring[(number % ring.len() as u64) as usize];
        let turn = (number / ring.len() as u64) & u64::from(u32::MAX);
        let with = |old: u64| match old >> 32 {
            of if of == turn => Some(old | mask),
            // Somebody was so late that the place is another's already.
            of if of == turn + 1 => None,
            _ => Some(turn << 32 | mask),
        };
        if let Ok(old) = slot.fetch_update(SeqCst, SeqCst, with) {
            let before = if old >> 32 == turn { old } else { 0 };
            taken += u64::from((mask & !before).count_ones()) * TICK;
        }
        at += count;
    }
    taken
}

/// Owes so much more, from a time on.
fn owe(due: &AtomicU64, charged: u64, slice: Duration, now: u64) {
    let most = now.saturating_add(nanos(MOST));
    let price = u128::from(charged) * PERIOD.as_nanos() / slice.as_nanos().max(1);
    let price = u64::try_from(price).unwrap_or(u64::MAX);
    let with = |due: u64| Some(due.clamp(now, most).saturating_add(price).min(most));
    // It never refuses.
    let _ = due.fetch_update(SeqCst, SeqCst, with);
}

#[cfg(all(test, not(loom)))]
mod tests;
