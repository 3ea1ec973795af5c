//! What this program logs to standard error.
//!
//! Whoever reads standard error may stop reading, and a guest must be stopped and its devices released all the same. So
//! the operator's process hands its messages to a thread ([`OutputQueue`]); those that do not fit in its queue are left out, and
//! their number is logged. So is what one cause logs too often ([`limit`]).

pub(crate) mod limit;

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use limit::{Causes, Limit};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::output::{OutputQueue, Standard};

/// Messages that wait to be written, in bytes: what a verbose run says in its first seconds.
const LIMIT: usize = 256 << 10;
/// Bytes of one message: what is longer is cut. It may quote a file, and one that fits in no queue would never be logged.
const LONGEST: usize = LIMIT / 8;
/// How long the end of this process waits for a reader of standard error who takes nothing.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long it waits for one who takes little.
const FLUSH: Duration = Duration::from_secs(5);

/// The queue, in a process that has one.
static QUEUE: OnceLock<Arc<OutputQueue>> = OnceLock::new();
/// Messages that did not fit and were not yet counted in the log.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);
/// What was logged how often.
static CAUSES: LazyLock<Arc<Causes>> = LazyLock::new(|| Causes::new(|count| say(format_args!("{count}"))));

/// The time now, as RFC 3339 has it, in UTC.
pub(crate) fn now() -> String {
    let mut text = String::new();
    // A String takes any write.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// Logs what happens to standard error: information at first, more with `verbose` or as `RUST_LOG` says. Lines begin with
/// the time where nobody adds it: neither a person at a terminal, nor systemd's journal, nor a process to which this is relayed.
pub(crate) fn start(verbose: u8, is_relayed: bool) {
    let level = ["info", "debug", "trace"][usize::from(verbose.min(2))];
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Messages)
        .with_ansi(has_colours())
        .with_target(verbose > 1);
    // It fails only when there is one already, which then has what is logged.
    let limit = Limit(CAUSES.clone());
    let _ = match is_relayed || io::stderr().is_terminal() || std::env::var_os("JOURNAL_STREAM").is_some() {
        true => subscriber.without_time().finish().with(limit).try_init(),
        false => subscriber.finish().with(limit).try_init(),
    };
}

/// Whether standard error is a terminal with colours, and whoever reads it wants them (<https://no-color.org>).
fn has_colours() -> bool {
    let is_set = |name, value: fn(&OsStr) -> bool| std::env::var_os(name).is_some_and(|text| value(&text));
    io::stderr().is_terminal()
        && !is_set("NO_COLOR", |text| !text.is_empty())
        && !is_set("TERM", |text| text == "dumb")
}

/// From here on no message waits for the reader of standard error. Without a thread to spare they do.
pub(crate) fn never_wait() {
    let queue = OutputQueue::new(LIMIT);
    // Without a thread messages are written at once.
    if queue.start("log", Standard::Error, drop).is_ok() && QUEUE.set(queue).is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current();
            let trace = std::backtrace::Backtrace::capture();
            let trace = match trace.status() {
                std::backtrace::BacktraceStatus::Captured => format!("{trace}\n"),
                _ => String::new(),
            };
            say(format_args!("thread '{}' {panic}\n{trace}", thread.name().unwrap_or("without a name")));
            // The process may be about to end.
            flush();
        }));
    }
}

/// Writes what waits to be written, for a bounded time. Nothing that is said later is sure to be seen.
pub(crate) fn flush() {
    CAUSES.log_silent(None);
    if let Some(queue) = QUEUE.get() {
        queue.flush(TIMEOUT, FLUSH);
    }
}

/// Says something whatever the log's level is.
pub(crate) fn say(text: std::fmt::Arguments<'_>) {
    // A message is one piece, so that it is said as a whole or not at all. Writing to the queue does not fail, and nothing
    // can be done about an error stream that can't be written.
    let _ = Messages.write_all(text.to_string().as_bytes());
}

/// Standard error, as everything in this program should write to it: each write is one message.
#[derive(Debug)]
pub(crate) struct Messages;

impl Write for Messages {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let Some(queue) = QUEUE.get() else { return io::stderr().write(message) };
        let left_out = LEFT_OUT.swap(0, Ordering::Relaxed);
        let note = match left_out {
            0 => String::new(),
            count => format!("({count} messages are left out: standard error was not read)\n"),
        };
        if !queue.push(&[note.as_bytes(), &cut(message)].concat()) {
            LEFT_OUT.fetch_add(left_out + 1, Ordering::Relaxed);
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A message that fits: the end of a longer one is left out, and how long it was is logged.
fn cut(message: &[u8]) -> Cow<'_, [u8]> {
    if message.len() <= LONGEST {
        return message.into();
    }
    // Not within a character.
    let end = (LONGEST - 3..=LONGEST).rev().find(|end| message[*end] & 0xc0 != 0x80).unwrap_or(LONGEST);
    let (start, rest) = message.split_at(end);
    [start, format!("… ({} bytes are left out)\n", rest.len()).as_bytes()].concat().into()
}
