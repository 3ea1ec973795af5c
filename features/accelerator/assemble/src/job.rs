//! One run of an assembler: what it is started with, and what it wrote.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;
use std::{fmt, io};

use crate::process::{self, Ended, Program, Running, Scratch};
use crate::{AssembleError, Limits, failed};

/// How much of its messages is reported.
const MESSAGE_BYTES: u64 = 8 << 10;

/// A process of an assembler, and its files. Dropping it ends the process, with what that started in its process group.
pub struct Job {
    running: Running,
    program: PathBuf,
    limits: Limits,
    output: Scratch,
    messages: Scratch,
    /// What stays open as long as it may read.
    input: Vec<OwnedFd>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("program", &self.program).finish_non_exhaustive()
    }
}

impl Job {
    /// Starts the program. What is `given` is open in it, and `output` if it does not print that.
    ///
    /// # Errors
    /// [`AssembleError::Start`].
    pub fn start(program: Program<'_>, output: Scratch, given: &[&Scratch]) -> Result<Self, AssembleError> {
        let messages = Scratch::new("messages").map_err(failed(program.path, "making its output"))?;
        let running = process::start(&program, given, &output, &messages)
            .map_err(failed(program.path, "running it"))?;
        let Program { path, limits, .. } = program;
        Ok(Self { running, program: path.to_owned(), limits, output, messages, input: Vec::new() })
    }

    /// Keeps these open until it has ended.
    #[must_use]
    pub fn with_input(self, input: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self { input: input.into_iter().collect(), ..self }
    }

    /// Whether its process ended before `deadline`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn ends_by(&self, deadline: Instant) -> io::Result<bool> {
        self.running.ends_by(deadline)
    }

    /// Waits for its end; gives what it wrote if that was a good one. The process has ended by then, with its group:
    /// all that it started and that did not leave it.
    ///
    /// # Errors
    /// [`AssembleError::Late`], [`AssembleError::Refused`], [`AssembleError::Killed`], [`AssembleError::Start`].
    pub fn end(self, deadline: Instant) -> Result<Scratch, AssembleError> {
        let Self { running, program, limits, output, messages, input } = self;
        let ended = running.end(deadline).map_err(failed(&program, "running it"))?;
        drop(input);
        let program = program.display().to_string();
        match ended {
            Ended::Well => Ok(output),
            Ended::Late => Err(AssembleError::Late { program, time: limits.time }),
            Ended::Status(status) => {
                let (status, messages) = (format!("exit status {status}"), said(&messages));
                Err(AssembleError::Refused { program, status, messages })
            }
            Ended::Signal(signal) => {
                Err(AssembleError::Killed { program, signal, limits, messages: said(&messages) })
            }
        }
    }

    /// What it has said so far, cut after some kilobytes.
    pub fn messages(&self) -> String {
        said(&self.messages)
    }
}

fn said(messages: &Scratch) -> String {
    let said = messages.read(MESSAGE_BYTES).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    if said.is_empty() { "it said nothing".to_owned() } else { said }
}
