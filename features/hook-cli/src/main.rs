//! The command line of the memory hook: runs CUDA programs with it, pauses them, and asks what they hold.

mod ask;
mod run;
mod symbols;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs CUDA programs with the memory hook.
#[derive(Parser)]
#[command(name = "vmhook", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Status(ask::ShowStatus),
    Pause(ask::Pause),
    Resume(ask::Resume),
}

fn main() -> ExitCode {
    let done: Result<(), Box<dyn std::error::Error>> = match Cli::parse().command {
        Command::Run(run) => run.run().map_err(Into::into),
        Command::Status(status) => status.run().map_err(Into::into),
        Command::Pause(pause) => pause.run().map_err(Into::into),
        Command::Resume(resume) => resume.run().map_err(Into::into),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmhook: {error}");
            ExitCode::FAILURE
        }
    }
}
