//! The order of a program's calls over all its threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a call waits for those before it: none takes longer but what lets others go on, and compilers.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often a call looks for its turn before it sleeps.
const SPINS: u32 = 2000;

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Turn {
    next: AtomicU64,
    waiting: AtomicUsize,
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
        for _ in 0..SPINS {
            match self.next.load(Ordering::Acquire) {
                next if next == ticket => return Ok(()),
                next if next > ticket => return Err(NoTurn),
                _ => std::hint::spin_loop(),
            }
        }
        let until = Instant::now() + PATIENCE;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let result = loop {
            let next = self.next.load(Ordering::SeqCst);
            let left = until.saturating_duration_since(Instant::now());
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
        self.next.store(ticket + 1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Nobody waits any more.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

#[cfg(test)]
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
