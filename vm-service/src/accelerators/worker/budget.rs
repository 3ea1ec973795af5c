//! The time slice: how much of every period the guest may keep the accelerator busy.

use std::time::Duration;

use crate::accelerators::meter::Reading;
use crate::config::TIME_PERIOD;

/// What the guest has used of its time. It gains `slice` in every period, keeps at most two periods' worth, and may fall
/// into debt by what one batch takes. All times are those of [`meter::now`](crate::accelerators::meter::now).
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    slice: Duration,
    /// In nanoseconds; below zero it is a debt.
    balance: i128,
    at: Duration,
}

impl Budget {
    /// A budget that nothing was taken of.
    pub(super) fn new(slice: Duration, now: Duration) -> Self {
        Self { slice: slice.min(TIME_PERIOD), balance: slice.as_nanos() as i128, at: now }
    }

    /// A budget where the one before left it, as `reading` has it.
    pub(super) fn resume(slice: Duration, now: Duration, reading: &Reading) -> Self {
        let mut budget =
            Self { balance: reading.balance.into(), at: reading.at.min(now), ..Self::new(slice, now) };
        budget.refill(now);
        budget
    }

    /// Where it stands, for [`resume`](Self::resume).
    pub(super) fn reading(&self, since: Option<Duration>) -> Reading {
        let least = i64::MIN.into();
        Reading { balance: self.balance.max(least) as i64, at: self.at, since }
    }

    /// Whether there is a limit at all.
    pub(super) fn limits(&self) -> bool {
        self.slice < TIME_PERIOD
    }

    /// Takes what was used.
    pub(super) fn spend(&mut self, used: Duration, now: Duration) {
        self.refill(now);
        self.balance -= used.as_nanos() as i128;
    }

    /// How long the guest must wait before it may use the accelerator again.
    pub(super) fn wait(&mut self, now: Duration) -> Duration {
        self.refill(now);
        if self.balance >= 0 || self.slice.is_zero() {
            return Duration::ZERO;
        }
        let periods = -self.balance * TIME_PERIOD.as_nanos() as i128 / self.slice.as_nanos() as i128;
        Duration::from_nanos(u64::try_from(periods).unwrap_or(u64::MAX))
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos() as i128;
        self.at = now;
        let gained = passed * self.slice.as_nanos() as i128 / TIME_PERIOD.as_nanos() as i128;
        self.balance = (self.balance + gained).min(2 * self.slice.as_nanos() as i128);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_debt_is_waited_out() {
        let start = Duration::from_secs(1000);
        let mut budget = Budget::new(Duration::from_millis(20), start);
        assert_eq!(budget.wait(start), Duration::ZERO);
        budget.spend(Duration::from_millis(40), start);
        assert_eq!(budget.wait(start), Duration::from_millis(100));
        let later = start + Duration::from_millis(60);
        assert_eq!(budget.wait(later), Duration::from_millis(40));
        assert_eq!(budget.wait(start + Duration::from_secs(9)), Duration::ZERO);
        // What was not used is kept for two periods only.
        budget.spend(Duration::from_millis(40), start + Duration::from_secs(9));
        assert_eq!(budget.wait(start + Duration::from_secs(9)), Duration::ZERO);
        budget.spend(Duration::from_millis(1), start + Duration::from_secs(9));
        assert_eq!(budget.wait(start + Duration::from_secs(9)), Duration::from_millis(5));
    }

    #[test]
    fn what_is_owed_is_owed_after_a_new_start() {
        let (start, slice) = (Duration::from_secs(1000), Duration::from_millis(5));
        let mut budget = Budget::new(slice, start);
        budget.spend(Duration::from_secs(2), start);
        let left = budget.reading(None);
        for (later, wait) in [(0, 39_900), (10_000, 29_900), (39_900, 0), (1 << 40, 0)] {
            let now = start + Duration::from_millis(later);
            assert_eq!(Budget::resume(slice, now, &left).wait(now), Duration::from_millis(wait), "{later}");
        }
        // Whatever is read harms nobody.
        for balance in [i64::MIN, i64::MAX] {
            for at in [Duration::ZERO, start, Duration::from_nanos(u64::MAX)] {
                let mut budget = Budget::resume(slice, start, &Reading { balance, at, since: None });
                assert_eq!(budget.wait(start).is_zero(), balance > 0);
                assert!(budget.reading(None).balance <= 10_000_000);
                budget.spend(Duration::MAX, start);
                assert_eq!(budget.reading(None).balance, i64::MIN);
            }
        }
    }

    proptest! {
        #[test]
        fn no_more_is_used_than_the_slices_and_one_batch(
            slice in 1u64..=100,
            batches in prop::collection::vec(0u64..500, 1..100),
        ) {
            let start = Duration::from_secs(1000);
            let (mut now, mut used) = (start, Duration::ZERO);
            let mut budget = Budget::new(Duration::from_millis(slice), start);
            for batch in &batches {
                now += budget.wait(now);
                let batch = Duration::from_millis(*batch);
                now += batch;
                used += batch;
                budget.spend(batch, now);
            }
            let longest = batches.iter().max().copied().unwrap_or(0);
            let earned = (now - start).as_secs_f64() * slice as f64 / 100.0;
            let most = earned + 2.0 * slice as f64 / 1e3 + longest as f64 / 1e3;
            prop_assert!(used.as_secs_f64() <= most + 1e-3, "{used:?} of {most}");
        }
    }
}
