//! Why there is no code.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::Limits;

/// Why an assembler made no code.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AssembleError {
    /// There is no such program.
    #[error("no {program} in {}: {remedy}", places(.looked))]
    Missing {
        /// Its name.
        program: &'static str,
        /// Where it was looked for.
        looked: Vec<PathBuf>,
        /// What to install, and how to name what is installed elsewhere.
        remedy: String,
    },
    /// The architecture's name is none.
    #[error("{name:?} names no architecture: {wanted}")]
    Architecture {
        /// The name.
        name: String,
        /// What one looks like.
        wanted: &'static str,
    },
    /// The process could not be started or waited for.
    #[error("{program}: {what} failed: {cause}")]
    Start {
        /// The program.
        program: String,
        /// What was tried.
        what: &'static str,
        /// The operating system's error.
        cause: String,
    },
    /// The assembler did not take the code.
    #[error("{program} refused the code ({status}): {messages}")]
    Refused {
        /// The program.
        program: String,
        /// How it ended.
        status: String,
        /// What it said, cut after some kilobytes.
        messages: String,
    },
    /// It did not end in time, and was killed.
    #[error("{program} did not end in {time:?} and was killed: raise the limit, or make the kernel smaller")]
    Late {
        /// The program.
        program: String,
        /// The limit.
        time: Duration,
    },
    /// A signal ended it: it crashed, or met a limit that it did not look out for.
    #[error(
        "{program} was ended by signal {signal} ({}): {messages}; its limits were {limits:?}",
        signal_name(*.signal)
    )]
    Killed {
        /// The program.
        program: String,
        /// The signal's number.
        signal: i32,
        /// What it might have met.
        limits: Limits,
        /// What it said, cut after some kilobytes.
        messages: String,
    },
    /// It ended well, but what it wrote is no code for the device.
    #[error("{program} ended well, but {reason}")]
    NoCode {
        /// The program.
        program: String,
        /// What is wrong with its output.
        reason: String,
    },
}

/// Says what failed of a program.
pub fn failed(program: &Path, what: &'static str) -> impl FnOnce(io::Error) -> AssembleError {
    let program = program.display().to_string();
    move |error| AssembleError::Start { program, what, cause: error.to_string() }
}

fn places(looked: &[PathBuf]) -> String {
    let all: Vec<_> = looked.iter().map(|path| path.display().to_string()).collect();
    all.join(", ")
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => "it gave up, as without memory",
        libc::SIGBUS | libc::SIGSEGV => "it crashed, as without memory",
        libc::SIGKILL => "killed",
        libc::SIGXCPU => "its processor time was used up",
        libc::SIGXFSZ => "it wrote too much",
        _ => "it crashed",
    }
}
