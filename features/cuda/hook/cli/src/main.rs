//! The command line of the memory hook: runs CUDA programs with it, pauses them, and asks what they hold.

mod ask;
mod bench;
mod child;
mod demo;
mod memory;
mod output;
mod plot;
mod run;
mod symbols;
mod sys;
mod tail;
mod trace;
mod units;
mod watch;

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
    Plot(plot::Plot),
    Watch(watch::Watch),
    Demo(demo::Demo),
    Bench(bench::Bench),
    /// A demo's program
    #[command(hide = true)]
    DemoProgram(demo::Program),
    /// The benchmark's program
    #[command(hide = true)]
    BenchProgram(bench::Program),
    Status(ask::ShowStatus),
    Pause(ask::Pause),
    Resume(ask::Resume),
}

fn main() -> ExitCode {
    let done: Result<(), Box<dyn std::error::Error>> = match Cli::parse().command {
        Command::Run(run) => run.run().map_err(Into::into),
        Command::Plot(plot) => plot.run().map_err(Into::into),
        Command::Watch(watch) => watch.run().map_err(Into::into),
        Command::Demo(demo) => demo.run().map_err(Into::into),
        Command::Bench(bench) => bench.run().map_err(Into::into),
        Command::DemoProgram(program) => program.run().map_err(Into::into),
        Command::BenchProgram(program) => program.run().map_err(Into::into),
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
