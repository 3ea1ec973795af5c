//! `events`: what happens to guests, as it happens.

use clap::Args;

use super::asking::Asking;
use super::serve::DaemonArgs;
use crate::api::{Body, Document, GuestEvent};
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::text::table::printable;

/// Arguments of `events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Only what happens to this guest
    #[arg(long, value_name = "NAME")]
    pub(crate) guest: Option<String>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Prints events until the daemon or the reader of the output ends; in JSON, one document a line.
///
/// # Errors
/// When the daemon can't be asked, or ends.
pub(crate) fn run(context: &mut Context<'_>, args: &EventsArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let take = |event: GuestEvent| {
        if args.guest.as_ref().is_some_and(|guest| *guest != event.guest) {
            return Ok(());
        }
        let line = match context.json {
            true => serde_json::to_string(&Document::new(Body::Event(event))).map_err(Failure::failed)?,
            false => printable(&format!("{} {event}", event.time)),
        };
        writeln!(context.out, "{line}")?;
        Ok(context.out.flush()?)
    };
    Ok(asking.0.events(|| (), take)?)
}
