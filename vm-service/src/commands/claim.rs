//! `claim`: takes a function and its companions from their drivers, until `release`.

use std::fmt::Write as _;

use clap::Args;
use vm_passthrough::claim::{Cancel, ClaimOptions};
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::{PassthroughManager, PciAddress};

use super::Scan;
use super::explain::{self, Accept};
use crate::context::Context;
use crate::failure::{EXIT_FAILED, Failure};
use crate::json::{Body, Claim};
use crate::signals::StopSignals;
use crate::{log, sys};

/// Arguments of `claim`.
#[derive(Debug, Args)]
pub(crate) struct ClaimArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR")]
    pub(crate) address: PciAddress,
    /// Take every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
}

/// Claims a function for whoever runs a guest next.
///
/// # Errors
/// When it can't be passed to a guest, or a step fails; everything is undone then, or the message says what is not.
pub(crate) fn run(context: &mut Context<'_>, args: &ClaimArgs) -> Result<(), Failure> {
    context.require_live("claim")?;
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    super::release::recover(&mut manager)?;
    let host = context.host.clone();
    // How much RAM a guest will have is not known yet.
    let accept = args.accept.iter().map(Into::into).collect();
    let options = ExplainOptions { with_group: args.with_group, accept, ..ExplainOptions::for_memory(0) };
    let readiness = Scan::of(&host)?.explain_one(args.address, &options)?;
    explain::require_ready(context, &[readiness])?;
    let cancel = Cancel::default();
    let _signals = cancelled_by_signals(cancel.clone())?;
    let options = ClaimOptions {
        persistent: true,
        with_group: args.with_group,
        cancel: Some(cancel),
        ..ClaimOptions::default()
    };
    let claim = manager.claim(args.address, &options).map_err(Failure::failed)?;
    context.print(
        || Body::Claim(Claim::from(&*claim)),
        || {
            let mut text = String::new();
            for function in &claim.functions {
                let former = match &function.driver {
                    Some(driver) if function.kept => format!("was on {driver} already"),
                    Some(driver) => format!("taken from {driver}"),
                    None => "had no driver".to_owned(),
                };
                // A String takes any write.
                let _ = writeln!(text, "{} claimed, {former}", function.address);
            }
            text
        },
    )
}

/// The first signal cancels the claim; a second one ends this process where it is, and the ledger knows what is to be undone.
fn cancelled_by_signals(cancel: Cancel) -> Result<StopSignals, Failure> {
    let on_signal = move |signal| {
        if cancel.is_requested() {
            log::say(format_args!(
                "error: {signal} again: what was claimed is not given back yet; the next command that changes the host does \
                 that\n"
            ));
            log::flush();
            sys::exit_at_once(EXIT_FAILED);
        }
        cancel.request();
        tracing::warn!("{signal}: the claim is undone; once more to leave that to the next command");
    };
    StopSignals::start(on_signal).map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })
}
