//! `logs`: what the process of a guest logged, and with `--follow` what it logs.

use std::time::Duration;

use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::asking::{Asking, path};
use super::following::Following;
use super::guests::GuestArgs;
use crate::api::{Body, Document, GuestLog};
use crate::cli::context::Context;
use crate::daemon::LogOptions;
use crate::failure::Failure;
use crate::text::table::printable;

/// How long to wait before more of a log is asked for.
const POLL: Duration = Duration::from_millis(250);

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    /// Print also what comes, until the guest has ended; in JSON, one document a line
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// The log of the guest of this name before this one
    #[arg(long, short, conflicts_with = "follow")]
    pub(crate) previous: bool,
}

/// Prints the log of a guest that the daemon started, also once it has ended.
///
/// # Errors
/// When there is none, or the daemon ends.
pub(crate) fn run(context: &mut Context<'_>, args: &LogsArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.guest.daemon)?;
    let path = path(&args.guest.guest, "/log")?;
    let following = args.follow.then(Following::start).transpose()?;
    let mut options = LogOptions { previous: args.previous, ..LogOptions::default() };
    loop {
        let log: GuestLog = asking.call(Method::GET, &path, &options, None::<&Value>, Duration::ZERO)?;
        let text = log.log.lines().map(|line| printable(line) + "\n").collect();
        let Some(following) = &following else {
            return context.print(|| Body::Logs(log), || text);
        };
        if log.log.is_empty() {
            if log.ended {
                return Ok(());
            }
            if !following.wait(POLL)? {
                return Ok(());
            }
            continue;
        }
        options.from = Some(log.next);
        let text = match context.json {
            true => serde_json::to_string(&Document::new(Body::Logs(log))).map_err(Failure::failed)? + "\n",
            false => text,
        };
        context.out.write_all(text.as_bytes())?;
        context.out.flush()?;
    }
}
