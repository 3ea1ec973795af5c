//! Deadlines that end the worker: of what can't be stopped otherwise.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is under way, each with the time by which it must be over. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    under_way: BTreeMap<u64, (Instant, &'static str)>,
}

/// Something that is under way until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    watch: Watch,
    number: u64,
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins something that must be over after `limit`.
    pub(super) fn begin(&self, what: &'static str, limit: Duration) -> UnderWay {
        let now = Instant::now();
        // A limit beyond the clock's range is a year.
        let until = now.checked_add(limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.under_way.insert(number, (until, what));
        UnderWay { watch: self.clone(), number }
    }

    /// What should be over by now.
    pub(super) fn overdue(&self, now: Instant) -> Option<&'static str> {
        self.state().under_way.values().find(|(until, _)| now >= *until).map(|(_, what)| *what)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.watch.state().under_way.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_under_way_can_be_overdue() {
        let watch = Watch::default();
        let now = Instant::now();
        let long = watch.begin("long", Duration::MAX);
        let short = watch.begin("short", Duration::from_secs(1));
        assert_eq!(watch.overdue(now), None);
        assert_eq!(watch.overdue(now + Duration::from_secs(5)), Some("short"));
        drop(short);
        assert_eq!(watch.overdue(now + Duration::from_secs(5)), None);
        drop(long);
        assert_eq!(watch.overdue(now + Duration::from_secs(1 << 40)), None);
    }
}
