//! What a guest holds, all its programs together, against what it may.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a guest has only so much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Modules,
    /// Kernels of all its modules.
    Kernels,
    /// Bytes of code of all its modules.
    Code,
    Buffers,
    /// Ranges of its memory under buffers.
    Ranges,
    /// Bytes of the accelerator's memory.
    Held,
    /// Bytes of its own memory under buffers.
    Imported,
}

impl Resource {
    const ALL: [Self; 7] =
        [Self::Modules, Self::Kernels, Self::Code, Self::Buffers, Self::Ranges, Self::Held, Self::Imported];
}

/// So much of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount([u64; Resource::ALL.len()]);

impl Amount {
    /// So much of some resources, and nothing of the others.
    pub(super) fn of(parts: &[(Resource, u64)]) -> Self {
        let mut amount = Self::default();
        for (resource, count) in parts {
            amount.0[*resource as usize] = *count;
        }
        amount
    }
}

/// What a guest holds, and what it may hold. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    now: Arc<Mutex<Amount>>,
    most: Amount,
}

impl Usage {
    /// Nothing yet of at most so much.
    pub(super) fn new(most: Amount) -> Self {
        Self { now: Arc::default(), most }
    }

    fn amount(&self) -> MutexGuard<'_, Amount> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much of a resource is held.
    pub(super) fn now(&self, resource: Resource) -> u64 {
        self.amount().0[resource as usize]
    }

    /// Takes some more, until the charge is dropped.
    ///
    /// # Errors
    /// The first resource of which there is not enough; nothing was taken then.
    pub(super) fn charge(&self, more: Amount) -> Result<Charge, Resource> {
        let mut amount = self.amount();
        let mut sum = *amount;
        for resource in Resource::ALL {
            let index = resource as usize;
            let fits = sum.0[index].checked_add(more.0[index]).filter(|sum| *sum <= self.most.0[index]);
            sum.0[index] = fits.ok_or(resource)?;
        }
        *amount = sum;
        Ok(Charge { usage: self.clone(), amount: more })
    }
}

/// A part of what a guest holds.
#[derive(Debug)]
pub(super) struct Charge {
    usage: Usage,
    amount: Amount,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut amount = self.usage.amount();
        for (held, part) in amount.0.iter_mut().zip(self.amount.0) {
            // It was added before.
            *held = held.saturating_sub(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Resource::{Held, Kernels, Modules, Ranges};
    use super::*;

    #[test]
    fn what_is_dropped_can_be_taken_again() {
        let usage = Usage::new(Amount::of(&[(Modules, 2), (Held, 100)]));
        let charge = |modules, held| usage.charge(Amount::of(&[(Modules, modules), (Held, held)]));
        let first = charge(1, 60).unwrap();
        assert_eq!(charge(0, 41).unwrap_err(), Held);
        assert_eq!(charge(2, 41).unwrap_err(), Modules);
        assert_eq!(charge(0, u64::MAX).unwrap_err(), Held);
        for none in [Kernels, Ranges] {
            assert_eq!(usage.charge(Amount::of(&[(none, 1)])).unwrap_err(), none);
        }
        let second = charge(1, 40).unwrap();
        assert_eq!((usage.now(Modules), usage.now(Held)), (2, 100));
        drop(first);
        assert_eq!((usage.now(Modules), usage.now(Held)), (1, 40));
        drop(second);
        assert_eq!((usage.now(Modules), usage.now(Held)), (0, 0));
    }
}
