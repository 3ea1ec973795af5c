//! `release`: releases claimed functions and their companions to their drivers.

use clap::Args;
use vm_passthrough::claim::{ClaimError, Recovery};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::{PassthroughManager, PciAddress, claim, ledger};

use super::SimArgs;
use crate::api::Body;
use crate::cli::context::Context;
use crate::devices::saved;
use crate::failure::Failure;

/// Arguments of `release`.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    /// PCI addresses, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR", required_unless_present = "all")]
    pub(crate) addresses: Vec<PciAddress>,
    /// Release every claim of this host; those in use stay, and are an error
    #[arg(long, conflicts_with = "addresses")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

/// Releases claims, each whatever becomes of the others.
///
/// # Errors
/// When there is no such claim, a process uses it, or it can't be released; the message says what is left then.
pub(crate) fn run(context: &mut Context<'_>, args: &ReleaseArgs) -> Result<(), Failure> {
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    // A claim whose owner was killed is released here, and is then no longer there to release.
    let mut free =
        if args.all { recover(&mut manager)? } else { recover_near(&mut manager, &args.addresses)? };
    let released = release(context, &mut manager, args, &mut free);
    // Claims of other devices are recovered last, as one of them may be stuck.
    if !args.all {
        recover_except(&mut manager, &args.addresses)?;
    }
    released
}

/// Releases the claims that the arguments select. Functions in `free` were released already.
fn release(
    context: &mut Context<'_>,
    manager: &mut PassthroughManager,
    args: &ReleaseArgs,
    free: &mut Vec<PciAddress>,
) -> Result<(), Failure> {
    let (mut addresses, mut errors) = (args.addresses.clone(), Vec::new());
    if args.all {
        let claims = ledger::claims(&context.host, claim::DEADLINE).map_err(Failure::failed)?;
        addresses.clone_from(free);
        addresses.extend(claims.iter().flatten().map(|claim| claim.entry.target));
        errors.extend(claims.iter().filter_map(|claim| claim.as_ref().err()).map(ToString::to_string));
        for saved in saved::all(&context.host).map_err(Failure::failed)? {
            match saved {
                Ok(saved) if addresses.contains(&saved.target) => {}
                Ok(saved) => addresses.push(saved.target),
                Err(error) => errors.push(error),
            }
        }
    }
    let mut done = Vec::new();
    for address in addresses {
        let mut functions = vec![address];
        let claimed = manager.find_claim(address);
        functions.extend(claimed.iter().flat_map(|claimed| claimed.addresses()));
        let released = claimed.and_then(|claimed| manager.release(&claimed));
        let released = match released {
            // With another of its claim, or above.
            Err(ManagerError::Claim(ClaimError::NotClaimed(_))) if free.contains(&address) => Ok(()),
            released => released,
        };
        // It need not be claimed to be noted for the next boot, and stays noted while it is used.
        let forgotten = match &released {
            Ok(()) | Err(ManagerError::Claim(ClaimError::NotClaimed(_))) => {
                saved::forget(&context.host, &functions)
            }
            Err(_) => Ok(Vec::new()),
        };
        match (released, forgotten) {
            (Ok(()), Err(error)) => errors.push(format!("{address} is released, but {error}")),
            (Err(_), Err(error)) => errors.push(error),
            (Err(error), Ok(forgotten)) if forgotten.is_empty() => errors.push(error.to_string()),
            (_, Ok(forgotten)) => {
                free.extend(functions.into_iter().chain(forgotten));
                done.push(address.to_string());
            }
        }
    }
    if errors.is_empty() || !done.is_empty() {
        context.print(
            || Body::Release { address: done.first().cloned(), addresses: done.clone() },
            || match done.as_slice() {
                [] => "nothing is claimed\n".into(),
                _ => done.iter().map(|address| format!("{address} released\n")).collect(),
            },
        )?;
    }
    if errors.is_empty() { Ok(()) } else { Err(Failure::failed(errors.join("\nerror: "))) }
}

/// Gives back what processes that died had claimed, and answers which functions those are.
///
/// # Errors
/// When the ledger can't be used. What can't be released is reported and stays in the ledger.
pub(super) fn recover(manager: &mut PassthroughManager) -> Result<Vec<PciAddress>, Failure> {
    manager.recover().map(report).map_err(Failure::failed)
}

/// Like [`recover`], only for claims that have one of these functions or another of its IOMMU group.
///
/// # Errors
/// As for [`recover`].
pub(super) fn recover_near(
    manager: &mut PassthroughManager,
    functions: &[PciAddress],
) -> Result<Vec<PciAddress>, Failure> {
    manager.recover_near(functions).map(report).map_err(Failure::failed)
}

/// Like [`recover`], only for the other claims.
///
/// # Errors
/// As for [`recover`].
pub(super) fn recover_except(
    manager: &mut PassthroughManager,
    functions: &[PciAddress],
) -> Result<(), Failure> {
    manager.recover_except(functions).map(report).map(drop).map_err(Failure::failed)
}

fn report(recovery: Recovery) -> Vec<PciAddress> {
    for error in &recovery.failed {
        tracing::warn!("an earlier claim is not released: {error}");
    }
    let functions: Vec<_> = recovery
        .recovered
        .iter()
        .flat_map(|entry| entry.functions.iter().map(|function| function.address))
        .collect();
    for address in &functions {
        tracing::info!("{address} was claimed by a process that died; it is released");
    }
    functions
}
