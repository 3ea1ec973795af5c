//! `release`: gives a claimed function and its companions back to their drivers.

use clap::Args;
use vm_passthrough::{PassthroughManager, PciAddress};

use crate::context::Context;
use crate::failure::Failure;
use crate::json::Body;

/// Arguments of `release`.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR")]
    pub(crate) address: PciAddress,
}

/// Gives a claim back.
///
/// # Errors
/// When there is no such claim, a process uses it, or it can't be given back; the message says what is left then.
pub(crate) fn run(context: &mut Context<'_>, args: &ReleaseArgs) -> Result<(), Failure> {
    context.require_live("release")?;
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    // A claim whose owner was killed is given back here, and is then no longer there to release.
    let recovered = recover(&mut manager)?.contains(&args.address);
    if !recovered {
        manager.release(args.address).map_err(Failure::failed)?;
    }
    let address = args.address.to_string();
    context.print(|| Body::Release { address: address.clone() }, || format!("{address} released\n"))
}

/// Gives back what processes that died had claimed, and answers which functions those are.
///
/// # Errors
/// When the ledger can't be used. What can't be given back is told and stays in the ledger.
pub(super) fn recover(manager: &mut PassthroughManager) -> Result<Vec<PciAddress>, Failure> {
    let recovery = manager.recover().map_err(Failure::failed)?;
    for error in &recovery.failed {
        tracing::warn!("an earlier claim is not given back: {error}");
    }
    let functions: Vec<_> = recovery
        .recovered
        .iter()
        .flat_map(|entry| entry.functions.iter().map(|function| function.address))
        .collect();
    for address in &functions {
        tracing::info!("{address} was claimed by a process that died; it is given back");
    }
    Ok(functions)
}
