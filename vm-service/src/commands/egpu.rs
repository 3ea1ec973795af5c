//! `egpu`: GPUs in enclosures of USB4 and Thunderbolt.

mod info;

use clap::{Args, Subcommand};

use super::SourceArgs;
use crate::context::Context;
use crate::failure::Failure;

/// Arguments of `egpu`.
#[derive(Debug, Args)]
pub(crate) struct EgpuArgs {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what is connected, how fast, and which PCI functions are behind it
    #[command(visible_alias = "i")]
    Info,
}

/// Does what a command of `egpu` says.
///
/// # Errors
/// What that command says.
pub(crate) fn run(context: &mut Context<'_>, args: &EgpuArgs) -> Result<(), Failure> {
    match args.action {
        Action::Info => info::run(context),
    }
}
