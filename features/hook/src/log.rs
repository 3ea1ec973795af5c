//! The log: a JSON object in each line, each of them written at once, so that threads and forks leave whole lines.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::manager::Event;
use crate::options::{Mode, Options};
use crate::sys;

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What fails.
    Error,
    /// Allocations and what is moved, too.
    Info,
    /// And copies.
    Debug,
}

/// A value of a line.
#[derive(Clone, Debug)]
pub enum Value {
    /// A number.
    Number(u64),
    /// An address.
    Address(u64),
    /// A text.
    Text(String),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(text.to_owned())
    }
}

/// Writes a line: what happened, and its values. The first is preceded by one that tells whose log it is.
pub fn line(level: Level, what: &str, values: &[(&str, Value)]) {
    static START: Once = Once::new();
    let options = Options::get();
    if level > options.level {
        return;
    }
    START.call_once(|| {
        let mode = match options.mode {
            Mode::Vmm => "VMM",
            Mode::Monitor => "MONITOR",
        };
        let program = std::env::current_exe().unwrap_or_default();
        let program = Value::Text(program.to_string_lossy().into_owned());
        write(
            "start",
            &[("version", env!("CARGO_PKG_VERSION").into()), ("mode", mode.into()), ("program", program)],
        );
    });
    write(what, values);
}

fn write(what: &str, values: &[(&str, Value)]) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut text = String::with_capacity(160);
    let _ = write!(
        text,
        "{{\"time\":{}.{:06},\"pid\":{},\"event\":\"{what}\"",
        since.as_secs(),
        since.subsec_micros(),
        std::process::id()
    );
    for (name, value) in values {
        let _ = match value {
            Value::Number(number) => write!(text, ",\"{name}\":{number}"),
            Value::Address(address) => write!(text, ",\"{name}\":\"{address:#x}\""),
            Value::Text(value) => write!(text, ",\"{name}\":{}", quoted(value)),
        };
    }
    text.push_str("}\n");
    // Who can't write has nobody to tell.
    let _ = sys::unnoticed(|| match file() {
        Some(mut file) => file.write_all(text.as_bytes()),
        None => std::io::stderr().write_all(text.as_bytes()),
    });
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Opens a log to append. A FIFO that nobody reads is refused, not waited for.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path)?;
    // Who reads slowly loses nothing.
    let flags = fcntl_getfl(&file)?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// The file, opened once.
fn file() -> Option<&'static File> {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = Options::get().file.as_ref()?;
        match open(path) {
            Ok(file) => Some(file),
            Err(error) => {
                let _ = writeln!(
                    std::io::stderr(),
                    "vmhook: can't open {}: {error}; the log goes here",
                    path.display()
                );
                None
            }
        }
    })
    .as_ref()
}

/// Logs what a manager did.
pub fn event(event: &Event) {
    use Value::{Address, Number};
    match *event {
        Event::Allocated { address, bytes, missing, device } => line(
            Level::Info,
            "allocated",
            &[
                ("address", Address(address)),
                ("bytes", Number(bytes)),
                ("missing", Number(missing)),
                ("device", Number(device.unsigned_abs().into())),
            ],
        ),
        Event::Failed { bytes, code } => {
            line(Level::Error, "failed", &[("bytes", Number(bytes)), ("code", Number(code.into()))]);
        }
        Event::Freed { address, bytes } => {
            line(Level::Info, "freed", &[("address", Address(address)), ("bytes", Number(bytes))]);
        }
        Event::PutOff { from, to } => {
            line(Level::Debug, "put-off", &[("from", Address(from)), ("to", Address(to))])
        }
        Event::Moved { from, to, bytes } => {
            line(
                Level::Info,
                "moved",
                &[("from", Address(from)), ("to", Address(to)), ("bytes", Number(bytes))],
            );
        }
        Event::Copied { from, to } => {
            line(Level::Debug, "copied", &[("from", Address(from)), ("to", Address(to))])
        }
        Event::Filled { address, bytes, of_host } => {
            let of = if of_host { "host" } else { "device" };
            let level = if of_host { Level::Error } else { Level::Info };
            line(
                level,
                "filled",
                &[("address", Address(address)), ("bytes", Number(bytes)), ("of", of.into())],
            );
        }
        Event::Paused { bytes, dropped } => {
            line(Level::Info, "paused", &[("bytes", Number(bytes)), ("dropped", Number(dropped))]);
        }
        Event::Resumed { bytes } => line(Level::Info, "resumed", &[("bytes", Number(bytes))]),
    }
}
