//! `serve`: the daemon.

use std::path::PathBuf;

use clap::Args;

use crate::cli::context::Context;
use crate::daemon;
use crate::failure::Failure;

/// Where the daemon is.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// The daemon's socket, instead of daemon.sock in the directory of `--state`
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

/// Serves the API until a signal comes.
///
/// # Errors
/// When another daemon serves, or the socket can't be made.
pub(crate) fn run(context: &mut Context<'_>, args: &DaemonArgs) -> Result<(), Failure> {
    if context.json {
        return Err(Failure::usage("`serve` prints nothing; leave `--json` out"));
    }
    daemon::serve(&context.host, args.socket.as_ref())
}
