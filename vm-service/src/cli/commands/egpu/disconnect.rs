//! `egpu disconnect`: disconnects an enclosure safely.

use clap::Args;
use vm_passthrough::egpu::{Event, Policy, State};
use vm_passthrough::usb4::Router;

use super::enclosure::{EnclosureArgs, LOCK, LOCK_BY_FORCE, Work};
use crate::api::Body;
use crate::cli::context::Context;
use crate::failure::Failure;

/// Arguments of `egpu disconnect`.
#[derive(Debug, Args)]
pub(super) struct DisconnectArgs {
    #[command(flatten)]
    enclosure: EnclosureArgs,
    /// Wait for no user, and continue where a step fails: processes that use it are ended, and guests lose it as if it were pulled
    #[arg(long)]
    force: bool,
}

/// Disconnects an enclosure.
///
/// # Errors
/// When a user does not release it; it stays connected then, or the message says what is left.
pub(super) fn run(context: &mut Context<'_>, args: &DisconnectArgs) -> Result<(), Failure> {
    let none = "no enclosure is connected to this machine";
    let chosen = args.enclosure.choose_or_done(context, Router::is_authorised, none)?;
    let is_connected = chosen.router.is_authorised();
    let wait = if args.force { LOCK_BY_FORCE } else { LOCK };
    let mut work = Work::begin(context, chosen, Policy::default(), None, wait)?;
    if is_connected {
        work.adopt()?;
        work.take(Event::Disconnect { force: args.force });
    } else {
        work.take(Event::Found { authorised: false });
    }
    let (state, report) = (work.manager.state(), work.report());
    let text = match is_connected {
        true => work.line(&format!("disconnected in {}; safe to unplug", work.took())),
        false => work.line("was not connected; safe to unplug"),
    };
    if state != State::Disconnected {
        context.print(|| Body::EgpuDisconnect(report), String::new)?;
        return Err(work.failure());
    }
    context.print(|| Body::EgpuDisconnect(report), || text)
}
