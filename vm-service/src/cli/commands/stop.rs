//! `stop` and `reset`: ends a guest, or resets its machine.

use std::time::Duration;

use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::asking::{Asking, NOTHING, path};
use super::guests::GuestArgs;
use crate::api::{Body, StoppedGuest, StoppedHow};
use crate::cli::context::Context;
use crate::daemon::{ResetAnswer, StopOptions};
use crate::deadlines::{self, GUEST_RESET, STOP_ANSWER};
use crate::failure::Failure;

/// Arguments of `stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    /// How long it has to power itself off before its power is cut
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = deadlines::seconds)]
    pub(crate) deadline: Duration,
    /// Cut its power at once: what runs in it is not asked
    #[arg(long, conflicts_with = "deadline")]
    pub(crate) now: bool,
}

/// Has a guest power itself off, or cuts its power, and waits until everything is released.
///
/// # Errors
/// When no such guest runs, or it does not end in time.
pub(crate) fn run(context: &mut Context<'_>, args: &StopArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.guest.daemon)?;
    let query = StopOptions { now: args.now, deadline_ms: args.deadline.as_millis() as u64 };
    let path = path(&args.guest.guest, "/stop")?;
    let deadline = args.deadline.saturating_add(STOP_ANSWER);
    let stopped: StoppedGuest = asking.call(Method::POST, &path, &query, None::<&Value>, deadline)?;
    let text = text(&stopped);
    context.print(|| Body::Stop(stopped), || text)
}

/// How a guest ended, for people.
pub(super) fn text(stopped: &StoppedGuest) -> String {
    let how = match stopped.how {
        StoppedHow::Orderly => "has powered itself off",
        StoppedHow::Cut => "has ended: its power was cut",
        StoppedHow::Reset => "has ended: it was reset, and was started with `--no-reboot`",
        StoppedHow::Crashed => "has ended: it crashed (triple fault), and was started with `--no-reboot`",
        StoppedHow::Failed => {
            return format!("{0} has ended: its process failed; see `vm-service logs {0}`\n", stopped.guest);
        }
        StoppedHow::Killed => "has ended: its process was killed, or died",
        StoppedHow::Other => "has ended",
    };
    format!("{} {how}\n", stopped.guest)
}

/// Resets a guest's machine, as its button would, and waits until the guest has restarted.
///
/// # Errors
/// When no such guest runs, or it does not restart.
pub(crate) fn reset(context: &mut Context<'_>, args: &GuestArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&args.guest, "/reset")?;
    let ResetAnswer { guest } = asking.call(Method::POST, &path, &NOTHING, None::<&Value>, GUEST_RESET)?;
    let text = format!("{guest} was reset\n");
    context.print(|| Body::Reset { guest }, || text)
}
