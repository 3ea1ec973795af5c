//! Undoes the claims of processes that died.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use super::act::{begin_release, functions_of, near, not_locked, occupied, undo};
use super::lock::FunctionLocks;
use super::{BindError, ClaimError};
use crate::deadlines::{LEDGER, until};
use crate::ledger::{Entry, Journal, Ledger, LedgerError, UnreadRecord};
use crate::{Host, PciAddress};

/// What [`recover`] did.
#[derive(Debug, Default)]
pub struct Recovery {
    /// Claims whose functions are back with their former drivers.
    pub recovered: Vec<Entry>,
    /// Claims, or files of the ledger, that could not be recovered, and why.
    pub failed: Vec<ClaimError>,
}

/// What could not be recovered.
pub(super) enum Failure {
    /// A claim, of which this is left.
    Undo(Entry, Vec<BindError>),
    /// The claim of another boot, whose record can't be removed.
    Void(Entry, LedgerError),
    /// A record that could not be read.
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

/// The claims in the ledger, sorted by what is to be done with them.
#[derive(Default)]
pub(super) struct Sorted {
    /// The journals of those that stand.
    pub(super) standing: Vec<Journal>,
    /// The journals of those whose owner died, or whose release was interrupted.
    dead: Vec<Journal>,
    failed: Vec<Failure>,
}

/// Sorts the claims that `is_meant` selects, and removes all of another boot.
pub(super) fn sort(ledger: &Ledger, is_meant: impl Fn(&Entry) -> bool) -> Result<Sorted, LedgerError> {
    let mut sorted = Sorted::default();
    for journal in ledger.journals()? {
        let journal = match journal {
            Ok(journal) => journal,
            Err(record) => {
                sorted.failed.push(Failure::Unread(record));
                continue;
            }
        };
        let entry = &journal.entry;
        if !journal.locked && is_meant(entry) {
            sorted.standing.push(journal);
        } else if journal.locked && ledger.is_void(entry) {
            tracing::info!(target_function = %entry.target, "drop the claim of another boot");
            if let Err(error) = journal.remove() {
                sorted.failed.push(Failure::Void(entry.clone(), error));
            }
        } else if is_meant(entry) {
            if entry.is_waiting() { &mut sorted.standing } else { &mut sorted.dead }.push(journal);
        }
    }
    Ok(sorted)
}

/// Returns the standing claim that covers a locked function.
///
/// # Errors
/// When the ledger can't be read.
pub(super) fn standing(ledger: &Ledger, address: PciAddress) -> Result<Option<Journal>, LedgerError> {
    let of_it = |entry: &Entry| entry.target == address || entry.function(address).is_some();
    Ok(sort(ledger, of_it)?.standing.into_iter().next())
}

/// The result of [`settle`].
pub(super) enum Settled {
    /// Nothing was undone, as a dead process's claim has these functions too, which are not locked.
    Needs(BTreeSet<PciAddress>),
    /// Claims of dead processes that had one of the functions were undone, except these.
    Done(Vec<Failure>),
}

/// Undoes the claims of locked functions whose owner died, and those that were being released when the process died.
pub(super) fn settle(
    host: &Host,
    locks: &mut FunctionLocks,
    deadline: Duration,
) -> Result<Settled, LedgerError> {
    let (dead, mut failed) = {
        let ledger = Ledger::lock(host, LEDGER)?;
        let mut sorted =
            sort(&ledger, |entry| functions_of(entry).iter().any(|&address| locks.cover([address])))?;
        let needed: BTreeSet<_> =
            sorted.dead.iter().flat_map(|journal| functions_of(&journal.entry)).collect();
        if !locks.cover(needed.iter().copied()) {
            return Ok(Settled::Needs(needed));
        }
        sorted.dead.iter_mut().for_each(begin_release);
        (sorted.dead, sorted.failed)
    };
    for mut journal in dead {
        let entry = journal.entry.clone();
        tracing::info!(target_function = %entry.target, owner = %entry.owner, "undo the claim of a dead process");
        if let Err(left) = undo(host, &mut journal, locks, deadline) {
            failed.push(Failure::Undo(entry, left));
        }
    }
    Ok(Settled::Done(failed))
}

/// Locks a function, and undoes the claims of dead processes that have it. Returns those that could not be undone.
pub(super) fn lock_settled(
    host: &Host,
    action: &'static str,
    address: PciAddress,
    deadline: Duration,
) -> Result<(FunctionLocks, Vec<Failure>), ClaimError> {
    let (mut functions, until) = (BTreeSet::from([address]), until(deadline));
    loop {
        let locked = FunctionLocks::take(host, &functions, deadline, until, || false);
        let mut locks = locked.map_err(|cause| not_locked(action, address, cause))?;
        match settle(host, &mut locks, deadline)? {
            Settled::Needs(more) => functions.extend(more),
            Settled::Done(failed) => return Ok((locks, failed)),
        }
    }
}

/// Undoes the claims whose owner died, and those that were being released when the process died. It undoes all of them at the
/// same time, so that none waits for another's device.
pub(crate) fn recover(host: &Host, deadline: Duration) -> Result<Recovery, ClaimError> {
    recover_those(host, deadline, |_| true)
}

/// Like [`recover`], for the claims that have one of these functions or another of its IOMMU group, or else for all others.
pub(crate) fn recover_near(
    host: &Host,
    functions: &[PciAddress],
    is_near: bool,
    deadline: Duration,
) -> Result<Recovery, ClaimError> {
    let near: BTreeSet<_> = functions.iter().flat_map(|&address| near(host, address, true)).collect();
    let mut recovery =
        recover_those(host, deadline, |entry| functions_of(entry).is_disjoint(&near) != is_near)?;
    recovery.failed.retain(|error| match error {
        ClaimError::Record(record) => near.iter().any(|&address| record.covers(address)) == is_near,
        _ => true,
    });
    Ok(recovery)
}

/// Like [`recover`], for the claims that have one of these functions.
pub(super) fn recover_covering(
    host: &Host,
    functions: &[PciAddress],
    deadline: Duration,
) -> Result<Recovery, ClaimError> {
    let functions = functions.iter().copied().collect();
    recover_those(host, deadline, |entry| !functions_of(entry).is_disjoint(&functions))
}

/// Fails if one of the functions is still claimed after `recovery`.
pub(super) fn refuse_claimed(
    ledger: &Ledger,
    functions: &[PciAddress],
    recovery: Recovery,
) -> Result<(), ClaimError> {
    let covered =
        |entry: &Entry| functions.iter().copied().find(|&address| entry.function(address).is_some());
    let Sorted { standing, dead, failed } = sort(ledger, |entry| covered(entry).is_some())?;
    for failure in failed {
        if let Some(&address) = functions.iter().find(|&&address| failure.is_about(address)) {
            return Err(failure.into_error(address));
        }
    }
    if let Some(journal) = standing.iter().chain(&dead).next() {
        let target = journal.entry.target;
        let is_why = |error: &ClaimError| matches!(error, ClaimError::NotRecovered { address, .. } if *address == target);
        let why = recovery.failed.into_iter().find(is_why);
        return Err(why.unwrap_or_else(|| occupied(journal, covered(&journal.entry).unwrap_or(target))));
    }
    Ok(())
}

fn recover_those(
    host: &Host,
    deadline: Duration,
    is_meant: impl Fn(&Entry) -> bool,
) -> Result<Recovery, ClaimError> {
    let mut recovery = Recovery::default();
    if !host.state.join("ledger").exists() {
        return Ok(recovery);
    }
    let (dead, failed) = {
        let ledger = Ledger::lock(host, LEDGER)?;
        let sorted = sort(&ledger, is_meant)?;
        (sorted.dead.iter().map(|journal| journal.entry.clone()).collect::<Vec<_>>(), sorted.failed)
    };
    let recover = |entry: &Entry| recover_one(host, entry, deadline);
    let recovered: Vec<_> = thread::scope(|scope| {
        let spawn = |entry| {
            let spawned =
                thread::Builder::new().name("recovery".into()).spawn_scoped(scope, move || recover(entry));
            spawned.map_err(|_| recover(entry))
        };
        let others: Vec<_> = dead.iter().skip(1).map(spawn).collect();
        let first = dead.first().map(recover);
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>, _>| match thread
            .map(thread::ScopedJoinHandle::join)
        {
            Ok(Ok(result)) | Err(result) => result,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
        };
        first.into_iter().chain(others.into_iter().map(join)).collect()
    });
    for (entry, result) in dead.into_iter().zip(recovered) {
        match result {
            Ok(true) => recovery.recovered.push(entry),
            Ok(false) => {}
            Err(error) => recovery.failed.push(error),
        }
    }
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

/// Undoes one claim, unless another process has undone it or begun to.
fn recover_one(host: &Host, entry: &Entry, deadline: Duration) -> Result<bool, ClaimError> {
    let mut locks = FunctionLocks::take_free(host, &functions_of(entry), until(deadline))?;
    let mut journal = {
        let ledger = Ledger::lock(host, LEDGER)?;
        let mut sorted = sort(&ledger, |other| other.target == entry.target)?;
        sorted.dead.iter_mut().for_each(begin_release);
        let Some(journal) = sorted.dead.pop() else { return Ok(false) };
        journal
    };
    let address = entry.target;
    tracing::info!(target_function = %address, owner = %entry.owner, "undo the claim of a dead process");
    match undo(host, &mut journal, &mut locks, deadline) {
        Ok(()) => Ok(true),
        Err(left) => Err(ClaimError::NotRecovered { address, owner: journal.entry.owner.clone(), left }),
    }
}
