//! Carries plans out and undoes them, each step in the ledger first.

use std::collections::BTreeMap;
use std::time::Duration;

use super::bind::Binder;
use super::{BindError, Cancel, Claim, ClaimError, ClaimOptions, Plan, Refusal, Step};
use crate::iommu::{VFIO_DRIVER, VfioDriver, VfioDrivers, is_vfio_driver};
use crate::ledger::{ClaimedFunction, Entry, Journal, Ledger, LedgerError, Owner, Record, UnreadRecord};
use crate::pci::PciFunction;
use crate::readiness::{self, ExplainOptions, Severity};
use crate::{Host, PciAddress};

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
        let _ledger = Ledger::lock(host, deadline)?;
        let address = self.journal.entry.target;
        undo(host, &mut self.journal, deadline).map_err(|left| ClaimError::HalfReleased { address, left })
    }
}

/// What a record of the ledger says is claimed.
fn claim_of(entry: &Entry) -> Claim {
    Claim { target: entry.target, functions: entry.functions.clone(), persistent: entry.persistent }
}

/// What [`recover`] did.
#[derive(Debug, Default)]
pub struct Recovery {
    /// Claims whose functions are back with their former drivers.
    pub recovered: Vec<Entry>,
    /// Claims, or files of the ledger, that could not be recovered, and why.
    pub failed: Vec<ClaimError>,
}

/// Claims `target`, or takes up the persistent claim of it.
///
/// `scan` is called with the ledger locked, after claims of dead processes were undone.
pub(crate) fn take(
    host: &Host,
    target: PciAddress,
    options: &ClaimOptions,
    scan: impl FnOnce() -> Vec<PciFunction>,
) -> Result<HeldClaim, ClaimError> {
    let is_cancelled = || options.cancel.as_ref().is_some_and(Cancel::is_requested);
    let ledger = Ledger::lock_unless(host, options.ledger_deadline, is_cancelled);
    if is_cancelled() {
        return Err(ClaimError::Failed { cause: Box::new(BindError::Cancelled(target)) });
    }
    let ledger = ledger?.for_guest(options.guest.as_ref());
    let Recovered { standing, failed, .. } = recover_dead(host, &ledger, options.deadline)?;
    let plan = match Plan::new(&scan(), target, options, &VfioDrivers::read(host)) {
        // Who has it says more than that it has an unexpected driver.
        Err(refusal @ (Refusal::NoSuchFunction(_) | Refusal::OtherDevice { .. })) => {
            return Err(refusal.into());
        }
        plan => plan,
    };
    let wanted: Vec<_> = match &plan {
        Ok(plan) => plan.steps.iter().map(super::Step::address).collect(),
        Err(_) => vec![target],
    };

    for failure in failed {
        if let Some(&address) = wanted.iter().find(|&&address| failure.is_about(address)) {
            return Err(failure.into_error(address));
        }
    }
    for journal in standing {
        let Some(address) = wanted.iter().copied().find(|&address| journal.entry.function(address).is_some())
        else {
            continue;
        };
        return take_up(host, &ledger, journal, address, target, &wanted, options);
    }

    if !options.force {
        judge(host, target, options)?;
    }
    let plan = plan?;
    // Not even by force: what runs on it would lose its device.
    for &address in &wanted {
        if let Some(sharer) = ledger.sharers(address)?.into_iter().next() {
            return Err(ClaimError::Shared { address, owner: sharer.owner });
        }
    }
    let binder = Binder::new(host, options.deadline);
    for step in &plan.steps {
        let Step::Take { vfio_driver, .. } = step else { continue };
        let path = binder.driver_dir(vfio_driver);
        if !path.exists() {
            return Err(ClaimError::NoVfioDriver { driver: vfio_driver.clone(), path });
        }
    }
    let mut journal = ledger.create(target, options.persistent)?;
    match carry_out(&binder, &mut journal, &plan, options) {
        Ok(()) => {
            tracing::info!(target_function = %target, functions = plan.steps.len(), "claimed");
            Ok(HeldClaim { journal })
        }
        Err(cause) => {
            tracing::warn!(target_function = %target, %cause, "a step of the claim failed, undoing all");
            let cause = Box::new(cause);
            Err(match undo(host, &mut journal, options.deadline) {
                Ok(()) => ClaimError::Failed { cause },
                Err(left) => ClaimError::HalfUndone { cause, left },
            })
        }
    }
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
    address: PciAddress,
    target: PciAddress,
    wanted: &[PciAddress],
    options: &ClaimOptions,
) -> Result<HeldClaim, ClaimError> {
    let entry = &journal.entry;
    let persistent = entry.persistent;
    if !journal.locked || !persistent || options.persistent {
        let user = if journal.locked { None } else { entry.user.clone() };
        let in_use = user.is_some();
        let owner = user.unwrap_or_else(|| entry.owner.clone());
        // A companion may be looked at first.
        let address = if entry.function(target).is_some() { target } else { address };
        let persistent = persistent && !in_use;
        return Err(ClaimError::Taken { address, owner, persistent, ended: persistent && journal.locked });
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
    binder: &Binder<'_>,
    journal: &mut Journal,
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
        let lock = binder.lock(address)?;
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
        journal.append(&Record::Function(function))?;
        match (step, driver) {
            _ if kept => {}
            (Step::Park { .. }, Some(driver)) => binder.unbind(&lock, &driver)?,
            (Step::Park { .. }, None) => {}
            (_, driver) => binder.take(&lock, driver.as_deref(), vfio_driver, wanted)?,
        }
    }
    // Some devices do not answer any more once their driver has let go of them. One that slept in D3cold may do so again.
    if !options.force {
        awake.into_iter().try_for_each(|address| binder.check_answers(address))?;
    }
    go_on(plan.target)?;
    // Until it says so, recovery undoes it.
    if !(options.persistent && options.tentative) {
        journal.append(&Record::Claimed)?;
    }
    Ok(())
}

/// Returns all functions of a claim to their drivers, in reverse, and ends it. What fails does not keep the others from it.
fn undo(host: &Host, journal: &mut Journal, deadline: Duration) -> Result<(), Vec<BindError>> {
    undo_as(host, journal, deadline, |function| function)
}

/// As [`undo`], with what `as_if` makes of each function.
fn undo_as(
    host: &Host,
    journal: &mut Journal,
    deadline: Duration,
    as_if: impl Fn(ClaimedFunction) -> ClaimedFunction,
) -> Result<(), Vec<BindError>> {
    let binder = Binder::new(host, deadline);
    if !journal.entry.releasing {
        note(journal, &Record::Release);
    }
    let mut left = Vec::new();
    for function in journal.undo_order() {
        let function = as_if(function);
        match binder.restore(&function) {
            Ok(()) => note(journal, &Record::Restored(function.address)),
            Err(error) => left.push(error),
        }
    }
    if !left.is_empty() {
        return Err(left);
    }
    journal.remove().map_err(|error| vec![error.into()])?;
    tracing::info!(target_function = %journal.entry.target, "released");
    Ok(())
}

/// Appends a record that saves work to a later undo, but without which it comes to the same.
fn note(journal: &mut Journal, record: &Record) {
    if let Err(error) = journal.append(record) {
        tracing::warn!(%error, "can't note in the ledger how far a release has come");
    }
}

/// What could not be recovered.
pub(super) enum Failure {
    /// A claim, of which this is left.
    Undo(Entry, Vec<BindError>),
    /// The claim of another boot, whose record can't be removed.
    Void(Entry, LedgerError),
    /// What a record says.
    Unread(UnreadRecord),
}

impl Failure {
    /// Whether it keeps the function from being used.
    pub(super) fn is_about(&self, address: PciAddress) -> bool {
        match self {
            Self::Undo(entry, _) => entry.function(address).is_some(),
            Self::Void(entry, _) => entry.target == address,
            Self::Unread(record) => record.covers(address),
        }
    }

    /// As an error of who wants to use the function.
    pub(super) fn into_error(self, address: PciAddress) -> ClaimError {
        match self {
            Self::Undo(entry, left) => ClaimError::NotRecovered { address, owner: entry.owner, left },
            Self::Void(_, error) => error.into(),
            Self::Unread(record) => ClaimError::Unread { address, record: Box::new(record) },
        }
    }
}

/// What became of the claims in the ledger.
#[derive(Default)]
pub(super) struct Recovered {
    /// The journals of those that stand.
    pub(super) standing: Vec<Journal>,
    pub(super) failed: Vec<Failure>,
    pub(super) recovered: Vec<Entry>,
}

/// Undoes the claims whose owner died, and those that were being released.
pub(super) fn recover_dead(
    host: &Host,
    ledger: &Ledger,
    deadline: Duration,
) -> Result<Recovered, LedgerError> {
    let Recovered { mut standing, mut failed, mut recovered } = Recovered::default();
    for journal in ledger.journals()? {
        let mut journal = match journal {
            Ok(journal) => journal,
            Err(record) => {
                failed.push(Failure::Unread(record));
                continue;
            }
        };
        let entry = journal.entry.clone();
        if journal.locked && ledger.is_void(&entry) {
            tracing::info!(target_function = %entry.target, "drop the claim of another boot");
            if let Err(error) = journal.remove() {
                failed.push(Failure::Void(entry, error));
            }
        } else if !journal.locked || entry.is_waiting() {
            standing.push(journal);
        } else {
            tracing::info!(target_function = %entry.target, owner = %entry.owner, "undo the claim of a dead process");
            match undo(host, &mut journal, deadline) {
                Ok(()) => recovered.push(entry),
                Err(left) => failed.push(Failure::Undo(entry, left)),
            }
        }
    }
    Ok(Recovered { standing, failed, recovered })
}

/// Undoes the claims whose owner died, and those that were being released when the process died.
pub(crate) fn recover(host: &Host, deadline: Duration) -> Result<Recovery, ClaimError> {
    if !host.state.join("ledger").exists() {
        return Ok(Recovery::default());
    }
    let ledger = Ledger::lock(host, deadline)?;
    let Recovered { failed, recovered, .. } = recover_dead(host, &ledger, deadline)?;
    let mut recovery = Recovery { recovered, failed: Vec::new() };
    for failure in failed {
        recovery.failed.push(match failure {
            Failure::Unread(record) => ClaimError::Record(Box::new(record)),
            Failure::Undo(ref entry, _) | Failure::Void(ref entry, _) => {
                let target = entry.target;
                failure.into_error(target)
            }
        });
    }
    Ok(recovery)
}

/// Releases the claim of `address` that no live process holds: a persistent one, or one whose owner died.
pub(crate) fn release_persistent(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<(), ClaimError> {
    with_persistent(host, address, deadline, |journal| {
        undo(host, journal, deadline).map_err(|left| ClaimError::HalfReleased { address, left })
    })
}

/// As [`release_persistent`], of a function that is about to go: it gets no driver, which would have to let go of it again.
pub(crate) fn release_unbound(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<(), ClaimError> {
    with_persistent(host, address, deadline, |journal| {
        let unbound = |function| ClaimedFunction { driver: None, ..function };
        undo_as(host, journal, deadline, unbound).map_err(|left| ClaimError::HalfReleased { address, left })
    })
}

/// The claim of `address` that no live process holds.
pub(crate) fn find_persistent(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<Claim, ClaimError> {
    with_persistent(host, address, deadline, |journal| Ok(claim_of(&journal.entry)))
}

/// Does something with the claim of `address` that no live process holds, while the ledger is locked.
fn with_persistent<T>(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
    act: impl FnOnce(&mut Journal) -> Result<T, ClaimError>,
) -> Result<T, ClaimError> {
    if !host.state.join("ledger").exists() {
        return Err(ClaimError::NotClaimed(address));
    }
    let ledger = Ledger::lock(host, deadline)?;
    for journal in ledger.journals()? {
        let mut journal = match journal {
            Ok(journal) => journal,
            Err(record) if record.covers(address) => {
                return Err(ClaimError::Unread { address, record: Box::new(record) });
            }
            Err(_) => continue,
        };
        if journal.entry.function(address).is_none() && journal.entry.target != address {
            continue;
        }
        if !journal.locked {
            let entry = journal.entry;
            let owner: Owner = entry.user.unwrap_or(entry.owner);
            return Err(ClaimError::Taken { address, owner, persistent: false, ended: false });
        }
        if ledger.is_void(&journal.entry) {
            journal.remove()?;
            return Err(ClaimError::NotClaimed(address));
        }
        return act(&mut journal);
    }
    Err(ClaimError::NotClaimed(address))
}
