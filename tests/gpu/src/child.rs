//! A section in a process of its own. It tells what it does on its standard output, a line of JSON for each event; a
//! test that takes its process with it is one that failed, and the tests after it get a new process.

use std::any::Any;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::skip::Skip;
use crate::table::{Outcome, Record, Report, Table};
use crate::{Arguments, Section, Test};

/// What a child tells.
#[derive(Serialize, Deserialize)]
enum Event {
    /// The test with this number begins.
    Begin(usize),
    /// It has ended.
    End(Record),
}

/// Runs a section in child processes, and adds what they tell to the table.
pub(crate) fn section(section: &Section, arguments: &Arguments, table: &mut Table) {
    let tests = section.selected(arguments);
    let deadline = Instant::now() + section.timeout;
    let add = |table: &mut Table, index: usize, outcome| {
        let name = tests.get(index).map_or("?", |test| test.name.as_str());
        table.add(Record::new(section.name, name, outcome));
    };
    let mut from = 0;
    while from < tests.len() {
        let (mut child, events) = match start(section, from) {
            Ok(started) => started,
            Err(error) => {
                (from..tests.len())
                    .for_each(|index| add(table, index, Outcome::Failed(format!("{error:#}"))));
                return;
            }
        };
        let mut running = None;
        let late = loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Begin(index)) => running = Some(index),
                Ok(Event::End(record)) => {
                    table.add(record);
                    from += 1;
                    running = None;
                }
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) => break true,
            }
        };
        if late {
            let _ = child.kill();
        }
        let ended = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        if from == tests.len() {
            return;
        }
        if late {
            let reason = format!("the section's {} s are over", section.timeout.as_secs());
            (from..tests.len()).for_each(|index| add(table, index, Outcome::Failed(reason.clone())));
            return;
        }
        add(table, running.unwrap_or(from), Outcome::Failed(format!("its process ended: {ended}")));
        from += 1;
    }
}

fn start(section: &Section, from: usize) -> anyhow::Result<(Child, mpsc::Receiver<Event>)> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(["--child", section.name, "--from", &from.to_string()])
        // What the driver compiled before would make compiling look quick.
        .env("CUDA_CACHE_DISABLE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a process for the section")?;
    let output = child.stdout.take().context("the child's output")?;
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let Ok(line) = line else { return };
            match serde_json::from_str(&line) {
                Ok(event) => {
                    if send.send(event).is_err() {
                        return;
                    }
                }
                // What a library prints.
                Err(_) => println!("    {line}"),
            }
        }
    });
    Ok((child, receive))
}

/// Runs the tests of a section in this process.
pub(crate) fn run(section: &Section, arguments: &Arguments) -> ExitCode {
    let gpu = match Gpu::open(arguments.device) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    for (index, test) in section.selected(arguments).iter().enumerate().skip(arguments.from) {
        tell(&Event::Begin(index));
        tell(&Event::End(record(section, test, &gpu)));
    }
    ExitCode::SUCCESS
}

fn record(section: &Section, test: &Test, gpu: &Gpu) -> Record {
    let mut report = Report::default();
    let begin = Instant::now();
    let outcome = match catch_unwind(AssertUnwindSafe(|| (test.run)(gpu, &mut report))) {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(error)) => match error.downcast_ref::<Skip>() {
            Some(Skip(reason)) => Outcome::Skipped(reason.clone()),
            None => Outcome::Failed(format!("{error:#}")),
        },
        Err(panic) => Outcome::Failed(format!("panicked: {}", message(&*panic))),
    };
    Record {
        seconds: begin.elapsed().as_secs_f64(),
        report,
        ..Record::new(section.name, &test.name, outcome)
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn tell(event: &Event) {
    if let Ok(mut line) = serde_json::to_vec(event) {
        line.push(b'\n');
        // Nobody to tell: the parent has gone, and will not miss it.
        let _ = std::io::stdout().write_all(&line);
    }
}
