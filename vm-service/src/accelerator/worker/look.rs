//! Looking for what comes soon, before sleeping until it comes: to be woken takes longer than a small launch.
//!
//! How long it looks follows how long things took of late, as QEMU's polling of I/O threads does: what comes within the
//! limit makes it look twice as long as that took, what does not makes it look half as long as before. So a guest that
//! launches and waits in a loop is served without sleeping, and one that sends a batch now and then costs nothing
//! between. Of a guest with a time slice no more time is spent looking than the slice.
//!
//! Looking is for processors that have nothing else to do. Where another thread wants the processor, which may be the very
//! one that is waited for, it gets it, and nothing is looked for some times, longer each time that it happens again.

use std::time::{Duration, Instant};

use super::budget::Budget;
use crate::accelerator::meter;

/// Less than this is not worth looking.
const LEAST: Duration = Duration::from_micros(4);
/// Looks between two at which another thread may have the processor, and the clock is read.
const LOOKS: u32 = 16;

/// Another thread wants the processor when it comes back so late from those that it was offered to.
const LATE: Duration = Duration::from_micros(10);
/// The most times in a row that nothing is looked for because of that.
const MOST_RESTS: u32 = 1024;

/// How long to look.
#[derive(Debug)]
pub(super) struct Look {
    most: Duration,
    window: Duration,
    budget: Budget,
    crowd: Crowd,
}

/// Whether others want the processor.
#[derive(Debug, Default)]
struct Crowd {
    /// Times that are left to rest.
    rests: u32,
    /// Times to rest when it is met next, less one.
    next: u32,
}

impl Crowd {
    /// Whether to rest this time.
    fn rest(&mut self) -> bool {
        let rests = self.rests > 0;
        self.rests = self.rests.saturating_sub(1);
        rests
    }

    fn met(&mut self) {
        self.rests = self.next + 1;
        self.next = (2 * self.next + 1).min(MOST_RESTS - 1);
    }

    fn not_met(&mut self) {
        self.next /= 2;
    }
}

impl Look {
    /// Looks at most for `most` at a time, and for `slice` of every period.
    pub(super) fn new(most: Duration, slice: Duration) -> Self {
        Self { most, window: Duration::ZERO, budget: Budget::new(slice, meter::now()), crowd: Crowd::default() }
    }

    /// Looks until `come` says so, as long as it is worth it. Whether it did.
    pub(super) fn until(&mut self, mut come: impl FnMut() -> bool) -> bool {
        if come() {
            return true;
        }
        if self.window.is_zero() || self.crowd.rest() || !self.budget.wait(meter::now()).is_zero() {
            return false;
        }
        let begin = Instant::now();
        let mut now = begin;
        let come = loop {
            if (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                come()
            }) {
                self.crowd.not_met();
                break true;
            }
            let before = std::mem::replace(&mut now, Instant::now());
            if now - begin >= self.window {
                self.crowd.not_met();
                break false;
            }
            // Whoever has something to do goes first: a kernel on the CPU, the guest itself.
            std::thread::yield_now();
            if before.elapsed() > LATE {
                self.crowd.met();
                break come();
            }
        };
        if self.budget.limits() {
            self.budget.spend(begin.elapsed(), meter::now());
        }
        come
    }

    /// Learns how long it took until something came.
    pub(super) fn took(&mut self, time: Duration) {
        self.window = if time <= self.most {
            self.window.max(LEAST.max(2 * time)).min(self.most)
        } else {
            Some(self.window / 2).filter(|half| *half >= LEAST).unwrap_or_default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TIME_PERIOD;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn it_looks_as_long_as_things_take_and_no_longer_than_it_may() {
        let check = |most: u32, took: &[u32], windows: &[u32]| {
            let mut look = Look::new(most * US, TIME_PERIOD);
            let seen: Vec<_> = took
                .iter()
                .map(|time| {
                    look.took(*time * US);
                    look.window
                })
                .collect();
            assert_eq!(seen, windows.iter().map(|window| *window * US).collect::<Vec<_>>(), "{took:?}");
        };
        check(200, &[20, 30, 10, 90, 150], &[40, 60, 60, 180, 200]);
        check(200, &[0, 1, 2, 3], &[4, 4, 4, 6]);
        // Things that come seldom are not looked for.
        check(200, &[80, 201, 5000, 5000, 5000, 5000, 5000], &[160, 80, 40, 20, 10, 5, 0]);
        // Never, if it may not.
        check(0, &[1, 10, 500], &[0, 0, 0]);
    }

    #[test]
    fn it_looks_at_least_once_and_not_for_ever() {
        let mut look = Look::new(200 * US, TIME_PERIOD);
        assert!(look.until(|| true));
        let mut looks = 0;
        let mut never = || {
            looks += 1;
            false
        };
        assert!(!look.until(&mut never));
        assert_eq!(looks, 1, "nothing has come soon so far");
        look.took(50 * US);
        let mut looks = 0;
        assert!(look.until(|| {
            looks += 1;
            looks == 10
        }));
        assert!(!look.until(|| false));
    }

    #[test]
    fn a_slice_is_for_looking_too() {
        let mut look = Look::new(1000 * US, Duration::from_millis(1));
        look.took(500 * US);
        let begin = Instant::now();
        // A hundredth of the time, two periods' worth at the start.
        let looks = (0..200).filter(|_| {
            let begin = Instant::now();
            look.until(|| false);
            begin.elapsed() >= 1000 * US
        });
        let (looks, passed) = (looks.count() as u128, begin.elapsed());
        assert!(looks >= 1);
        assert!((looks - 1) * 1000 <= 2000 + passed.as_micros() / 100 + 1000, "{looks} in {passed:?}");
    }

    #[test]
    fn where_others_want_the_processor_it_rests_longer_and_longer() {
        let mut crowd = Crowd::default();
        let mut rests = |met: bool| {
            if met { crowd.met() } else { crowd.not_met() }
            (0..).take_while(|_| crowd.rest()).count()
        };
        let seen: Vec<_> = (0..12).map(|_| rests(true)).collect();
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
        assert_eq!([false, false, true, true].map(rests), [0, 0, 256, 512]);
    }
}
