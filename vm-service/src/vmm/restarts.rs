//! How soon a guest that ended by a reset or a crash is restarted.
//!
//! One that ran for a while is restarted at once, and so is one that comes back for the first time, as installers and boot
//! loaders do. One in a reboot loop will go on so: each time it waits twice as long, up to a
//! limit, so that it keeps neither a processor nor its devices' resets busy, nor fills the log.

use std::time::Duration;

/// A guest that runs so long works.
const WORKS: Duration = Duration::from_secs(10);
/// What the second restart of one that does not work waits.
const FIRST: Duration = Duration::from_millis(100);
/// What none exceeds.
const LONGEST: Duration = Duration::from_secs(10);

/// The restarts of a guest.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// Those in a row of a guest that ran for less than [`WORKS`].
    in_a_row: u32,
}

impl Restarts {
    /// Takes one up, of a guest that ran so long; what to wait before it.
    pub(super) fn after(&mut self, ran: Duration) -> Duration {
        self.in_a_row = if ran < WORKS { self.in_a_row.saturating_add(1) } else { 0 };
        match self.in_a_row.checked_sub(2) {
            None => Duration::ZERO,
            Some(doubled) => FIRST.saturating_mul(1u32.checked_shl(doubled).unwrap_or(u32::MAX)).min(LONGEST),
        }
    }

    /// Restarts in a row of a guest that does not work, where the log is to tell of this one: of every one at first, then of
    /// the 4th, the 8th and so on.
    pub(super) fn to_tell(&self) -> Option<u32> {
        (self.in_a_row == 0 || self.in_a_row.is_power_of_two()).then_some(self.in_a_row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_comes_back_at_once_waits_longer_each_time() {
        let mut restarts = Restarts::default();
        let mut check = |ran: f64, waits: f64, tells: Option<u32>| {
            let got = restarts.after(Duration::from_secs_f64(ran));
            assert_eq!((got.as_secs_f64(), restarts.to_tell()), (waits, tells));
        };
        for (waits, tells) in [
            (0.0, Some(1)),
            (0.1, Some(2)),
            (0.2, None),
            (0.4, Some(4)),
            (0.8, None),
            (1.6, None),
            (3.2, None),
            (6.4, Some(8)),
            (10.0, None),
            (10.0, None),
        ] {
            check(0.1, waits, tells);
        }
        // One that works is restarted as ever.
        check(10.0, 0.0, Some(0));
        check(3600.0, 0.0, Some(0));
        check(9.9, 0.0, Some(1));
        check(0.0, 0.1, Some(2));
        for _ in 0..100 {
            restarts.after(Duration::ZERO);
        }
        assert_eq!(restarts.after(Duration::ZERO), LONGEST);
    }
}
