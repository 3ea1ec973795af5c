//! Takes a function and its companions from their drivers, and returns them, also after a crash.
//!
//! ```text
//! plan (pure) ─▶ ledger (what is about to be done, on disk) ─▶ bind (driver_override, unbind, bind; the outcome read back)
//! ```
//!
//! * [`Plan`] says what has to be taken with a function, or why it must not be.
//! * The [`ledger`](crate::ledger) remembers the former driver of each function from before it is touched until it is back
//!   there. A record of it that was damaged is kept, and stands in the way of its own device only.
//! * Each access to the Linux kernel has a deadline. Past it, [`holders`](crate::readiness::holders) names who is to blame.
//! * An access that outlives its process is waited for before anything else is done with the function (the `lock`
//!   module).
//!
//! Locks have two levels, so that a driver that never returns delays only its own device:
//!
//! * A process locks each function ([`FunctionLocks`]) before it claims, releases, recovers or shares it, and unlocks it when it
//!   has finished. Functions are locked in the order of their addresses. Only these locks are held while a driver is waited for.
//! * The [`Ledger`](crate::ledger::Ledger)'s lock is taken inside of those, for each read and each change of records. A process
//!   that holds it waits for nothing that a device can prolong, and for no other lock.
//! * A record is locked while its claim has an owner, or while a process undoes it. An unlocked record is a dead process's, unless
//!   its claim is persistent and complete. The next process that locks all of its functions undoes it.
//! * Records do not change while the functions that they name are locked. A process that read one before it locked the functions
//!   reads it again afterwards.
//! * The helper of a write that passed its deadline keeps the function locked. The process drops its own share of that lock. To
//!   write again it has to take the lock again, and so it waits until the helper has ended.
//!
//! A function that processes run kernels on is shared ([`SharedLease`]): it is claimed whole only when they have ended,
//! and not shared while it is claimed.
//!
//! Any failure undoes everything, in reverse. What could not be undone, because its owner was killed or the Linux
//! kernel is stuck, stays in the ledger, and the next [`recover`](crate::PassthroughManager::recover),
//! [`release`](crate::PassthroughManager::release) or [`claim`](crate::PassthroughManager::claim) completes it.

mod act;
mod bind;
mod error;
mod lock;
mod plan;
mod recover;
mod share;
mod vfs;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::iommu::VfioDriver;
use crate::ledger::ClaimedFunction;
use crate::pci::PciIds;
use crate::{Host, PciAddress};

pub use error::{BindError, ClaimError};
pub use plan::{Plan, Refusal, Step};
pub use share::SharedLease;
pub use vfs::{VfError, VfOptions};

pub(crate) use act::{HeldClaim, find_persistent, release_persistent, release_unbound, take};
pub(crate) use lock::{FunctionLock, FunctionLocks};
pub use recover::Recovery;
pub(crate) use recover::{recover, recover_near};
pub(crate) use share::share;
pub(crate) use vfs::{create_vfs, remove_vfs};

/// Default timeout of one access to a function's drivers, and of the wait for the locks of functions.
pub const DEADLINE: Duration = crate::deadlines::DRIVERS;

/// Writes an attribute of a function under its lock: what others do with it comes before that or after.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] when `deadline` passes first, also for who waits for the lock.
pub(crate) fn write_locked(
    host: &Host,
    address: PciAddress,
    path: &Path,
    value: &str,
    deadline: Duration,
) -> io::Result<()> {
    let lock = FunctionLock::take(host, address, deadline).map_err(io::Error::other)?;
    let lock = lock.ok_or(io::ErrorKind::TimedOut)?;
    host.writer().write_locked(path, value, deadline, lock.file())
}

/// Unbinds a locked function from its driver. The ledger does not record that: the caller is about to remove the function.
///
/// # Errors
/// When the Linux kernel refuses, or does not let go of it before `deadline`.
pub(crate) fn unbind(
    host: &Host,
    address: PciAddress,
    locks: Option<&FunctionLocks>,
    deadline: Duration,
) -> Result<(), BindError> {
    let binder = bind::Binder::new(host, deadline);
    let Some(driver) = binder.driver(address)? else { return Ok(()) };
    let lock = locks.and_then(|locks| locks.get(address));
    let lock = lock.ok_or_else(|| lock::timed_out(host, address, deadline))?;
    binder.unbind(lock, &driver)?;
    match binder.driver(address)? {
        None => Ok(()),
        found => Err(BindError::WrongDriver { address, expected: "no driver".into(), found }),
    }
}

/// Asks that a claim under way be given up: from any thread, at any time. Clones are the same handle.
#[derive(Clone, Default)]
pub struct Cancel {
    requested: Arc<AtomicBool>,
    /// What requests it as well.
    also: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl Cancel {
    /// Asks. It can't be taken back, and only stores a flag: the claim notices before its next step, and undoes those that
    /// it made.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Release);
    }

    /// One that is requested when this one is, and when `also` says so, which is asked before each step: requesting it does not
    /// request this one.
    #[must_use]
    pub fn or(&self, also: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        let this = self.clone();
        Self { requested: Arc::default(), also: Some(Arc::new(move || this.is_requested() || also())) }
    }

    /// Whether it was asked.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire) || self.also.as_ref().is_some_and(|also| also())
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.is_requested()).finish()
    }
}

impl PartialEq for Cancel {
    /// Whether they are the same handle.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.requested, &other.requested)
    }
}

impl Eq for Cancel {}

/// How to claim. It grows: make one by [`default`](Self::default), and assign what differs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimOptions {
    /// Whether the claim lives until it is released, by any process. Otherwise it lives as long as this process, or
    /// until it releases it.
    pub persistent: bool,
    /// Whether a persistent claim is this process's alone until [`keep`](crate::PassthroughManager::keep): several are so made
    /// all or none, whenever the process dies.
    pub tentative: bool,
    /// Whether to take the functions of other slots in the IOMMU group too.
    pub with_group: bool,
    /// Whether to take it although [`explain`](crate::readiness::explain) says that the host uses it (a mounted disk,
    /// the boot display, the default route, open files) or that it does not respond.
    pub force: bool,
    /// How long each access to a function's drivers may take.
    pub deadline: Duration,
    /// Timeout of the wait for the functions' locks, which other processes hold while they claim or release them.
    pub lock_deadline: Duration,
    /// Who may ask that the claim be given up before it is complete.
    pub cancel: Option<Cancel>,
    /// Name of the guest that it is for, which the ledger notes for people to read.
    pub guest: Option<String>,
    /// The functions that may be claimed, and which devices they must be; `None` for whatever is there. An address may be another
    /// device's after a boot.
    pub only: Option<BTreeMap<PciAddress, PciIds>>,
    /// Which VFIO driver to bind.
    pub driver: VfioDriver,
    /// Sizes in bytes that BARs get before their function goes to VFIO, by index; they get back the sizes that they had when it
    /// is released. Sizes that a device supports are in [`PciFunction::bar_sizes`](crate::PciFunction::bar_sizes).
    pub bar_sizes: BTreeMap<PciAddress, BTreeMap<u8, u64>>,
}

impl Default for ClaimOptions {
    /// A claim owned by this process, without the rest of the group, not by force, within [`DEADLINE`].
    fn default() -> Self {
        Self {
            persistent: false,
            tentative: false,
            with_group: false,
            force: false,
            deadline: DEADLINE,
            lock_deadline: DEADLINE,
            cancel: None,
            guest: None,
            only: None,
            driver: VfioDriver::Best,
            bar_sizes: BTreeMap::new(),
        }
    }
}

/// A function that is claimed, with its companions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The function that was asked for.
    pub target: PciAddress,
    /// All functions of the claim, in the order in which they were taken, with what they were before.
    pub functions: Vec<ClaimedFunction>,
    /// Whether it lives until it is released.
    pub persistent: bool,
}

impl Claim {
    /// The addresses of its functions, in order.
    pub fn addresses(&self) -> Vec<PciAddress> {
        let mut addresses: Vec<_> = self.functions.iter().map(|function| function.address).collect();
        addresses.sort();
        addresses
    }
}

#[cfg(test)]
mod tests;
