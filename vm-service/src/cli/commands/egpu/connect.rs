//! `egpu connect`: connects an enclosure by a PCIe tunnel, and waits for its GPU.

use clap::Args;
use vm_passthrough::egpu::{Enclosure as _, Event, State};
use vm_passthrough::ledger::EnclosureLock;
use vm_passthrough::usb4::UniqueId;

use super::enclosure::{EnclosureArgs, LOCK, Work, locked, name};
use super::guests::{DaemonGuests, not_given};
use crate::api::Body;
use crate::cli::context::Context;
use crate::devices::known_egpus::{EgpuStore, Known};
use crate::failure::Failure;
use crate::text::describe;

/// Arguments of `egpu connect`.
#[derive(Debug, Args)]
pub(super) struct ConnectArgs {
    #[command(flatten)]
    enclosure: EnclosureArgs,
    /// Know it from now on, with the GPU that is in it: the policy `known` connects it as soon as it comes
    #[arg(long)]
    remember: bool,
    /// Give its GPU to a guest that runs; with --remember, `egpu watch` does so whenever it comes again
    #[arg(long, value_name = "NAME")]
    guest: Option<String>,
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
    let none = "no enclosure is connected to this machine";
    let chosen = args.enclosure.choose_or_done(context, |router| !router.is_authorised(), none)?;
    let mut policy = store.policy.clone();
    policy.dma_protection &= !args.allow_unprotected;
    let (id, router) = (chosen.id, chosen.router.clone());
    let known = store.known.get(&id).cloned();
    policy
        .judge(&chosen.domain, &router, known.is_some(), true)
        .map_err(|refusal| Failure::blocked(refusal.to_string()))?;
    let mut work =
        Work::begin(context, chosen, policy, known.filter(|_| !args.remember).map(|known| known.egpu), LOCK)?;
    let mut state = work.take(Event::Found { authorised: router.is_authorised() });
    if state == State::Disconnected {
        state = work.take(Event::Connect);
    }
    let mut report = work.report();
    if !matches!(state, State::Ready | State::InUse) {
        context.print(|| Body::EgpuConnect(report), String::new)?;
        let mut failure = work.failure();
        if work.manager.enclosure().observe().is_ok_and(|seen| seen.authorised) {
            failure.message +=
                "; PCIe is tunnelled to it still: run `vm-service egpu disconnect` to end that";
        }
        return Err(failure);
    }
    let remembered = match args.remember {
        true => {
            let egpu = work.manager.enclosure().known();
            remember(context, id, Known { name: name(&router), egpu, guest: args.guest.clone() })
        }
        false => Ok(()),
    };
    let functions = work.manager.enclosure().functions();
    let given = args.guest.as_ref().map(|guest| {
        let given = DaemonGuests::of(&context.host)?.attach(&functions, guest);
        given.map_err(|error| not_given(guest, error))
    });
    let mut text = work.line(&format!("ready in {}", work.took()));
    for function in functions {
        if let Ok(function) = vm_passthrough::pci::read_function(&context.host, function) {
            let (kind, name) = (describe::device_type(&function), describe::name(&function));
            text += &format!("  {} {kind} {name}, in this enclosure (inferred)\n", function.address);
        }
    }
    if let (Some(Ok(())), Some(guest)) = (&given, &args.guest) {
        text += &format!("  given to {guest}\n");
        report.guest = Some(guest.clone());
    }
    context.print(|| Body::EgpuConnect(report), || text)?;
    // It stays connected: only that it is remembered, or given to the guest, is left to be done.
    remembered.map_err(|Failure { message, exit }| Failure {
        message: format!("it is connected, and could not be remembered: {message}"),
        exit,
    })?;
    given.unwrap_or(Ok(()))
}

/// Adds an enclosure to the known ones, which others may have changed meanwhile.
fn remember(context: &Context<'_>, id: UniqueId, known: Known) -> Result<(), Failure> {
    let _lock = locked(LOCK, |wait| EnclosureLock::of_all(&context.host, wait, || false))?;
    let mut store = EgpuStore::read(&context.host).map_err(Failure::failed)?;
    store.known.insert(id, known);
    store.write(&context.host).map_err(Failure::failed)
}
