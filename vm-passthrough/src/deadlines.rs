//! How long a device is waited for, in one table: what waits for another wait is made of it and is longer, so that the inner one
//! ends first and says what it was.
//!
//! The Linux kernel's own waits within a system call are not among these. They can't be ended from here, and end by
//! themselves: for a function that never answers its reset, after a minute for each way to reset it.

use std::time::{Duration, Instant};

/// What a wait has beyond all that it waits for.
pub const SLACK: Duration = Duration::from_secs(5);

/// A function answers after it was woken. PCI Express Base 6.0, 6.6.1 allows 1 s before it must at least ask for more time; the
/// Linux kernel waits up to 60 s for the slowest devices while it resets, so this comes on top.
pub const WAKE: Duration = Duration::from_secs(10);

/// Nobody writes the ledger, for who only looks at a claim.
pub const LEDGER_READ: Duration = Duration::from_secs(1);

/// The ledger is unlocked. A process holds it to read or write records, which takes milliseconds.
pub const LEDGER: Duration = Duration::from_secs(10);

/// An access to a function's drivers, or the wait for its lock, in a command that can be repeated.
pub const DRIVERS: Duration = Duration::from_secs(10);

/// Virtual functions are created or removed: hundreds, maybe, and the host's drivers of those that have one come and go.
pub const VFS: Duration = Duration::from_secs(120);

/// Functions are unlocked, for a guest that would end otherwise. Another command may claim the eight functions of a slot and
/// release them again, each by an override, an unbind and a bind, and it records each step.
pub const FUNCTIONS: Duration = sum(&[DRIVERS, sum(&[sum(&[DRIVERS, DRIVERS, DRIVERS, LEDGER]); 8 * 2])]);

/// A write to `reset_method` returns.
pub const RESET_METHOD: Duration = Duration::from_secs(5);

/// A function that the Linux kernel has locked for something else is unlocked.
pub const LOCKED: Duration = Duration::from_secs(5);

/// All steps of a reset together: locks, writes to `reset_method`, and the function's answers. A function that was pulled must
/// not be waited for once a step.
pub const RESET_STEPS: Duration = Duration::from_secs(15);

/// A reset: the function is woken, the steps, and the methods are put back.
pub const RESET: Duration = sum(&[WAKE, RESET_STEPS, RESET_METHOD]);

/// A GPU that was reset says which chip it is: it runs its own firmware first. No source says how long that may take.
pub const GPU_BOOT: Duration = Duration::from_secs(5);

/// A BAR is taken out of the reach of the guest's other devices: a piece of another that is being mapped is done, and its own are
/// unmapped. For 256 GiB by pages of 4 KiB that takes some seconds.
pub const PEERS: Duration = Duration::from_secs(15);

/// An access of a guest to its device. It may wait for a reset that is under way, and then for one that comes before it or is
/// its own; more never follow each other, as those who wait for one share it. Before each, BARs are taken from the guest.
pub const ACCESS: Duration = sum(&[PEERS, RESET, PEERS, RESET, SLACK]);

/// The Linux kernel has a router's PCIe tunnel built or taken down: messages to each router on the way, each tried several times.
pub const TUNNEL: Duration = Duration::from_secs(20);

/// The functions behind a tunnel come, or go with their drivers: the links are trained, the buses scanned, and drivers unbound.
pub const ENUMERATION: Duration = Duration::from_secs(30);

/// The functions of another enclosure have come.
pub const OTHERS_COME: Duration = sum(&[TUNNEL, ENUMERATION, SLACK]);

/// A function behind a tunnel says who it is.
pub const HEARTBEAT: Duration = Duration::from_secs(2);

/// A clock, or a fan, of a GPU is what it was set to: a fan that stood still takes seconds.
pub const SETTLE: Duration = Duration::from_secs(6);

/// Processes that use an eGPU end that by themselves, once it is to be disconnected.
pub const WORK: Duration = Duration::from_secs(30);

/// A process ends after a signal, for what can't wait for it: SIGKILL follows, or it is passed over.
pub const SIGNAL: Duration = Duration::from_secs(3);

/// When a deadline that begins now passes. One beyond what the clock can tell is a year away.
pub(crate) fn until(deadline: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let now = Instant::now();
    now + deadline.min(YEAR)
}

/// The sum of several waits.
pub const fn sum(waits: &[Duration]) -> Duration {
    match waits {
        [] => Duration::ZERO,
        [first, others @ ..] => first.saturating_add(sum(others)),
    }
}

/// A wait for any of several others.
pub const fn longer_than(waits: &[Duration]) -> Duration {
    let (mut longest, mut rest) = (Duration::ZERO, waits);
    while let [first, others @ ..] = rest {
        if first.as_nanos() > longest.as_nanos() {
            longest = *first;
        }
        rest = others;
    }
    longest.saturating_add(SLACK)
}

/// Whether a wait outlasts another.
pub const fn outlasts(outer: Duration, inner: Duration) -> bool {
    outer.as_nanos() > inner.as_nanos()
}

const _: () = assert!(outlasts(FUNCTIONS, sum(&[DRIVERS, LEDGER])) && outlasts(LEDGER, LEDGER_READ));
const _: () = assert!(outlasts(RESET_STEPS, LOCKED) && outlasts(RESET_STEPS, RESET_METHOD));
const _: () = assert!(outlasts(RESET, RESET_STEPS) && outlasts(RESET, WAKE));
const _: () = assert!(outlasts(ACCESS, sum(&[PEERS, RESET, PEERS, RESET])));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_waits_are_made_of_inner_ones() {
        let seconds = Duration::from_secs;
        assert_eq!(sum(&[]), seconds(0));
        assert_eq!(sum(&[seconds(1), seconds(2), seconds(4)]), seconds(7));
        assert_eq!(sum(&[Duration::MAX, seconds(2)]), Duration::MAX);
        assert_eq!(longer_than(&[seconds(3), seconds(9), seconds(2)]), seconds(9) + SLACK);
        assert!(outlasts(seconds(2), seconds(1)) && !outlasts(seconds(1), seconds(1)));
    }
}
