//! `egpu reset`: resets the GPU of an enclosure, and verifies it.

use clap::Args;
use vm_passthrough::egpu::{Enclosure as _, Event, Rung, State};
use vm_passthrough::usb4::Router;
use vm_passthrough::{Host, PciAddress, deadlines, ledger};

use super::enclosure::{EnclosureArgs, LOCK, Work};
use crate::api::Body;
use crate::cli::context::Context;
use crate::devices::known_egpus::EgpuStore;
use crate::failure::Failure;

/// Arguments of `egpu reset`.
#[derive(Debug, Args)]
pub(super) struct ResetArgs {
    #[command(flatten)]
    enclosure: EnclosureArgs,
    /// Reset its bus, not its functions alone
    #[arg(long, conflicts_with = "reconnect")]
    hard: bool,
    /// Take its tunnel down and build it again
    #[arg(long)]
    reconnect: bool,
}

/// Resets what is in an enclosure, while nobody uses it.
///
/// # Errors
/// When it is used, or the reset is refused or does not help.
pub(super) fn run(context: &mut Context<'_>, args: &ResetArgs) -> Result<(), Failure> {
    let store = match args.reconnect {
        true => EgpuStore::read(&context.host).map_err(Failure::failed)?,
        // Nothing is connected by it.
        false => EgpuStore::default(),
    };
    let chosen = args.enclosure.choose(
        context,
        Router::is_authorised,
        "no enclosure is connected by a PCIe tunnel",
    )?;
    let known = store.known.get(&chosen.id).map(|known| known.egpu.clone());
    if args.reconnect {
        let judged = store.policy.judge(&chosen.domain, &chosen.router, known.is_some(), true);
        judged.map_err(|refusal| Failure::blocked(refusal.to_string()))?;
    }
    let mut work = Work::begin(context, chosen, store.policy, known, LOCK)?;
    work.adopt()?;
    let seen = work.manager.enclosure().observe().map_err(Failure::failed)?;
    if !seen.users.is_empty() {
        return Err(Failure::blocked(format!("it is used by {}; end that first", seen.users.join(", "))));
    }
    let rung = match (args.hard, args.reconnect) {
        (true, _) => Rung::HardReset,
        (_, true) => Rung::Reconnect,
        _ => Rung::SoftReset,
    };
    let enclosure = work.manager.enclosure();
    let claimed = claimed(&context.host, &enclosure.functions())?;
    if let Some(address) = claimed.filter(|_| args.reconnect) {
        return Err(Failure::blocked(format!(
            "{address} is claimed, which a new tunnel would end; say `vm-service release {address}` first"
        )));
    }
    let what = rung.to_string().replace('-', " ");
    if work.take(Event::Reset(rung)) != State::Ready {
        let Failure { message, .. } = work.failure();
        let next = match rung {
            Rung::SoftReset => "; try --hard, then --reconnect",
            Rung::HardReset => "; try --reconnect",
            Rung::Reconnect => "",
        };
        return Err(Failure::failed(format_args!("the {what} did not help: {message}{next}")));
    }
    let report = work.report();
    let text = work.line(&format!("healthy after a {what}, in {}", work.took()));
    context.print(|| Body::EgpuReset(report), || text)
}

/// The first of these functions that is claimed, whether its owner lives or not.
fn claimed(host: &Host, functions: &[PciAddress]) -> Result<Option<PciAddress>, Failure> {
    let claims = ledger::claims(host, deadlines::LEDGER_READ).map_err(Failure::failed)?;
    let is_claimed = |function: &&PciAddress| {
        claims.iter().flatten().any(|claim| claim.entry.function(**function).is_some())
    };
    Ok(functions.iter().find(is_claimed).copied())
}
