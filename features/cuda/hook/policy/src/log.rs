//! The log: a JSON object in each line, each of them written at once, so that threads and forks leave whole lines.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::manager::{Event, Id, Kind};
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

/// An open log, and what file it is.
struct Log {
    file: File,
    id: (u64, u64),
}

impl Log {
    /// Opens one to append. A FIFO that nobody reads is refused, not waited for.
    fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK;
        // It tells of the program's memory: whatever the umask, no other user reads it.
        let file = vm_files::open(path, flags, 0o600)?;
        // Who reads slowly loses nothing.
        let flags = fcntl_getfl(&file)?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
        let id = id(&file).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { file, id })
    }
}

fn id(file: &File) -> Option<(u64, u64)> {
    fstat(file).ok().map(|of| (of.st_dev, of.st_ino))
}

/// The file, opened once, and again where the program has closed it: its descriptor may be another file's by now.
fn file() -> Option<&'static File> {
    static LOG: Mutex<Option<Option<&'static Log>>> = Mutex::new(None);
    let path = Options::get().file.as_ref()?;
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    match *log {
        Some(None) => return None,
        Some(Some(known)) if id(&known.file) == Some(known.id) => return Some(&known.file),
        _ => {}
    }
    let opened = match Log::open(path) {
        // Never closed: the descriptor may be somebody else's.
        Ok(opened) => Some(&*Box::leak(Box::new(opened))),
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "vmhook: can't open {}: {error}; the log goes here",
                path.display()
            );
            None
        }
    };
    *log = Some(opened);
    opened.map(|opened| &opened.file)
}

/// Logs what the driver allocated itself, or its end; what has no address has a handle.
fn native(what: &str, kind: Kind, id: Id, bytes: u64) {
    let id = match id {
        Id::Address(address) => ("address", Value::Address(address)),
        Id::Physical(handle) | Id::Array(handle) => ("handle", Value::Address(handle)),
    };
    line(Level::Info, what, &[id, ("bytes", Value::Number(bytes)), ("kind", kind.name().into())]);
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
        Event::NativeAllocated { kind, id, bytes } => native("native-allocated", kind, id, bytes),
        Event::NativeFreed { kind, id, bytes } => native("native-freed", kind, id, bytes),
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
