//! One run of an assembler: what it is started with, and what it wrote.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use super::Limits;
use super::process::{self, Ended, Running, Scratch};

/// How much of its messages is reported.
const MESSAGE_BYTES: u64 = 8 << 10;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ptxas,
    /// With what comes before the arguments of [`entry`](super::entry).
    Driver(Vec<OsString>),
}

/// What it is to make, whatever the code is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) architecture: String,
    pub(super) level: u8,
    pub(super) limits: Limits,
}

/// What could not be done on this side.
pub(super) struct Failed {
    pub(super) what: &'static str,
    pub(super) error: io::Error,
}

/// Says what failed.
pub(super) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> Failed {
    move |error| Failed { what, error }
}

/// A process of an assembler, and its files. Dropping it ends the process.
#[derive(Debug)]
pub(super) struct Job {
    running: Running,
    output: Scratch,
    messages: Scratch,
    /// What stays open as long as it may read.
    input: Vec<OwnedFd>,
}

impl Job {
    /// Starts the program. It opens `input` by its name; `given` is open in it.
    pub(super) fn start(
        program: &Program,
        order: &Order,
        input: OsString,
        given: Option<&Scratch>,
    ) -> Result<Self, Failed> {
        let output = Scratch::new("cubin").map_err(failed("making its output"))?;
        let messages = Scratch::new("messages").map_err(failed("making its output"))?;
        let (architecture, level) = (order.architecture.as_str(), order.level.to_string());
        let mut arguments = Vec::new();
        match &program.kind {
            Kind::Ptxas => {
                arguments.extend(["--gpu-name", architecture, "--opt-level", &level].map(OsString::from));
                arguments.extend(["--output-file".into(), output.path(), input]);
            }
            Kind::Driver(before) => {
                arguments.extend(before.iter().cloned());
                arguments.extend([architecture.into(), level.into(), input, output.path()]);
            }
        }
        let program = process::Program {
            path: &program.path,
            arguments,
            reserves_memory: matches!(program.kind, Kind::Driver(_)),
            limits: order.limits,
        };
        let files: Vec<&Scratch> = given.into_iter().chain([&output]).collect();
        let running = process::start(&program, &files, &messages).map_err(failed("running it"))?;
        Ok(Self { running, output, messages, input: Vec::new() })
    }

    /// Keeps these open until it has ended.
    pub(super) fn with_input(self, input: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self { input: input.into_iter().collect(), ..self }
    }

    /// Whether its process ended before `deadline`.
    pub(super) fn ends_by(&self, deadline: Instant) -> io::Result<bool> {
        self.running.ends_by(deadline)
    }

    /// Waits for its end; gives how it ended, and its files.
    pub(super) fn end(self, deadline: Instant) -> Result<(Ended, Written), Failed> {
        let Self { running, output, messages, input } = self;
        let ended = running.end(deadline).map_err(failed("running it"))?;
        drop(input);
        Ok((ended, Written { output, messages }))
    }

    /// What it has said so far.
    pub(super) fn messages(&self) -> String {
        said(&self.messages)
    }
}

/// What a process wrote that has ended.
pub(super) struct Written {
    output: Scratch,
    messages: Scratch,
}

impl Written {
    /// What it made.
    pub(super) fn output(&self, most: u64) -> Result<Vec<u8>, Failed> {
        self.output.read(most).map_err(failed("reading its output"))
    }

    /// What it said, cut after some kilobytes.
    pub(super) fn messages(&self) -> String {
        said(&self.messages)
    }
}

fn said(messages: &Scratch) -> String {
    let said = messages.read(MESSAGE_BYTES).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    if said.is_empty() { "it said nothing".to_owned() } else { said }
}
