//! What this program logs: to standard error, and, of commands that change something or run for long, to files.
//!
//! Whoever reads standard error may stop reading, and a guest must be stopped and its devices released all the same. So
//! the operator's process hands its messages to a thread ([`OutputQueue`]); those that do not fit in its queue are left out, and
//! their number is logged. So is what one cause logs too often ([`limit`]).
//!
//! ```text
//! tracing ─▶ limit ─┬▶ messages ─▶ queue ─▶ standard error
//!                   └▶ record ───▶ queue ─▶ file (a lock, rotation)
//! ```
//!
//! Child processes write no files: what they log is relayed by the process that started them, and is in its records.

mod category;
mod file;
mod files;
pub(crate) mod limit;
pub(crate) mod reader;
mod record;
mod settings;

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

pub(crate) use category::category_of;
use files::Files;
use limit::{Causes, Limit};
use serde_json::Value;
pub(crate) use settings::{FOLDER, KEPT, SIZE, Settings, folder};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer};

use crate::api::{LogCategory, LogLevel, LogRecord};
use crate::deadlines::LOG_FILE_FLUSH;
use crate::os::output::{OutputQueue, Standard};

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
/// The log files, in a process that writes some.
static FILES: OnceLock<Files> = OnceLock::new();
/// Whether messages on standard error name the module that logged them.
static SHOWS_TARGETS: AtomicBool = AtomicBool::new(false);
thread_local! {
    /// What the message of a child process is about that this thread logs.
    static RELAYED: Cell<Option<LogCategory>> = const { Cell::new(None) };
}
/// What was logged how often.
static CAUSES: LazyLock<Arc<Causes>> = LazyLock::new(|| {
    Causes::new(|count| {
        say(format_args!("{count}"));
        keep(LogLevel::Warn, module_path!(), count.trim_end(), []);
    })
});

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
    let said = std::env::var(EnvFilter::DEFAULT_ENV).ok();
    let filter = said.and_then(|text| EnvFilter::try_new(category::directives(&text)).ok());
    let filter = filter.unwrap_or_else(|| EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Messages)
        .with_ansi(has_colours())
        // Whoever relays it needs the module for its category.
        .with_target(verbose > 1 || is_relayed);
    SHOWS_TARGETS.store(verbose > 1, Ordering::Relaxed);
    // It fails only when there is one already, which then has what is logged.
    let limit = Limit(CAUSES.clone());
    let _ = match is_relayed || io::stderr().is_terminal() || std::env::var_os("JOURNAL_STREAM").is_some() {
        true => subscriber.without_time().finish().with(Records(keep_record)).with(limit).try_init(),
        false => subscriber.finish().with(Records(keep_record)).with(limit).try_init(),
    };
}

/// From here on what is logged is in these files, too. What of them can't be is reported on standard error, and nothing more.
pub(crate) fn start_files(settings: Settings) {
    let folder = settings.folder.clone();
    match Files::start(settings) {
        // It has some already only when this is called twice.
        Ok(files) => drop(FILES.set(files)),
        Err(error) => say(format_args!("warning: no log in {}: {error}\n", folder.display())),
    }
}

/// The settings of the log files, in a process that writes some.
pub(crate) fn files() -> Option<&'static Settings> {
    FILES.get().map(|files| &files.settings)
}

/// Puts a record into the log files that standard error does not need, or has by other words.
pub(crate) fn keep(
    level: LogLevel,
    target: &str,
    message: &str,
    fields: impl IntoIterator<Item = (&'static str, Value)>,
) {
    if let Some(files) = FILES.get() {
        files.push(&record::make(level, target, message, fields));
    }
}

/// As [`keep`], of the error that a command ends with, or of a panic.
pub(crate) fn keep_fatal(target: &str, message: &str) {
    keep(LogLevel::Error, target, message, [("fatal", true.into())]);
}

/// Runs what logs a message of a child process, which is about this.
pub(crate) fn relayed(category: LogCategory, log: impl FnOnce()) {
    RELAYED.set(Some(category));
    log();
    RELAYED.set(None);
}

/// Whether messages on standard error name the module that logged them.
pub(crate) fn shows_targets() -> bool {
    SHOWS_TARGETS.load(Ordering::Relaxed)
}

/// Makes records of what is logged, for this.
pub(crate) struct Records<F>(pub(crate) F);

impl<S: Subscriber, F: Fn(&dyn Fn() -> LogRecord) + 'static> Layer<S> for Records<F> {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        (self.0)(&|| record::of(event, RELAYED.get()));
    }
}

/// Has the log files get a record, in a process that writes some.
fn keep_record(record: &dyn Fn() -> LogRecord) {
    if let Some(files) = FILES.get() {
        files.push(&record());
    }
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
            let message = format!("thread '{}' {panic}", thread.name().unwrap_or("without a name"));
            say(format_args!("{message}\n{trace}"));
            keep_fatal(module_path!(), &message);
            // The process may be about to end.
            flush();
        }));
    }
}

/// Writes what waits to be written, for a bounded time. Nothing that is said later is sure to be seen.
pub(crate) fn flush() {
    CAUSES.log_silent(None);
    if let Some(files) = FILES.get() {
        files.flush(LOG_FILE_FLUSH, FLUSH);
    }
    if let Some(queue) = QUEUE.get() {
        queue.flush(TIMEOUT, FLUSH);
    }
}

/// Where this process logs once standard error is another's.
static STAYS: OnceLock<File> = OnceLock::new();

/// Has this process log where its standard error is now, whatever becomes of that.
///
/// # Errors
/// When the process has no more descriptors.
pub(crate) fn stay() -> io::Result<()> {
    let file = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    // The first is as good.
    let _ = STAYS.set(file);
    Ok(())
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
        let Some(queue) = QUEUE.get() else {
            return match STAYS.get() {
                Some(file) => (&*file).write(message),
                None => io::stderr().write(message),
            };
        };
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
