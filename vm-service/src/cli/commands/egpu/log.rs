//! `egpu log`: what commands have logged into files.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use clap::Args;
use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp};

use crate::api::{Body, Document, LogCategory, LogLevel, LogRecord};
use crate::cli::commands::following::Following;
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::log;
use crate::log::reader::LogReader;
use crate::text::table::printable;

/// How long to wait before more of the log is looked for.
const POLL: Duration = Duration::from_millis(250);

/// Arguments of `egpu log`.
#[derive(Debug, Args)]
pub(super) struct LogArgs {
    /// Only records of this level or above it: trace, debug, info, warn, error or fatal
    #[arg(long, value_name = "LEVEL", value_parser = level)]
    level: Option<Least>,
    /// Only records about these, as in EGPU,USB4: GENERAL, DRIVER, EGPU, MEMORY, PCIE, USB4, CUDA, CLI, PYTHON
    #[arg(long, value_name = "CATEGORY", value_delimiter = ',', value_parser = category)]
    category: Vec<LogCategory>,
    /// Only records since then: so long ago, as in 10m, 2h or 3d, or a time, as in 2026-11-23T09:30:00Z
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<Timestamp>,
    /// Only records with this text in the line that is printed of them without `--json`
    #[arg(long, value_name = "TEXT")]
    grep: Option<String>,
    /// Only the last so many of them
    #[arg(long, short = 'n', value_name = "NUMBER")]
    lines: Option<usize>,
    /// Print also what comes, until a signal or the end of whoever reads it
    #[arg(long, short)]
    follow: bool,
}

/// Which records matter enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Least {
    Level(LogLevel),
    Fatal,
}

/// Prints records of the log files, oldest first; in JSON, one document a line.
///
/// # Errors
/// When there is no log, or it can't be read.
pub(super) fn run(context: &mut Context<'_>, args: &LogArgs) -> Result<(), Failure> {
    let Some(folder) = context.logs.clone() else {
        return Err(Failure::usage("there is no log: name its directory with `--log-dir`"));
    };
    let shown = folder.display().to_string();
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::failed(format_args!(
            "there is no log in {shown}: no command has written one; another directory is named with `--log-dir`"
        )),
        _ => Failure::failed(format_args!("the log in {shown} can't be read: {error}")),
    };
    let following = args.follow.then(Following::start).transpose()?;
    let mut reader = LogReader::open(folder).map_err(unreadable)?;
    let mut last = VecDeque::new();
    while let Some((record, time)) = reader.next().map_err(unreadable)? {
        if !args.wants(&record, time) {
            continue;
        }
        match args.lines {
            None => print(context, record)?,
            Some(most) => {
                last.push_back(record);
                if last.len() > most {
                    last.pop_front();
                }
            }
        }
    }
    last.into_iter().try_for_each(|record| print(context, record))?;
    context.out.flush()?;
    if let Some(following) = following {
        while following.wait(POLL)? {
            while let Some((record, time)) = reader.next().map_err(unreadable)? {
                if args.wants(&record, time) {
                    print(context, record)?;
                }
            }
            context.out.flush()?;
        }
    }
    let damaged = reader.damaged();
    if damaged > 0 {
        log::say(format_args!(
            "({damaged} damaged lines of the log in {} are left out)\n",
            printable(&shown)
        ));
    }
    match reader.refused() {
        Some(refused) => Err(Failure::failed(format_args!("{refused}, and is not read; move it away"))),
        None => Ok(()),
    }
}

fn print(context: &mut Context<'_>, record: LogRecord) -> Result<(), Failure> {
    let line = match context.json {
        true => serde_json::to_string(&Document::new(Body::EgpuLog(record))).map_err(Failure::failed)?,
        // What is not the first line of a record is indented, so that none looks like another record.
        false => record.to_string().lines().map(printable).collect::<Vec<_>>().join("\n    "),
    };
    Ok(writeln!(context.out, "{line}")?)
}

impl LogArgs {
    fn wants(&self, record: &LogRecord, time: Timestamp) -> bool {
        let matters = self.level.is_none_or(|least| match least {
            Least::Level(level) => record.level >= level,
            Least::Fatal => record.is_fatal(),
        });
        matters
            && (self.category.is_empty() || self.category.contains(&record.category))
            && self.since.is_none_or(|since| time >= since)
            && self.grep.as_ref().is_none_or(|text| record.to_string().contains(text))
    }
}

fn level(text: &str) -> Result<Least, &'static str> {
    match text.to_uppercase().as_str() {
        "FATAL" => Ok(Least::Fatal),
        name => name.parse().map(Least::Level).map_err(|_| "write trace, debug, info, warn, error or fatal"),
    }
}

fn category(text: &str) -> Result<LogCategory, &'static str> {
    let unknown = "write GENERAL, DRIVER, EGPU, MEMORY, PCIE, USB4, CUDA, CLI or PYTHON";
    text.to_uppercase().parse().map_err(|_| unknown)
}

/// A time, or how long ago it was. A day has 24 hours.
fn since(text: &str) -> Result<Timestamp, &'static str> {
    let unknown =
        "write how long ago, as in 10m, 2h or 3d, or a time before 9999-12-30, as in 2026-11-23T09:30:00Z";
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago: Span = text.parse().map_err(|_| unknown)?;
    let ago = ago.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| unknown)?;
    if ago < SignedDuration::ZERO {
        return Err(unknown);
    }
    Timestamp::now().checked_sub(ago).map_err(|_| "there was no such time")
}
