//! `egpu`: GPUs in enclosures of USB4 and Thunderbolt.

mod benchmark;
mod config;
mod connect;
mod diag;
mod disconnect;
mod enclosure;
mod gift;
mod guests;
mod info;
mod inject;
mod log;
mod monitor;
mod policy;
mod reset;
mod simulate;
mod status;
mod warning;
mod watch;
mod watcher;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use log::LogArgs;
use vm_passthrough::sim::SimHost;

use super::SourceArgs;
use crate::cli::context::Context;
use crate::failure::Failure;

/// Arguments of `egpu`.
#[derive(Debug, Args)]
pub(crate) struct EgpuArgs {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Look for USB4 and Thunderbolt in DIR instead of /sys/bus/thunderbolt
    #[arg(long, value_name = "DIR", global = true)]
    thunderbolt: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what is connected, how fast, and which PCI functions are behind it
    #[command(visible_alias = "i")]
    Info,
    /// Connect an enclosure and wait for its GPU
    #[command(visible_alias = "c")]
    Connect(connect::ConnectArgs),
    /// Disconnect an enclosure safely
    #[command(visible_alias = "dc")]
    Disconnect(disconnect::DisconnectArgs),
    /// Reset the GPU of an enclosure
    #[command(visible_alias = "r")]
    Reset(reset::ResetArgs),
    /// Check an enclosure and what it needs, with what shows it and what to do
    #[command(visible_alias = "d")]
    Diag(diag::DiagArgs),
    /// Watch enclosures until a signal comes: connect those that the policy allows, and stop, recover or give up those that fail
    Watch(watch::WatchArgs),
    /// Watch a simulated eGPU in virtual time, while a script breaks it
    Simulate(simulate::SimulateArgs),
    /// Break the enclosure of a simulated host, or heal it
    Inject(inject::InjectArgs),
    /// Show which enclosures may be connected, and change that
    Policy(policy::PolicyArgs),
    /// Forget an enclosure that is known
    Forget(policy::ForgetArgs),
    /// Print what commands that change something have logged into files
    #[command(visible_alias = "l")]
    Log(LogArgs),
    /// Show GPUs behind a tunnel, one in a row: enclosure, driver or guest, link, temperature, power and load
    #[command(visible_alias = "s")]
    Status(status::WhichArgs),
    /// Watch GPUs on a screen until q is typed, or as a stream of JSON lines
    #[command(visible_alias = "m")]
    Monitor(monitor::MonitorArgs),
    /// Show and set the clocks, the power limit, the fans and the performance level of a GPU
    #[command(visible_alias = "cf")]
    Config(config::ConfigArgs),
    /// Measure how fast a GPU is: copies over its link, beside what the link allows, f32 arithmetic and memory
    #[command(visible_alias = "b")]
    Benchmark(benchmark::BenchmarkArgs),
}

impl EgpuArgs {
    /// Whether it only reads.
    pub(crate) fn only_reads(&self) -> bool {
        match &self.action {
            Action::Info
            | Action::Diag(_)
            | Action::Status(_)
            | Action::Monitor(_)
            | Action::Log(_)
            | Action::Simulate(_) => true,
            Action::Policy(args) => args.only_reads(),
            Action::Config(args) => args.only_reads(),
            _ => false,
        }
    }
}

/// Does what a command of `egpu` says.
///
/// # Errors
/// What that command says.
pub(crate) fn run(context: &mut Context<'_>, args: &EgpuArgs) -> Result<(), Failure> {
    if let Some(dir) = &args.thunderbolt {
        context.host.thunderbolt = std::path::absolute(dir)?;
    }
    // Commands that last see the simulated host go on.
    let lasts = matches!(args.action, Action::Monitor(_) | Action::Watch(_));
    let _going = context.sim.as_ref().filter(|_| lasts).map(SimHost::go_on);
    // Measuring has a message of its own.
    let changes = !args.only_reads() && !matches!(args.action, Action::Benchmark(_));
    if args.source.root.is_some() && changes {
        return Err(Failure::usage(
            "a captured tree is only read: leave `--root` out to act on this machine, or try it with `--sim DIR`",
        ));
    }
    match &args.action {
        Action::Info => info::run(context),
        Action::Connect(args) => connect::run(context, args),
        Action::Disconnect(args) => disconnect::run(context, args),
        Action::Reset(args) => reset::run(context, args),
        Action::Diag(args) => diag::run(context, args),
        Action::Watch(args) => watch::run(context, args),
        Action::Simulate(args) => simulate::run(context, args),
        Action::Inject(args) => inject::run(context, args),
        Action::Policy(args) => policy::run(context, args),
        Action::Forget(args) => policy::forget(context, args),
        Action::Log(_) if args.source.root.is_some() || args.source.sim.sim.is_some() => Err(Failure::usage(
            "`egpu log` reads log files and no host; name their directory with `--log-dir`",
        )),
        Action::Log(args) => log::run(context, args),
        Action::Status(args) => status::run(context, args),
        Action::Monitor(args) => monitor::run(context, args),
        Action::Config(args) => config::run(context, args),
        Action::Benchmark(_) if args.source.root.is_some() => {
            Err(Failure::usage("a captured tree has no GPU that could be measured; leave out --root"))
        }
        Action::Benchmark(args) => benchmark::run(context, args),
    }
}
