//! `claim`: takes functions and their companions from their drivers, until `release`.

use std::fmt::Write as _;

use clap::Args;
use vm_passthrough::claim::{self, Cancel, Claim, ClaimOptions};
use vm_passthrough::manager::Claimed;
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::{Host, PassthroughManager, PciAddress, PciFunction, ledger};

use super::Scan;
use super::explain::{self, Accept};
use crate::context::Context;
use crate::failure::{EXIT_FAILED, Failure};
use crate::json::{self, Body};
use crate::saved::{self, SavedClaim};
use crate::signals::StopSignals;
use crate::{log, sys};

/// Arguments of `claim`.
#[derive(Debug, Args)]
pub(crate) struct ClaimArgs {
    /// PCI addresses, as in 0000:65:00.0 or 65:00.0; all are claimed, or none
    #[arg(value_name = "ADDR", required_unless_present = "restore")]
    pub(crate) addresses: Vec<PciAddress>,
    /// Claim them again after each boot too, until `release`
    #[arg(long)]
    pub(crate) persist: bool,
    /// Claim what `--persist` noted, as after a boot, and is not claimed yet
    #[arg(long, conflicts_with_all = ["addresses", "persist", "with_group", "accept"])]
    pub(crate) restore: bool,
    /// Take every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
}

/// Claims functions for whoever runs a guest next: all of them, or none.
///
/// # Errors
/// When one can't be passed to a guest, or a step fails; everything is undone then, or the message says what is not.
pub(crate) fn run(context: &mut Context<'_>, args: &ClaimArgs) -> Result<(), Failure> {
    context.require_live("claim")?;
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    super::release::recover(&mut manager)?;
    if args.restore {
        return restore(context, &mut manager);
    }
    let host = context.host.clone();
    // How much RAM a guest will have is not known yet.
    let mut options = ExplainOptions::for_memory(0);
    options.with_group = args.with_group;
    options.accept = args.accept.iter().map(Into::into).collect();
    let scan = Scan::of(&host)?;
    let readiness: Vec<_> = args
        .addresses
        .iter()
        .map(|&address| scan.explain_one(address, &options))
        .collect::<Result<_, _>>()?;
    explain::require_ready(context, &readiness)?;
    let cancel = Cancel::default();
    let _signals = cancelled_by_signals(cancel.clone())?;
    let mut options = ClaimOptions::default();
    options.persistent = true;
    options.with_group = args.with_group;
    options.cancel = Some(cancel);
    let claims =
        claim_all(&mut manager, &args.addresses, &options, args.persist.then_some(scan.functions()))?;
    print(context, &args.addresses, &claims, String::new())
}

/// Claims all of these, or none. With the functions of the host, they are claimed again after each boot.
fn claim_all(
    manager: &mut PassthroughManager,
    addresses: &[PciAddress],
    options: &ClaimOptions,
    persist: Option<&[PciFunction]>,
) -> Result<Vec<Claimed>, Failure> {
    let mut claims: Vec<Claimed> = Vec::new();
    for &address in addresses {
        // It may be claimed as the companion of one before it.
        if claims.iter().any(|claim| claim.addresses().contains(&address)) {
            continue;
        }
        let claimed = manager.claim(address, options).map_err(|error| error.to_string()).and_then(|claim| {
            let saved = persist.map(|functions| save(manager.host(), &claim, options.with_group, functions));
            claims.push(claim);
            saved.unwrap_or(Ok(()))
        });
        if let Err(mut message) = claimed {
            for claim in claims.iter().rev() {
                let target = claim.target;
                let released = manager.release(claim).map_err(|error| error.to_string());
                let removed = persist.map_or(Ok(true), |_| saved::remove(manager.host(), target));
                message += &match released.and(removed) {
                    Ok(_) => format!("; {target} is released again"),
                    Err(error) => format!("; {error}"),
                };
            }
            return Err(Failure::failed(message));
        }
    }
    Ok(claims)
}

/// Notes that a claim is to be made again after each boot.
fn save(host: &Host, claim: &Claim, with_group: bool, functions: &[PciFunction]) -> Result<(), String> {
    let claimed = functions.iter().filter(|function| claim.addresses().contains(&function.address));
    let functions = claimed.map(|function| (function.address, function.ids)).collect();
    SavedClaim { target: claim.target, with_group, functions }.save(host)
}

/// Makes claims again that a boot has ended, each whatever becomes of the others. What is claimed already stays as it is.
fn restore(context: &mut Context<'_>, manager: &mut PassthroughManager) -> Result<(), Failure> {
    let cancel = Cancel::default();
    let _signals = cancelled_by_signals(cancel.clone())?;
    let standing = ledger::claims(&context.host, claim::DEADLINE).map_err(Failure::failed)?;
    let is_claimed = |address| standing.iter().flatten().any(|claim| claim.entry.function(address).is_some());
    let (mut text, mut restored, mut errors) = (String::new(), Vec::new(), Vec::new());
    for saved in saved::all(&context.host).map_err(Failure::failed)? {
        let saved = match saved {
            Ok(saved) if is_claimed(saved.target) => {
                let _ = writeln!(text, "{} is claimed already", saved.target);
                continue;
            }
            Ok(saved) => saved,
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        let mut options = ClaimOptions::default();
        options.persistent = true;
        options.with_group = saved.with_group;
        options.cancel = Some(cancel.clone());
        options.only = Some(saved.functions);
        match manager.claim(saved.target, &options) {
            Ok(claim) => restored.push(claim),
            Err(error) => errors.push(format!("{} is not claimed again: {error}", saved.target)),
        }
    }
    print(context, &restored.iter().map(|claim| claim.target).collect::<Vec<_>>(), &restored, text)?;
    if errors.is_empty() { Ok(()) } else { Err(Failure::failed(errors.join("\nerror: "))) }
}

fn print(
    context: &mut Context<'_>,
    asked: &[PciAddress],
    claims: &[Claimed],
    mut text: String,
) -> Result<(), Failure> {
    let functions = || claims.iter().flat_map(|claim| &claim.functions);
    for function in functions() {
        let former = match &function.driver {
            Some(driver) if function.kept => format!("was on {driver} already"),
            Some(driver) => format!("taken from {driver}"),
            None => "had no driver".to_owned(),
        };
        // A String takes any write.
        let _ = writeln!(text, "{} claimed, {former}", function.address);
    }
    context.print(|| Body::Claim(json::Claim::new(asked, functions())), || text)
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
