//! `vmhook status`, `pause`, `resume`: asks a program that runs with the hook.

use std::time::{Duration, Instant};

use clap::Args;
use vm_hook::client::{self, Unreachable};
use vm_hook::control::{self, ANSWER, Accounts, Answer, Changed, Frame, Request, State, Status, Wrong};

use crate::units::printable;
use crate::{output, symbols};

/// The most of a text of the program's that is shown.
const LONGEST: usize = 1000;
/// What an answer may take beyond the work that was asked for.
const ANSWERS: Duration = Duration::from_secs(15);

/// The program, and how its answer is shown.
#[derive(Args)]
struct Program {
    /// The program's process
    pid: u32,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

/// Show what a program's device memory is used for
#[derive(Args)]
pub(crate) struct ShowStatus {
    #[command(flatten)]
    program: Program,
    /// How many of the largest allocations are listed
    #[arg(long, value_name = "N", default_value_t = 10)]
    largest: usize,
    /// Show which call stacks hold memory; the program records them from here on
    #[arg(long)]
    stacks: bool,
    /// Seconds until an answer must have come
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    timeout: u64,
}

/// Give a program's device memory back, with its contents kept in host memory; its calls wait until it is resumed
#[derive(Args)]
pub(crate) struct Pause {
    #[command(flatten)]
    program: Program,
    /// Seconds that the program's calls and work may take to end; then it is not paused
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
}

/// Let a paused program go on, with its device memory as it was
#[derive(Args)]
pub(crate) struct Resume {
    #[command(flatten)]
    program: Program,
    /// Seconds until an answer must have come
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
}

/// Why there is no answer, or no good one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It can't be asked.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// It does not answer.
    #[error("process {pid}: {source}")]
    Answer {
        /// The process.
        pid: u32,
        /// What is wrong.
        source: Wrong,
    },
    /// It did what was asked, and that can't be told.
    #[error("process {pid} has answered: {source}")]
    Output {
        /// The process.
        pid: u32,
        /// What is wrong.
        source: output::Error,
    },
    /// It did not do what was asked.
    #[error("process {pid}: {text}")]
    Refused {
        /// The process.
        pid: u32,
        /// Why.
        text: String,
    },
}

impl ShowStatus {
    /// Asks, and prints.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let request = Request::Status { largest: self.largest, stacks: self.stacks };
        self.program.ask(&request, Duration::from_secs(self.timeout))
    }
}

impl Pause {
    /// Asks, and prints.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let timeout = self.timeout.min(control::LONGEST);
        // Copies come behind the timeout, and end.
        self.program.ask(&Request::Pause { timeout }, Duration::from_secs(timeout) + 40 * ANSWERS)
    }
}

impl Resume {
    /// Asks, and prints.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        self.program.ask(&Request::Resume, Duration::from_secs(self.timeout))
    }
}

impl Program {
    fn ask(&self, request: &Request, time: Duration) -> Result<(), Error> {
        let pid = self.pid;
        let mut stream = client::program(pid)?;
        let wrong = |source| Error::Answer { pid, source };
        let now = Instant::now();
        control::write(&mut stream, request, now + ANSWERS).map_err(wrong)?;
        let deadline = now.checked_add(time).unwrap_or(now + ANSWERS);
        let mut answer: Answer = control::read(&mut stream, ANSWER, deadline).map_err(wrong)?;
        match &mut answer {
            Answer::Error(text) => return Err(Error::Refused { pid, text: printable(text, LONGEST) }),
            Answer::Status(status) => symbols::name(status.stacks.as_deref_mut().unwrap_or_default()),
            _ => {}
        }
        let text = match self.json {
            true => serde_json::to_string(&answer).unwrap_or_default(),
            false => shown(&answer).trim_end().to_owned(),
        };
        output::say(&text).map_err(|source| Error::Output { pid, source })
    }
}

fn shown(answer: &Answer) -> String {
    match answer {
        Answer::Status(status) => shown_status(status),
        Answer::Paused(changed) => {
            let mut text = format!("paused: {} given back{}\n", bytes(changed.bytes), speed(changed));
            for (count, what) in [
                (changed.dropped, "of it dropped, as the program allows"),
                (changed.pinned, "pinned, on the device still"),
                (changed.native, "of the driver's own, on the device still"),
                (changed.failed, "not unmapped by the driver, on the device still"),
            ] {
                if count != 0 {
                    text += &format!("{} {what}\n", bytes(count));
                }
            }
            text
        }
        Answer::Resumed(changed) => {
            format!("running: {} taken again{}\n", bytes(changed.bytes), speed(changed))
        }
        Answer::Error(text) => format!("{text}\n"),
        Answer::Exported { .. } => String::new(),
    }
}

fn speed(changed: &Changed) -> String {
    let seconds = changed.milliseconds.max(1) as f64 / 1e3;
    let rate = (changed.bytes - changed.dropped.min(changed.bytes)) as f64 / seconds / f64::from(1 << 30);
    format!(" in {:.3} s ({rate:.1} GiB/s)", changed.milliseconds as f64 / 1e3)
}

fn shown_status(status: &Status) -> String {
    let state = match status.state {
        State::Running => "running",
        State::Changing => "changing",
        State::Paused => "paused",
    };
    let (program, mode) = (printable(&status.program, LONGEST), printable(&status.mode, LONGEST));
    let mut text = format!("{} {program} ({mode}): {state}", status.pid);
    match status.waiting {
        0 => text += "\n",
        threads => text += &format!(", {threads} threads wait\n"),
    }
    if let Some(memory) = &status.memory {
        text += &shown_memory(memory);
    }
    for holder in status.stacks.iter().flatten() {
        text += &format!("{} in {} allocations:\n", bytes(holder.bytes), holder.allocations);
        if holder.frames.is_empty() {
            text += "    before stacks were recorded\n";
        }
        for Frame { file, offset, function } in &holder.frames {
            let file = printable(file, LONGEST);
            text += &match function {
                Some(function) => format!("    {} ({file}+{offset:#x})\n", printable(function, LONGEST)),
                None => format!("    {file}+{offset:#x}\n"),
            };
        }
    }
    text
}

fn shown_memory(memory: &Accounts) -> String {
    let quota = memory.quota.map_or("none".to_owned(), bytes);
    let mut text = format!("quota {quota}, {} allocations\n", memory.allocations);
    for (count, what) in [
        (memory.r#virtual, "virtual"),
        (memory.pinned, "pinned, of these"),
        (memory.native, "the driver's own"),
        (memory.managed, "managed"),
        (memory.pools, "in pools"),
        (memory.physical, "physical, of its own virtual memory"),
        (memory.arrays, "in arrays"),
        (memory.paused, "paused"),
        (memory.promised, "promised"),
        (memory.reserved, "of the host's, reserved for pauses"),
    ] {
        text += &format!("{:>12} {what}\n", bytes(count));
    }
    for owner in &memory.largest {
        let (number, tag) = (owner.number, printable(owner.tag.as_deref().unwrap_or_default(), LONGEST));
        let kind = printable(&owner.kind, LONGEST);
        let words = [
            (owner.native, "native"),
            (owner.native, &*kind),
            (owner.pinned, "pinned"),
            (owner.droppable, "droppable"),
        ];
        let words: Vec<&str> = words.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
        text +=
            format!("{:>12} {:#x} #{number} {tag} {}", bytes(owner.bytes), owner.address, words.join(" "))
                .trim_end();
        text += "\n";
    }
    text
}

/// Bytes, in the largest unit that they have one of.
fn bytes(count: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(bits, _)| count >> bits != 0) {
        Some((bits, unit)) => format!("{:.1} {unit}", count as f64 / f64::from(1u32 << (bits - 10)) / 1024.0),
        None => format!("{count} B"),
    }
}

#[cfg(test)]
mod tests {
    use vm_hook::control::{Holder, Owner};

    use super::*;

    #[test]
    fn what_a_program_says_is_not_obeyed() {
        let evil = "\u{1b}]0;evil\u{7}";
        let owner = Owner {
            address: 0,
            bytes: 0,
            kind: evil.into(),
            number: 0,
            tag: Some(evil.into()),
            droppable: false,
            pinned: false,
            native: false,
        };
        let frame = Frame { file: evil.into(), offset: 0, function: Some(evil.into()) };
        let status = Status {
            pid: 1,
            program: evil.into(),
            mode: evil.into(),
            state: State::Running,
            waiting: 0,
            memory: Some(Accounts { largest: vec![owner], ..Accounts::default() }),
            stacks: Some(vec![Holder { frames: vec![frame], ..Holder::default() }]),
        };
        let text = shown(&Answer::Status(Box::new(status)));
        assert!(text.matches("evil").count() == 5 && !text.contains(['\u{1b}', '\u{7}']), "{text:?}");
    }

    #[test]
    fn bytes_have_units() {
        let check = |count: u64, text: &str| assert_eq!(bytes(count), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536, "1.5 KiB");
        check(3 << 30, "3.0 GiB");
        check(u64::MAX, "16777216.0 TiB");
    }
}
