//! `egpu connect`: has PCIe tunnelled to an enclosure, and waits for its GPU.

use clap::Args;
use vm_passthrough::egpu::{Event, State};

use super::enclosure::{EnclosureArgs, Work, is_authorised, name};
use crate::context::Context;
use crate::describe;
use crate::failure::Failure;
use crate::json::Body;
use crate::known_egpus::EgpuStore;

/// Arguments of `egpu connect`.
#[derive(Debug, Args)]
pub(super) struct ConnectArgs {
    #[command(flatten)]
    enclosure: EnclosureArgs,
    /// Know it from now on, with the GPU that is in it: the policy `known` connects it as soon as it comes
    #[arg(long)]
    remember: bool,
    /// Connect it though nothing keeps it from the host's memory
    #[arg(long)]
    allow_unprotected: bool,
}

/// Connects an enclosure.
///
/// # Errors
/// When it may not be connected, or no GPU comes; then its tunnel is taken down again.
pub(super) fn run(context: &mut Context<'_>, args: &ConnectArgs) -> Result<(), Failure> {
    let store = EgpuStore::read(&context.host).map_err(Failure::failed)?;
    let waits = "what is connected and has no PCIe yet";
    let chosen = match args.enclosure.choose(context, |router| !is_authorised(router), waits) {
        // All are connected: that one is, too, is no error.
        Err(_) if args.enclosure.is_any() && args.enclosure.choose(context, is_authorised, waits).is_ok() => {
            args.enclosure.choose(context, is_authorised, waits)?
        }
        chosen => chosen?,
    };
    let mut policy = store.policy.clone();
    policy.dma_protection &= !args.allow_unprotected;
    let (id, router) = (chosen.id, chosen.router.clone());
    let known = store.known.get(&id).map(|(_, known)| known.clone());
    policy
        .judge(&chosen.domain, &router, known.is_some(), true)
        .map_err(|refusal| Failure::blocked(refusal.to_string()))?;
    let mut work = Work::begin(context, chosen, policy, known.filter(|_| !args.remember))?;
    let mut state = work.take(Event::Found { authorised: is_authorised(&router) });
    if state == State::Disconnected {
        state = work.take(Event::Connect);
    }
    let report = work.report();
    if !matches!(state, State::Ready | State::InUse) {
        context.print(|| Body::EgpuConnect(report), String::new)?;
        return Err(work.failure());
    }
    if args.remember {
        // Others wait, and may have changed it before.
        let mut store = EgpuStore::read(&context.host).map_err(Failure::failed)?;
        store.known.insert(id, (name(&router), work.manager.enclosure().known()));
        store.write(&context.host).map_err(Failure::failed)?;
    }
    let mut text = work.line("ready");
    for function in work.manager.enclosure().functions() {
        if let Ok(function) = vm_passthrough::pci::read_function(&context.host, function) {
            let (kind, name) = (describe::device_type(&function), describe::name(&function));
            text += &format!("  {} {kind} {name}\n", function.address);
        }
    }
    context.print(|| Body::EgpuConnect(report), || text)
}
