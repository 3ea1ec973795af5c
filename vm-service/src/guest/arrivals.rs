//! Devices on their way to a guest that runs. Any thread may have one turned back, also in the middle of a step that takes long: a
//! claim waits for drivers, and what is attached first waits until all of the guest's RAM is pinned.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_passthrough::PciAddress;
use vm_passthrough::claim::Cancel;

use super::watch;

/// Those that are on their way. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals(Arc<Mutex<BTreeMap<PciAddress, Weak<OwnedFd>>>>);

impl Arrivals {
    /// Functions that come together from now on, for as long as the answer is kept. It is readable once they are to be turned back.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(super) fn add(&self, functions: &[PciAddress]) -> io::Result<Arc<OwnedFd>> {
        let event = Arc::new(watch::event()?);
        let mut arrivals = self.lock();
        arrivals.retain(|_, event| event.strong_count() > 0);
        arrivals.extend(functions.iter().map(|&address| (address, Arc::downgrade(&event))));
        Ok(event)
    }

    /// Has a function turned back, with those that it comes with, if it is on its way.
    pub(super) fn turn_back(&self, address: PciAddress) {
        if let Some(event) = self.lock().get(&address).and_then(Weak::upgrade) {
            watch::wake(&event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PciAddress, Weak<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is cancelled as `stop` is, and once `event` is readable.
pub(super) fn cancel(stop: &Cancel, event: Arc<OwnedFd>) -> Cancel {
    stop.or(move || {
        let mut fds = [PollFd::new(&*event, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_come_together_are_turned_back_together_and_no_others() {
        let [first, second, other] = ["01:00.0", "01:00.1", "02:00.0"].map(|text| text.parse().unwrap());
        let (arrivals, stop) = (Arrivals::default(), Cancel::default());
        let both = cancel(&stop, arrivals.add(&[first, second]).unwrap());
        let apart = cancel(&stop, arrivals.add(&[other]).unwrap());
        assert!(!both.is_requested() && !apart.is_requested());
        arrivals.turn_back(second);
        assert!(both.is_requested() && !apart.is_requested() && !stop.is_requested());
        stop.request();
        assert!(apart.is_requested());
        // What has come is not turned back, and what comes again is not by what was asked before.
        drop(both);
        arrivals.turn_back(first);
        assert!(!cancel(&Cancel::default(), arrivals.add(&[first]).unwrap()).is_requested());
    }
}
