//! Polling for what comes soon, before sleeping until it comes: to be woken takes longer than a small launch.
//!
//! How long it polls follows how long things took of late: what comes within the limit makes it poll twice as long as that
//! took, what does not makes it poll half as long as before. A poll that finds nothing is followed by some times without
//! one, twice as many each time that it happens again. So a guest that launches and waits in a loop is served without
//! sleeping, and one that sends a batch now and then costs next to nothing between. Of a guest with a time slice no more
//! time is spent polling than the slice.
//!
//! Polling is for processors that have nothing else to do. Where others want the processor, one of them may be the very
//! one that is waited for, so polling finds nothing, or the processor is lost meanwhile: both count the same. It does not
//! offer the processor by itself, as who yields is scheduled late when it is woken next.

use std::time::{Duration, Instant};

use super::budget::Budget;
use crate::accelerators::meter;

/// Less than this is not worth polling.
const LEAST: Duration = Duration::from_micros(4);
/// Polls between two readings of the clock.
const POLLS: u32 = 16;
/// Another thread had the processor where this much time passes between two readings of the clock.
const LATE: Duration = Duration::from_micros(15);
/// The most times in a row that nothing is polled for because polling was in vain.
const MOST_RESTS: u32 = 256;

/// How long to poll.
#[derive(Debug)]
pub(super) struct Poll {
    most: Duration,
    window: Duration,
    budget: Budget,
    vain: Vain,
}

/// How often polling was in vain.
#[derive(Debug, Default)]
struct Vain {
    /// Times that are left to rest.
    rests: u32,
    /// Times to rest when it is in vain next, less one.
    next: u32,
}

impl Vain {
    /// Whether to rest this time.
    fn rest(&mut self) -> bool {
        let rests = self.rests > 0;
        self.rests = self.rests.saturating_sub(1);
        rests
    }

    /// Learns whether a poll was in vain.
    fn learn(&mut self, vain: bool) {
        if vain {
            self.rests = self.next + 1;
            self.next = (2 * self.next + 1).min(MOST_RESTS - 1);
        } else {
            self.next /= 2;
        }
    }
}

impl Poll {
    /// Polls at most for `most` at a time, and for `slice` of every period.
    pub(super) fn new(most: Duration, slice: Duration) -> Self {
        let budget = Budget::new(slice, meter::now());
        Self { most, window: Duration::ZERO, budget, vain: Vain::default() }
    }

    /// Polls until `come` says so, as long as it is worth it. Whether it did.
    pub(super) fn until(&mut self, mut come: impl FnMut() -> bool) -> bool {
        if come() {
            return true;
        }
        if self.window.is_zero() || self.vain.rest() || !self.budget.wait(meter::now()).is_zero() {
            return false;
        }
        let begin = Instant::now();
        let mut now = begin;
        let (come, lost) = loop {
            let come = (0..POLLS).any(|_| {
                std::hint::spin_loop();
                come()
            });
            let before = std::mem::replace(&mut now, Instant::now());
            let lost = now - before > LATE;
            if come || lost || now - begin >= self.window {
                break (come, lost);
            }
        };
        self.vain.learn(!come || lost);
        if self.budget.limits() {
            self.budget.spend(now - begin, meter::now());
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
            let mut poll = Poll::new(most * US, TIME_PERIOD);
            let seen: Vec<_> = took
                .iter()
                .map(|time| {
                    poll.took(*time * US);
                    poll.window
                })
                .collect();
            assert_eq!(seen, windows.iter().map(|window| *window * US).collect::<Vec<_>>(), "{took:?}");
        };
        check(200, &[20, 30, 10, 90, 150], &[40, 60, 60, 180, 200]);
        check(200, &[0, 1, 2, 3], &[4, 4, 4, 6]);
        // Things that come seldom are not polled for.
        check(200, &[80, 201, 5000, 5000, 5000, 5000, 5000], &[160, 80, 40, 20, 10, 5, 0]);
        // Never, if it may not.
        check(0, &[1, 10, 500], &[0, 0, 0]);
    }

    #[test]
    fn it_looks_at_least_once_and_not_for_ever() {
        let mut poll = Poll::new(200 * US, TIME_PERIOD);
        assert!(poll.until(|| true));
        let mut polls = 0;
        let mut never = || {
            polls += 1;
            false
        };
        assert!(!poll.until(&mut never));
        assert_eq!(polls, 1, "nothing has come soon so far");
        poll.took(50 * US);
        let mut polls = 0;
        // The thread may lose its processor meanwhile.
        while !poll.until(|| {
            polls += 1;
            polls == 10
        }) {}
        assert_eq!(polls, 10);
        assert!(!poll.until(|| false));
    }

    #[test]
    fn a_slice_is_for_looking_too() {
        let slice = Duration::from_millis(1);
        let begin = Instant::now();
        let mut poll = Poll::new(slice, slice);
        let (mut looked, mut rested) = (Duration::ZERO, false);
        while !rested || looked < slice {
            assert!(begin.elapsed() < Duration::from_secs(60), "{looked:?}, {rested}");
            poll.took(slice);
            // It finds nothing, so it rests at times; that is not what is tested.
            poll.vain = Vain::default();
            let mut times = None;
            let mut asked = 0;
            poll.until(|| {
                asked += 1;
                let now = Instant::now();
                if asked > 1 {
                    times = Some((times.map_or(now, |(first, _)| first), now));
                }
                false
            });
            let Some((first, last)) = times else {
                rested = true;
                continue;
            };
            // What was used is earned again in a hundred times as long.
            let earned = slice + (first - begin) / 100;
            assert!(looked <= earned, "{looked:?} of {earned:?}");
            looked += last - first;
        }
    }

    #[test]
    fn what_is_in_vain_is_done_more_and_more_seldom() {
        let mut vain = Vain::default();
        let mut rests = |is: bool| {
            vain.learn(is);
            (0..).take_while(|_| vain.rest()).count()
        };
        assert_eq!([true; 10].map(&mut rests), [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]);
        assert_eq!([false, false, true, true, false].map(&mut rests), [0, 0, 64, 128, 0]);

        let mut poll = Poll::new(200 * US, TIME_PERIOD);
        let mut polls = |count: u32, come: bool| {
            let looked = (0..count).filter(|_| {
                poll.took(3 * US);
                let mut asked = 0;
                poll.until(|| {
                    asked += 1;
                    come && asked > 1
                });
                asked > 1
            });
            looked.count()
        };
        // Of 1,000 batches for which polling is in vain, it polls at the 1st, 3rd, 6th, 11th, … and then at each 257th.
        assert!((9..=12).contains(&polls(1000, false)));
        // Where it is not, it polls at nearly all.
        assert!(polls(2000, true) > 1000);
    }
}
