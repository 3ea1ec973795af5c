//! The lock of a function, which a process holds while it changes the function.
//!
//! A write to sysfs is made by a helper process (the `host::sys` module), which may outlive the process that asked for it. Such
//! an orphan may have its write still before it, or be asleep in it: whoever found the function with its former driver
//! meanwhile, and forgot the claim, would leave it without any once the orphan goes on.
//!
//! So a function is changed only under a lock (flock(2)) on `STATE/locks/ADDRESS`, and each helper shares that lock
//! until it ends: as long as one lives, nobody else gets it. Who has it next reads what the function is like after that.
//! The files stay. Each names the process that locked it last.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags};

use super::BindError;
use crate::deadlines::until;
use crate::ledger::{self, EXCLUSIVE, LedgerError, Owner};
use crate::readiness::holders;
use crate::{Host, PciAddress, pci};

const LOCKS: &str = "locks";

/// The right to change a function, until it is dropped and all helpers that share it have ended.
#[derive(Debug)]
pub(crate) struct FunctionLock {
    address: PciAddress,
    file: File,
}

impl FunctionLock {
    /// Waits for the lock; `None` when the deadline passes first.
    ///
    /// # Errors
    /// When the lock's file can't be made or used.
    pub(crate) fn take(
        host: &Host,
        address: PciAddress,
        deadline: Duration,
    ) -> Result<Option<Self>, LedgerError> {
        Self::take_as(host, address, EXCLUSIVE, deadline, || false)
    }

    /// Like [`take`](Self::take), exclusively or shared. Returns `None` also when `is_given_up` does.
    fn take_as(
        host: &Host,
        address: PciAddress,
        how: FlockOperation,
        deadline: Duration,
        is_given_up: impl Fn() -> bool,
    ) -> Result<Option<Self>, LedgerError> {
        let (name, owner) = (address.to_string(), ledger::this_process(host));
        match ledger::lock_file(host, (LOCKS, &name), how, &owner, deadline, is_given_up) {
            Ok((_, file)) => Ok(Some(Self { address, file })),
            Err(LedgerError::Busy { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The function.
    pub(crate) fn address(&self) -> PciAddress {
        self.address
    }

    /// What helpers share.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the error of a process that waited for a function's lock until `deadline` had passed.
pub(super) fn timed_out(host: &Host, address: PciAddress, deadline: Duration) -> BindError {
    let path = host.state.join(LOCKS).join(address.to_string());
    let holder: Option<Owner> =
        ledger::open(&path, OFlags::RDONLY).ok().and_then(|file| ledger::read_owner(&file));
    BindError::Locked { address, holder, deadline, users: holders(host, address) }
}

/// The locks of several functions. They are taken in the order of addresses, so that no two processes wait for each other.
#[derive(Debug, Default)]
pub(crate) struct FunctionLocks {
    held: BTreeMap<PciAddress, FunctionLock>,
    /// Shared locks of the physical functions of virtual ones, whose number does not change while they are held.
    physical: Vec<FunctionLock>,
}

impl FunctionLocks {
    /// Waits for the locks of all these functions.
    ///
    /// # Errors
    /// When a lock is not free before `until`, `is_given_up` returns true, or a lock's file can't be used. No lock is held then.
    pub(crate) fn take(
        host: &Host,
        functions: &BTreeSet<PciAddress>,
        deadline: Duration,
        until: Instant,
        is_given_up: impl Fn() -> bool,
    ) -> Result<Self, BindError> {
        let mut wanted: BTreeMap<_, _> = functions.iter().map(|&address| (address, EXCLUSIVE)).collect();
        for physical in functions.iter().filter_map(|&address| pci::physical_function(host, address)) {
            wanted.entry(physical).or_insert(FlockOperation::NonBlockingLockShared);
        }
        let mut locks = Self::default();
        for (address, how) in wanted {
            let left = until.saturating_duration_since(Instant::now());
            let lock = FunctionLock::take_as(host, address, how, left, &is_given_up)?;
            let lock = lock.ok_or_else(|| timed_out(host, address, deadline))?;
            if how == EXCLUSIVE {
                locks.held.insert(address, lock);
            } else {
                locks.physical.push(lock);
            }
        }
        Ok(locks)
    }

    /// Waits for the locks of these functions, and returns those that are free before `until`, so that one stuck function does
    /// not block the release of the others.
    pub(super) fn take_free(
        host: &Host,
        functions: &BTreeSet<PciAddress>,
        until: Instant,
    ) -> Result<Self, LedgerError> {
        let mut locks = Self::default();
        for &address in functions {
            let left = until.saturating_duration_since(Instant::now());
            locks.held.extend(FunctionLock::take(host, address, left)?.map(|lock| (address, lock)));
        }
        Ok(locks)
    }

    /// Waits for the locks of functions that are about to be removed. `only_free` skips those that are not free in time.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub(crate) fn take_all(
        host: &Host,
        functions: &[PciAddress],
        deadline: Duration,
        only_free: bool,
    ) -> Result<Self, BindError> {
        let (functions, until) = (functions.iter().copied().collect(), until(deadline));
        match only_free {
            true => Ok(Self::take_free(host, &functions, until)?),
            false => Self::take(host, &functions, deadline, until, || false),
        }
    }

    /// Returns the lock of one of the functions.
    pub(super) fn get(&self, address: PciAddress) -> Option<&FunctionLock> {
        self.held.get(&address)
    }

    /// Whether all of these functions are locked.
    pub(super) fn cover(&self, functions: impl IntoIterator<Item = PciAddress>) -> bool {
        functions.into_iter().all(|address| self.held.contains_key(&address))
    }

    /// Drops the lock of a function whose helper is stuck. The helper keeps its share until it ends, and nothing may be written
    /// before.
    pub(super) fn surrender(&mut self, address: PciAddress) {
        self.held.remove(&address);
    }
}
