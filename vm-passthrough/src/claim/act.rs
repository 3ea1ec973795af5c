//! Carries plans out and undoes them, each step in the ledger first.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use super::bind::Binder;
use super::lock::{self, FunctionLocks};
use super::recover::{Settled, settle, sort};
use super::{BindError, Cancel, Claim, ClaimError, ClaimOptions, Plan, Refusal, Step};
use crate::deadlines::{LEDGER, until};
use crate::iommu::{VFIO_DRIVER, VfioDriver, VfioDrivers, is_vfio_driver};
use crate::ledger::{ClaimedFunction, Entry, Journal, Ledger, LedgerError, Record, wait_point};
use crate::pci::{PciFunction, ScanError};
use crate::readiness::{self, ExplainOptions, Severity};
use crate::{Host, PciAddress, files};

/// Interval between two reads of a claim that another process is making or undoing.
const POLL: Duration = Duration::from_millis(10);

/// A claim that this process holds: the lock on its journal says so to others.
#[derive(Debug)]
pub(crate) struct HeldClaim {
    journal: Journal,
}

impl HeldClaim {
    /// What is claimed.
    pub(crate) fn claim(&self) -> Claim {
        claim_of(&self.journal.entry)
    }

    /// Whether it outlives this process.
    pub(crate) fn is_persistent(&self) -> bool {
        self.journal.entry.is_waiting()
    }

    /// Has a tentative claim outlive this process.
    pub(crate) fn keep(&mut self, _ledger: &Ledger) -> Result<(), LedgerError> {
        self.journal.append(&Record::Claimed)
    }

    /// Releases everything. What could not be released stays in the ledger, and in the claim, to try again.
    pub(crate) fn release(&mut self, host: &Host, deadline: Duration) -> Result<(), ClaimError> {
        let address = self.journal.entry.target;
        let mut locks = FunctionLocks::take_free(host, &functions_of(&self.journal.entry), until(deadline))?;
        undo(host, &mut self.journal, &mut locks, deadline)
            .map_err(|left| ClaimError::HalfReleased { address, left })
    }
}

/// What a record of the ledger says is claimed.
fn claim_of(entry: &Entry) -> Claim {
    Claim { target: entry.target, functions: entry.functions.clone(), persistent: entry.persistent }
}

/// Returns the functions of a record.
pub(super) fn functions_of(entry: &Entry) -> BTreeSet<PciAddress> {
    entry.functions.iter().map(|function| function.address).chain([entry.target]).collect()
}

/// Returns the functions that a claim of `target` may take. The plan selects among them.
pub(super) fn near(host: &Host, target: PciAddress, with_group: bool) -> BTreeSet<PciAddress> {
    let group = files::names(&host.pci_device(target).join("iommu_group/devices")).unwrap_or_default();
    let members = group.iter().filter_map(|name| name.parse().ok());
    members.filter(|member| with_group || target.same_slot(*member)).chain([target]).collect()
}

/// Claims `target`, or takes up the persistent claim of it.
///
/// `scan` is called with the functions locked, after claims of dead processes were undone.
pub(crate) fn take(
    host: &Host,
    target: PciAddress,
    options: &ClaimOptions,
    scan: impl Fn() -> Result<Vec<PciFunction>, ScanError>,
) -> Result<HeldClaim, ClaimError> {
    let is_cancelled = || options.cancel.as_ref().is_some_and(Cancel::is_requested);
    let until = until(options.lock_deadline);
    let mut wanted = near(host, target, options.with_group);
    loop {
        // A claim that is complete is an error at once. Its owner may hold a function's lock for a reset.
        if host.pci_device(target).exists() {
            let ledger = Ledger::lock(host, LEDGER)?;
            let standing = sort(&ledger, |entry| entry.function(target).is_some())?.standing;
            if let Some(journal) = standing.iter().find(|journal| !journal.locked && !is_changing(journal)) {
                return Err(occupied(journal, target));
            }
        }
        let locked = FunctionLocks::take(host, &wanted, options.lock_deadline, until, is_cancelled);
        if is_cancelled() {
            return Err(ClaimError::Failed { cause: Box::new(BindError::Cancelled(target)) });
        }
        let locks = locked.map_err(|cause| not_locked("claim", target, cause))?;
        match take_locked(host, target, options, locks, &scan) {
            Ok(Taken::Claim(claim)) => return Ok(*claim),
            Ok(Taken::Needs(more)) => wanted.extend(more),
            Err(ClaimError::InProgress { .. }) if Instant::now() < until => wait(),
            Err(error) => return Err(error),
        }
    }
}

/// Returns the error of an action that could not lock a function.
pub(super) fn not_locked(action: &'static str, address: PciAddress, cause: BindError) -> ClaimError {
    match cause {
        // No other process holds the lock.
        BindError::Ledger(error) => error.into(),
        cause => ClaimError::Locked { action, address, cause: Box::new(cause) },
    }
}

/// Sleeps before the next look at what another process does.
fn wait() {
    wait_point();
    thread::sleep(POLL);
}

/// The result of one attempt to claim.
enum Taken {
    Claim(Box<HeldClaim>),
    /// The claim needs the locks of these functions too.
    Needs(BTreeSet<PciAddress>),
}

fn take_locked(
    host: &Host,
    target: PciAddress,
    options: &ClaimOptions,
    mut locks: FunctionLocks,
    scan: impl Fn() -> Result<Vec<PciFunction>, ScanError>,
) -> Result<Taken, ClaimError> {
    let failed = match settle(host, &mut locks, options.deadline)? {
        Settled::Needs(more) => return Ok(Taken::Needs(more)),
        Settled::Done(failed) => failed,
    };
    let plan = match Plan::new(&scan()?, target, options, &VfioDrivers::read(host)) {
        // Who has it says more than that it has an unexpected driver.
        Err(refusal @ (Refusal::NoSuchFunction(_) | Refusal::OtherDevice { .. })) => {
            return Err(refusal.into());
        }
        plan => plan,
    };
    let wanted: Vec<_> = match &plan {
        Ok(plan) => plan.steps.iter().map(Step::address).collect(),
        Err(_) => vec![target],
    };

    for failure in failed {
        if let Some(&address) = wanted.iter().find(|&&address| failure.is_about(address)) {
            return Err(failure.into_error(address));
        }
    }
    if !locks.cover(wanted.iter().copied()) {
        return Ok(Taken::Needs(wanted.into_iter().collect()));
    }
    let ledger = Ledger::lock(host, LEDGER)?.for_guest(options.guest.as_ref());
    let of_wanted = |entry: &Entry| wanted.iter().any(|&address| entry.function(address).is_some());
    if let Some(journal) = sort(&ledger, of_wanted)?.standing.into_iter().next() {
        return take_up(host, &ledger, journal, target, &wanted, options)
            .map(|claim| Taken::Claim(Box::new(claim)));
    }
    drop(ledger);

    if !options.force {
        judge(host, target, options)?;
    }
    let plan = plan?;
    let binder = Binder::new(host, options.deadline);
    for step in &plan.steps {
        let Step::Take { vfio_driver, .. } = step else { continue };
        let path = binder.driver_dir(vfio_driver);
        if !path.exists() {
            return Err(ClaimError::NoVfioDriver { driver: vfio_driver.clone(), path });
        }
    }
    let ledger = Ledger::lock(host, LEDGER)?.for_guest(options.guest.as_ref());
    // Not even by force: what runs on it would lose its device.
    for &address in &wanted {
        if let Some(sharer) = ledger.sharers(address)?.into_iter().next() {
            return Err(ClaimError::Shared { address, owner: sharer.owner });
        }
    }
    let mut journal = ledger.create(target, options.persistent)?;
    drop(ledger);
    match carry_out(host, &binder, &mut journal, &locks, &plan, options) {
        Ok(()) => {
            tracing::info!(target_function = %target, functions = plan.steps.len(), "claimed");
            Ok(Taken::Claim(Box::new(HeldClaim { journal })))
        }
        Err(cause) => {
            tracing::warn!(target_function = %target, %cause, "a step of the claim failed, undoing all");
            if let BindError::Stuck { .. } = cause {
                // The stuck write may still change the function. A process that takes a lock now finds the record.
                drop(locks);
                let functions = functions_of(&journal.entry);
                locks = FunctionLocks::take_free(host, &functions, until(options.deadline)).unwrap_or_else(
                    |error| {
                        tracing::warn!(%error, "can't lock the functions of a claim that failed");
                        FunctionLocks::default()
                    },
                );
            }
            let cause = Box::new(cause);
            Err(match undo(host, &mut journal, &mut locks, options.deadline) {
                Ok(()) => ClaimError::Failed { cause },
                Err(left) => ClaimError::HalfUndone { cause, left },
            })
        }
    }
}

/// Whether a process is making this claim or releasing it.
fn is_changing(journal: &Journal) -> bool {
    !journal.locked && (!journal.entry.claimed || journal.entry.releasing)
}

/// Returns the error of an action on a function that has this claim.
pub(super) fn occupied(journal: &Journal, address: PciAddress) -> ClaimError {
    let entry = &journal.entry;
    let user = if journal.locked { None } else { entry.user.clone() };
    let in_use = user.is_some();
    let owner = user.unwrap_or_else(|| entry.owner.clone());
    if is_changing(journal) {
        return ClaimError::InProgress { address, owner, releasing: entry.releasing };
    }
    let persistent = entry.persistent && !in_use;
    ClaimError::Taken { address, owner, persistent, ended: persistent && journal.locked }
}

/// Whether the function is fit to be taken.
fn judge(host: &Host, target: PciAddress, options: &ClaimOptions) -> Result<(), ClaimError> {
    let explain = ExplainOptions { with_group: options.with_group, ..ExplainOptions::default() };
    let readiness = readiness::explain(host, target, &explain)?;
    let is_relevant = |blocker: &readiness::Blocker| {
        blocker.severity == Severity::Blocker && blocker.code.keeps_from_claim()
    };
    if readiness.blockers.iter().any(is_relevant) {
        return Err(ClaimError::NotReady(Box::new(readiness)));
    }
    Ok(())
}

/// Takes up a persistent claim that nobody uses, if that is what is asked for.
fn take_up(
    host: &Host,
    ledger: &Ledger,
    mut journal: Journal,
    target: PciAddress,
    wanted: &[PciAddress],
    options: &ClaimOptions,
) -> Result<HeldClaim, ClaimError> {
    let entry = &journal.entry;
    if !journal.locked || !entry.persistent || options.persistent {
        let covered =
            std::iter::once(&target).chain(wanted).find(|&&address| entry.function(address).is_some());
        return Err(occupied(&journal, covered.copied().unwrap_or(target)));
    }
    if let Some(&missing) = wanted.iter().find(|&&address| entry.function(address).is_none()) {
        return Err(ClaimError::Uncovered { address: target, missing });
    }
    // Its functions are on VFIO, where no BAR can be resized.
    for (&address, sizes) in options.bar_sizes.iter().filter(|(address, _)| wanted.contains(address)) {
        if let Some(&(index, _)) = Binder::new(host, options.deadline).other_sizes(address, sizes).first() {
            return Err(Refusal::BarInUse { address, index, driver: VFIO_DRIVER.into() }.into());
        }
    }
    journal.append(&Record::User(ledger.owner().clone()))?;
    tracing::info!(target_function = %target, "took up its persistent claim");
    Ok(HeldClaim { journal })
}

fn carry_out(
    host: &Host,
    binder: &Binder<'_>,
    journal: &mut Journal,
    locks: &FunctionLocks,
    plan: &Plan,
    options: &ClaimOptions,
) -> Result<(), BindError> {
    let go_on = |address| match &options.cancel {
        Some(cancel) if cancel.is_requested() => Err(BindError::Cancelled(address)),
        _ => Ok(()),
    };
    let mut awake = Vec::new();
    for step in &plan.steps {
        let address = step.address();
        go_on(address)?;
        if !binder.is_cold(address) {
            awake.push(address);
        }
        let lock = locks.get(address).ok_or_else(|| lock::timed_out(host, address, options.lock_deadline))?;
        let driver = binder.driver(address)?;
        let resets = binder.resets(address);
        // It may have come to another driver since the scan.
        let vfio_driver = match step {
            Step::Take { vfio_driver, .. } => vfio_driver,
            Step::Keep { driver: vfio_driver, .. } => vfio_driver,
            Step::Park { .. } => VFIO_DRIVER,
        };
        let stays = |now: &str| match options.driver {
            VfioDriver::Best => is_vfio_driver(now),
            VfioDriver::Named(_) => now == vfio_driver,
        };
        let kept = driver.as_deref().is_some_and(stays);
        let driver_override = if kept { None } else { binder.driver_override(address)? };
        let none = BTreeMap::new();
        let wanted = options.bar_sizes.get(&address).filter(|_| !kept).unwrap_or(&none);
        let function = ClaimedFunction {
            address,
            driver: driver.clone(),
            driver_override,
            resets,
            bar_sizes: binder.other_sizes(address, wanted),
            vfio_driver: if kept { driver.clone().unwrap_or_default() } else { vfio_driver.to_owned() },
            kept,
            restored: false,
        };
        append(host, journal, &Record::Function(function))?;
        match (step, driver) {
            _ if kept => {}
            (Step::Park { .. }, Some(driver)) => binder.unbind(lock, &driver)?,
            (Step::Park { .. }, None) => {}
            (_, driver) => binder.take(lock, driver.as_deref(), vfio_driver, wanted)?,
        }
    }
    // Some devices do not answer any more once their driver has let go of them. One that slept in D3cold may do so again.
    if !options.force {
        awake.into_iter().try_for_each(|address| binder.check_answers(address))?;
    }
    go_on(plan.target)?;
    // Until it says so, recovery undoes it.
    if !(options.persistent && options.tentative) {
        append(host, journal, &Record::Claimed)?;
    }
    Ok(())
}

/// Appends to the record of a claim that this process holds.
fn append(host: &Host, journal: &mut Journal, record: &Record) -> Result<(), LedgerError> {
    let _ledger = Ledger::lock(host, LEDGER)?;
    journal.append(record)
}

/// Returns all functions of a claim to their drivers, in reverse order, and ends it. A function that fails, or whose lock this
/// process does not hold, does not keep the others from being returned.
pub(super) fn undo(
    host: &Host,
    journal: &mut Journal,
    locks: &mut FunctionLocks,
    deadline: Duration,
) -> Result<(), Vec<BindError>> {
    undo_as(host, journal, locks, deadline, |function| function)
}

/// As [`undo`], with what `as_if` makes of each function.
fn undo_as(
    host: &Host,
    journal: &mut Journal,
    locks: &mut FunctionLocks,
    deadline: Duration,
    as_if: impl Fn(ClaimedFunction) -> ClaimedFunction,
) -> Result<(), Vec<BindError>> {
    let binder = Binder::new(host, deadline);
    if !journal.entry.releasing {
        note(host, journal, &Record::Release);
    }
    let mut left = Vec::new();
    for function in journal.undo_order() {
        let address = function.address;
        let restored = match locks.get(address) {
            Some(lock) => binder.restore(lock, &as_if(function)),
            None => Err(lock::timed_out(host, address, deadline)),
        };
        match restored {
            Ok(()) => note(host, journal, &Record::Restored(address)),
            Err(error) => {
                if let BindError::Stuck { .. } = error {
                    locks.surrender(address);
                }
                left.push(error);
            }
        }
    }
    if !left.is_empty() {
        return Err(left);
    }
    let removed = Ledger::lock(host, LEDGER).and_then(|_ledger| journal.remove());
    removed.map_err(|error| vec![error.into()])?;
    tracing::info!(target_function = %journal.entry.target, "released");
    Ok(())
}

/// Records that a claim is being released, before the ledger is unlocked: other processes take an open journal for its owner's.
pub(super) fn begin_release(journal: &mut Journal) {
    if !journal.entry.releasing
        && let Err(error) = journal.append(&Record::Release)
    {
        tracing::warn!(%error, "can't note in the ledger that a release has begun");
    }
}

/// Appends a record that saves work to a later undo, but without which it comes to the same.
fn note(host: &Host, journal: &mut Journal, record: &Record) {
    if let Err(error) = append(host, journal, record) {
        tracing::warn!(%error, "can't note in the ledger how far a release has come");
    }
}

/// Releases the claim of `address` that no live process holds: a persistent one, or one whose owner died.
pub(crate) fn release_persistent(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<(), ClaimError> {
    release_as(host, address, deadline, |function| function)
}

/// As [`release_persistent`], of a function that is about to go: it gets no driver, which would have to let go of it again.
pub(crate) fn release_unbound(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<(), ClaimError> {
    release_as(host, address, deadline, |function| ClaimedFunction { driver: None, ..function })
}

fn release_as(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
    as_if: impl Fn(ClaimedFunction) -> ClaimedFunction,
) -> Result<(), ClaimError> {
    let until = until(deadline);
    loop {
        let functions = find(host, address, |journal| match journal.locked || is_changing(&journal) {
            true => Ok(functions_of(&journal.entry)),
            false => Err(occupied(&journal, address)),
        })?;
        let mut locks = FunctionLocks::take_free(host, &functions, until)?;
        let found = find(host, address, |mut journal| {
            if !journal.locked {
                return Err(occupied(&journal, address));
            }
            let is_same = functions_of(&journal.entry) == functions;
            if is_same {
                begin_release(&mut journal);
            }
            Ok(is_same.then_some(journal))
        });
        match found {
            Ok(Some(mut journal)) => {
                return undo_as(host, &mut journal, &mut locks, deadline, as_if)
                    .map_err(|left| ClaimError::HalfReleased { address, left });
            }
            Ok(None) => {}
            Err(ClaimError::InProgress { .. }) if Instant::now() < until => wait(),
            Err(error) => return Err(error),
        }
    }
}

/// The claim of `address` that no live process holds.
pub(crate) fn find_persistent(host: &Host, address: PciAddress) -> Result<Claim, ClaimError> {
    find(host, address, |journal| match journal.locked {
        true => Ok(claim_of(&journal.entry)),
        false => Err(occupied(&journal, address)),
    })
}

/// Calls `act` with the claim that covers `address`, while the ledger is locked.
fn find<T>(
    host: &Host,
    address: PciAddress,
    act: impl FnOnce(Journal) -> Result<T, ClaimError>,
) -> Result<T, ClaimError> {
    if !host.state.join("ledger").exists() {
        return Err(ClaimError::NotClaimed(address));
    }
    let ledger = Ledger::lock(host, LEDGER)?;
    for journal in ledger.journals()? {
        let journal = match journal {
            Ok(journal) => journal,
            Err(record) if record.covers(address) => {
                return Err(ClaimError::Unread { address, record: Box::new(record) });
            }
            Err(_) => continue,
        };
        if journal.entry.function(address).is_none() && journal.entry.target != address {
            continue;
        }
        if journal.locked && ledger.is_void(&journal.entry) {
            journal.remove()?;
            return Err(ClaimError::NotClaimed(address));
        }
        return act(journal);
    }
    Err(ClaimError::NotClaimed(address))
}
