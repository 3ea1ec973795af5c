//! Errors of calls that nobody waited for, until a later call returns them.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::session::locked;

/// The key of what threads left that have ended.
const ENDED: u64 = 0;

/// The first untold error of each thread.
#[derive(Debug, Default)]
pub(super) struct Untold {
    last: AtomicU64,
    count: AtomicUsize,
    errors: Mutex<BTreeMap<u64, Error>>,
}

#[derive(Clone, Copy, Debug)]
struct Error {
    code: u32,
    /// Whether another thread was told, or need not be.
    is_known: bool,
}

impl Untold {
    /// The number of a new thread.
    pub(super) fn thread(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn change<T>(&self, change: impl FnOnce(&mut BTreeMap<u64, Error>) -> T) -> T {
        let mut errors = locked(&self.errors);
        let result = change(&mut errors);
        self.count.store(errors.len(), Ordering::SeqCst);
        result
    }

    /// Keeps the first error of a thread. If the call was work, such as a launch, other threads get the error too.
    pub(super) fn keep(&self, thread: u64, code: u32, is_work: bool) {
        self.change(|errors| _ = errors.entry(thread).or_insert(Error { code, is_known: !is_work }));
    }

    /// Returns and removes a thread's error, or returns 0. A call that waits for the device also gets, once, the error of work in another thread: the
    /// work that it waits for was not done.
    pub(super) fn tell(&self, thread: u64, waits: bool) -> u32 {
        if self.count.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        self.change(|errors| {
            if let Some(own) = errors.remove(&thread) {
                return own.code;
            }
            let Some((key, error)) = errors.iter_mut().find(|(_, error)| waits && !error.is_known) else {
                return 0;
            };
            let (key, code) = (*key, error.code);
            error.is_known = true;
            if key == ENDED {
                errors.remove(&key);
            }
            code
        })
    }

    /// Ends a thread. Its error goes to the next call that waits.
    pub(super) fn end(&self, thread: u64) {
        if self.count.load(Ordering::SeqCst) > 0 {
            self.change(|errors| {
                if let Some(error) = errors.remove(&thread).filter(|error| !error.is_known) {
                    errors.entry(ENDED).or_insert(error);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_told_what_failed_in_other_threads() {
        let untold = Untold::default();
        let (one, two) = (untold.thread(), untold.thread());
        assert_eq!(untold.tell(two, true), 0);
        untold.keep(one, 1, true);
        untold.keep(one, 2, true);
        assert_eq!([false, true, true].map(|waits| untold.tell(two, waits)), [0, 1, 0]);
        assert_eq!([untold.tell(one, false), untold.tell(one, true)], [1, 0]);
        for (thread, code) in [(one, 3), (two, 4)] {
            untold.keep(thread, code, true);
            untold.end(thread);
        }
        assert_eq!(locked(&untold.errors).len(), 1, "it does not grow with threads");
        let three = untold.thread();
        assert_eq!([false, true, true].map(|waits| untold.tell(three, waits)), [0, 3, 0]);
        untold.keep(three, 5, true);
        assert_eq!(untold.tell(one, true), 5);
        untold.end(three);
        assert_eq!(untold.tell(one, true), 0, "it was told");
        untold.keep(one, 6, false);
        assert_eq!([untold.tell(three, true), untold.tell(one, false)], [0, 6]);
    }
}
