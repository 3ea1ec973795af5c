//! The order of a program's calls over all its threads.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, fence};

/// How long a call waits for those before it: none takes longer but what lets others go on, and compilers.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often one that waits looks whether a call before it is held up, whose time does not count.
const STEP: Duration = Duration::from_secs(10);
/// How often a call looks for its turn before it sleeps.
const SPINS: u32 = if cfg!(loom) { 0 } else { 2000 };

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Turn {
    next: AtomicU64,
    waiting: AtomicUsize,
    held: AtomicUsize,
    ended: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

/// A call that has no turn any more: its ticket was used, calls before it did not come, or the session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct NoTurn;

impl Turn {
    /// Waits for the turn of a ticket.
    pub(super) fn wait(&self, ticket: u64) -> Result<(), NoTurn> {
        #[cfg_attr(loom, expect(clippy::reversed_empty_ranges, reason = "loom spins by itself"))]
        for _ in 0..SPINS {
            match self.next.load(Ordering::Acquire) {
                next if next == ticket => return Ok(()),
                next if next > ticket => return Err(NoTurn),
                _ => std::hint::spin_loop(),
            }
        }
        let mut until = Instant::now() + PATIENCE;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Of one that waits and one that passes the turn on, at least one sees the other.
        fence(Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let result = loop {
            let next = self.next.load(Ordering::SeqCst);
            if self.is_held() {
                until = Instant::now() + PATIENCE;
            }
            let left = until.saturating_duration_since(Instant::now()).min(STEP);
            if next == ticket {
                break Ok(());
            }
            if next > ticket || left.is_zero() || self.ended.load(Ordering::SeqCst) {
                break Err(NoTurn);
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(guard);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// It is the turn of the call behind a ticket.
    pub(super) fn pass(&self, ticket: u64) {
        self.next.store(ticket + 1, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.look();
        }
    }

    /// Holds up the call whose turn it is, and so those behind it, for a time at most, until something is so or nobody waits any more. Who makes it so
    /// [says](Self::look) that.
    pub(super) fn hold(&self, time: Duration, is_so: impl Fn() -> bool) {
        let until = Instant::now() + time;
        self.held.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.ended.load(Ordering::SeqCst) || is_so() {
                break;
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        self.held.fetch_sub(1, Ordering::SeqCst);
    }

    /// Is a call held up?
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst) > 0
    }

    /// Has those who wait look again.
    pub(super) fn look(&self) {
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Nobody waits any more.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.look();
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn check(f: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(f);
    }

    #[test]
    fn interleavings_of_tickets() {
        check(|| {
            let (turn, made) = (Arc::new(Turn::default()), Arc::new(AtomicU64::new(0)));
            let later: Vec<_> = [1, 2]
                .into_iter()
                .map(|ticket| {
                    let (turn, made) = (Arc::clone(&turn), Arc::clone(&made));
                    thread::spawn(move || {
                        turn.wait(ticket).unwrap();
                        assert_eq!(made.load(Ordering::Relaxed), ticket - 1);
                        made.store(ticket, Ordering::Relaxed);
                        turn.pass(ticket);
                    })
                })
                .collect();
            turn.wait(0).unwrap();
            turn.pass(0);
            later.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn interleavings_of_an_end() {
        check(|| {
            let turn = Arc::new(Turn::default());
            let waiter = {
                let turn = Arc::clone(&turn);
                thread::spawn(move || turn.wait(1))
            };
            let holder = {
                let turn = Arc::clone(&turn);
                thread::spawn(move || turn.hold(PATIENCE, || false))
            };
            turn.end();
            assert_eq!(waiter.join().unwrap(), Err(NoTurn));
            holder.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn calls_are_made_in_the_order_of_their_tickets() {
        let (turn, made) = (Arc::new(Turn::default()), Arc::new(Mutex::new(Vec::new())));
        let threads: Vec<_> = (0..8u64)
            .rev()
            .map(|ticket| {
                let (turn, made) = (turn.clone(), made.clone());
                std::thread::spawn(move || {
                    turn.wait(ticket).unwrap();
                    made.lock().unwrap().push(ticket);
                    turn.pass(ticket);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*made.lock().unwrap(), (0..8).collect::<Vec<_>>());
        assert_eq!(turn.wait(3), Err(NoTurn));
        turn.end();
        assert_eq!(turn.wait(9), Err(NoTurn));
    }
}
