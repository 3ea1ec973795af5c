//! `stop` and `reset`: ends a guest, or resets its machine.

use std::time::Duration;

use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::asking::{Asking, NOTHING, path};
use super::guests::GuestArgs;
use crate::context::Context;
use crate::daemon::{ResetAnswer, StopOptions};
use crate::deadlines::STOP_ANSWER;
use crate::failure::Failure;
use crate::json::{Body, StoppedGuest, StoppedHow};

/// Arguments of `stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    /// How many seconds it has to power itself off before its power is cut
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) deadline: u32,
    /// Cut its power at once: what runs in it is not asked
    #[arg(long, conflicts_with = "deadline")]
    pub(crate) now: bool,
}

/// Has a guest power itself off, or cuts its power, and waits until everything is given back.
///
/// # Errors
/// When no such guest runs, or it does not end in time.
pub(crate) fn run(context: &mut Context<'_>, args: &StopArgs) -> Result<(), Failure> {
    let deadline = Duration::from_secs(args.deadline.into());
    let asking = Asking::of(context, &args.guest.daemon)?;
    let query = StopOptions { now: args.now, deadline_ms: deadline.as_millis() as u64 };
    let path = path(&args.guest.guest, "/stop")?;
    let deadline = deadline.saturating_add(STOP_ANSWER);
    let stopped: StoppedGuest =
        asking.call(context, Method::POST, &path, &query, None::<&Value>, deadline)?;
    let how = match stopped.how {
        StoppedHow::Orderly => "has powered itself off",
        StoppedHow::Cut => "has ended: its power was cut",
        StoppedHow::Reset => "has ended: it was reset, and was started with `--no-reboot`",
        StoppedHow::Crashed => "has ended: it crashed (triple fault), and was started with `--no-reboot`",
        StoppedHow::Failed => "has ended: its process failed; see `vm-service logs`",
        StoppedHow::Killed => "has ended: its process was killed, or died",
        StoppedHow::Other => "has ended",
    };
    let text = format!("{} {how}\n", stopped.guest);
    context.print(|| Body::Stop(stopped), || text)
}

/// Resets a guest's machine, as its button would.
///
/// # Errors
/// When no such guest runs, or it refuses.
pub(crate) fn reset(context: &mut Context<'_>, args: &GuestArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&args.guest, "/reset")?;
    let ResetAnswer { guest } =
        asking.call(context, Method::POST, &path, &NOTHING, None::<&Value>, Duration::ZERO)?;
    let text = format!("{guest} was reset\n");
    context.print(|| Body::Reset { guest }, || text)
}
