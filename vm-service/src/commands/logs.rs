//! `logs`: what the process of a guest logged.

use std::time::Duration;

use hyper::Method;
use serde_json::Value;

use super::asking::{Asking, NOTHING, path};
use super::guests::GuestArgs;
use crate::context::Context;
use crate::failure::Failure;
use crate::json::{Body, GuestLog};
use crate::table::printable;

/// Prints the log of a guest that the daemon started, also once it has ended.
///
/// # Errors
/// When there is none.
pub(crate) fn run(context: &mut Context<'_>, args: &GuestArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&args.guest, "/log")?;
    let log: GuestLog = asking.call(context, Method::GET, &path, &NOTHING, None::<&Value>, Duration::ZERO)?;
    let text = log.log.lines().map(|line| printable(line) + "\n").collect();
    context.print(|| Body::Logs(log), || text)
}
