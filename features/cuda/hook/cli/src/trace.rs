//! Reads the hook's log: its lines, as they come, into events. Reading never fails: what is no line of the hook's is counted, and the first told of.
//!
//! A log may have been cut, be written to while it is read, hold lines of several processes and what a program wrote to standard error, or be
//! somebody's who means ill. A line has [`LONGEST`] bytes at most; the rest of a longer one is skipped without being kept.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};

use vm_hook::manager::{Id, Kind};

use crate::units::printable;

/// How long a line may be.
const LONGEST: usize = 64 << 10;
/// How many events are read into memory.
const MOST_EVENTS: usize = 4 << 20;
/// How many processes are told apart.
const MOST_PROCESSES: usize = 256;
/// How many lines that are not understood are told of.
const MOST_WRONG: usize = 3;
/// No address space is larger.
const ADDRESSES: u64 = 1 << 57;

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The log of a process begins.
    Start { mode: String, program: String },
    /// An allocation, of virtual memory or the driver's own.
    Allocated {
        /// What names it.
        id: Id,
        bytes: u64,
        missing: u64,
        /// What it is of the driver's own, if it is.
        native: Option<Kind>,
    },
    /// One that failed.
    Failed { bytes: u64, code: u32 },
    /// It was freed.
    Freed { id: Id },
    /// One allocation's memory became another's.
    Moved { from: u64, to: u64, bytes: u64 },
    /// What was missing got memory.
    Filled { address: u64, bytes: u64, of_host: bool },
    /// A copy that was put off ran.
    Copied,
    /// The process waits, and so much device memory is given back.
    Paused { bytes: u64 },
    /// It goes on, with its memory.
    Resumed,
    /// Anything else.
    Other,
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Microseconds since 1970.
    pub(crate) time: u64,
    /// Whose it is.
    pub(crate) pid: u32,
    /// What happened.
    pub(crate) what: What,
}

/// A line as it is written.
#[derive(Deserialize)]
struct Raw<'a> {
    time: f64,
    pid: u32,
    #[serde(borrow)]
    event: Cow<'a, str>,
    #[serde(default, deserialize_with = "address")]
    address: Option<u64>,
    #[serde(default, deserialize_with = "address")]
    from: Option<u64>,
    #[serde(default, deserialize_with = "address")]
    to: Option<u64>,
    #[serde(default, deserialize_with = "address")]
    handle: Option<u64>,
    kind: Option<String>,
    bytes: Option<u64>,
    missing: Option<u64>,
    code: Option<u32>,
    of: Option<String>,
    mode: Option<String>,
    program: Option<String>,
}

/// An address, which is a text: numbers of JSON are not exact everywhere.
fn address<'a, D: Deserializer<'a>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = Cow::<str>::deserialize(from)?;
    let number = text.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.map(Some).ok_or_else(|| serde::de::Error::custom("an address is not like \"0x7f00\""))
}

/// A line's event, or what is wrong with it.
fn event(line: &[u8]) -> Result<Event, String> {
    let raw: Raw<'_> = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if !(0.0..1e12).contains(&raw.time) {
        return Err(format!("the time is {}", raw.time));
    }
    let need = |value: Option<u64>, name: &str| {
        value.ok_or_else(|| format!("{:?} lacks {name:?}", printable(&raw.event, 40)))
    };
    // A part of an address space.
    let range = |address: Option<u64>, name: &str| {
        let (address, bytes) = (need(address, name)?, need(raw.bytes, "bytes")?);
        match address.checked_add(bytes) {
            Some(end) if end <= ADDRESSES => Ok((address, bytes)),
            _ => Err(format!("{bytes} bytes at {address:#x} are no memory")),
        }
    };
    // What the driver's own is, and what names it.
    let named = || {
        let kind = raw.kind.as_deref().unwrap_or(Kind::Device.name());
        let kind = Kind::of(kind).ok_or_else(|| format!("{:?} is no kind of memory", printable(kind, 40)))?;
        let has_address = kind.id(0).address().is_some();
        let number = if has_address { need(raw.address, "address")? } else { need(raw.handle, "handle")? };
        Ok::<_, String>((kind, kind.id(number)))
    };
    let what = match &*raw.event {
        "start" => What::Start {
            mode: printable(raw.mode.as_deref().unwrap_or_default(), 20),
            program: printable(raw.program.as_deref().unwrap_or_default(), 200),
        },
        "allocated" => {
            let ((address, bytes), missing) = (range(raw.address, "address")?, raw.missing.unwrap_or(0));
            if missing > bytes.next_multiple_of(vm_hook::driver::GRANULE) {
                return Err(format!("{missing} bytes of {bytes} are missing"));
            }
            What::Allocated { id: Id::Address(address), bytes, missing, native: None }
        }
        "native-allocated" => {
            let (kind, id) = named()?;
            let first = if id.address().is_some() { id.number() } else { 0 };
            let (_, bytes) = range(Some(first), "address")?;
            What::Allocated { id, bytes, missing: 0, native: Some(kind) }
        }
        "failed" => What::Failed { bytes: need(raw.bytes, "bytes")?, code: raw.code.unwrap_or(0) },
        "freed" => What::Freed { id: Id::Address(need(raw.address, "address")?) },
        "native-freed" => What::Freed { id: named()?.1 },
        "moved" => {
            let ((from, bytes), (to, _)) = (range(raw.from, "from")?, range(raw.to, "to")?);
            What::Moved { from, to, bytes }
        }
        "filled" => {
            let (address, bytes) = range(raw.address, "address")?;
            What::Filled { address, bytes, of_host: raw.of.as_deref() == Some("host") }
        }
        "copied" => What::Copied,
        "paused" => What::Paused { bytes: need(raw.bytes, "bytes")? },
        "resumed" => What::Resumed,
        _ => What::Other,
    };
    Ok(Event { time: (raw.time * 1e6).round() as u64, pid: raw.pid, what })
}

/// Makes lines of bytes, and events of lines.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    /// The beginning of a line whose end is not here yet.
    line: Vec<u8>,
    /// Is the line too long, so that its rest is skipped?
    skips: bool,
    /// Lines so far.
    lines: u64,
    /// Lines that are not understood, and what is wrong with the first of them, with their numbers.
    pub(crate) wrong: u64,
    pub(crate) first_wrong: Vec<(u64, String)>,
}

impl Parser {
    /// Takes the next bytes of the log, and answers the events that they complete.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], each: &mut impl FnMut(Event)) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.keep(&bytes[..end]);
            self.end(each);
            bytes = &bytes[end + 1..];
        }
        self.keep(bytes);
    }

    /// There are no more bytes: a last line without an end is taken if it is whole, and may be torn.
    pub(crate) fn finish(&mut self, each: &mut impl FnMut(Event)) {
        if let (false, Ok(event)) = (self.skips, event(&self.line)) {
            each(event);
        }
        self.restart();
    }

    /// What follows is another file's beginning.
    pub(crate) fn restart(&mut self) {
        self.line.clear();
        self.skips = false;
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.skips |= self.line.len() + bytes.len() > LONGEST;
        match self.skips {
            true => self.line.clear(),
            false => self.line.extend_from_slice(bytes),
        }
    }

    fn end(&mut self, each: &mut impl FnMut(Event)) {
        self.lines += 1;
        let event = match (self.skips, self.line.trim_ascii()) {
            (true, _) => Err(format!("it is longer than {LONGEST} bytes")),
            (false, []) => return self.restart(),
            (false, line) => event(line),
        };
        match event {
            Ok(event) => each(event),
            Err(wrong) => {
                self.wrong += 1;
                if self.first_wrong.len() < MOST_WRONG {
                    self.first_wrong.push((self.lines, wrong));
                }
            }
        }
        self.restart();
    }
}

/// A process that a log has lines of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// `VMM` or `MONITOR`; empty where the log does not say.
    pub(crate) mode: String,
    /// Its program; empty where the log does not say.
    pub(crate) program: String,
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.program {
            "" => write!(f, "{}", self.pid),
            program => write!(f, "{} ({program})", self.pid),
        }
    }
}

/// Why there is nothing to be shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The file can't be read.
    #[error("can't read {}: {source}", .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It holds no event.
    #[error("{} is no log of the hook, or one without events: write one by `vmhook run --log FILE PROGRAM`", .0.display())]
    Empty(PathBuf),
    /// Nor a line that is understood.
    #[error("{}:{line}: {wrong}: no line of it is of the hook's; write a log by `vmhook run --log FILE PROGRAM`", .file.display())]
    Wrong {
        /// The file.
        file: PathBuf,
        /// The first line that is not understood.
        line: u64,
        /// Why.
        wrong: String,
    },
    /// It has no lines of a process.
    #[error("{} has nothing of process {pid}: it has {}", .file.display(), .others.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    NoProcess {
        /// The file.
        file: PathBuf,
        /// The process that was asked for.
        pid: u32,
        /// The processes that are there.
        others: Vec<Process>,
    },
}

/// The events of a process.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) process: Process,
    pub(crate) events: Vec<Event>,
    /// What the reader should know of what was left out.
    pub(crate) notes: Vec<String>,
}

impl Trace {
    /// Reads a log: the events of a process, or of the first that is there.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn read(file: &Path, pid: Option<u32>) -> Result<Self, Error> {
        let failed = |source| Error::Read { file: file.into(), source };
        // Who opens a pipe may wait for ever, and a device may have no end.
        if !fs::metadata(file).map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        let mut from = File::open(file).map_err(failed)?;
        let mut chunk = vec![0; 256 << 10];
        Self::of(file, pid, |each| {
            loop {
                match from.read(&mut chunk) {
                    Ok(0) => return Ok(()),
                    Ok(read) => each(&chunk[..read]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(failed(error)),
                }
            }
        })
    }

    fn of(
        file: &Path,
        pid: Option<u32>,
        mut read: impl FnMut(&mut dyn FnMut(&[u8])) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let (mut parser, mut processes, mut events) = (Parser::default(), Vec::<Process>::new(), Vec::new());
        let (mut chosen, mut left_out) = (pid, 0u64);
        let mut take = |event: Event| {
            let at = processes.iter().position(|of| of.pid == event.pid);
            if at.is_none() && processes.len() < MOST_PROCESSES {
                processes.push(Process { pid: event.pid, ..Process::default() });
            }
            if let (What::Start { mode, program }, Some(of)) =
                (&event.what, processes.iter_mut().find(|of| of.pid == event.pid))
            {
                (of.mode, of.program) = (mode.clone(), program.clone());
            }
            if *chosen.get_or_insert(event.pid) == event.pid && event.what != What::Other {
                if events.len() < MOST_EVENTS { events.push(event) } else { left_out += 1 }
            }
        };
        read(&mut |bytes| parser.feed(bytes, &mut take))?;
        parser.finish(&mut take);
        let Some(pid) = chosen.filter(|_| !processes.is_empty()) else {
            return Err(match parser.first_wrong.into_iter().next() {
                Some((line, wrong)) => Error::Wrong { file: file.into(), line, wrong },
                None => Error::Empty(file.into()),
            });
        };
        let Some(process) = processes.iter().find(|of| of.pid == pid).cloned() else {
            return Err(Error::NoProcess { file: file.into(), pid, others: processes });
        };
        let at = file.display();
        let mut notes: Vec<String> = parser
            .first_wrong
            .iter()
            .map(|(line, wrong)| format!("{at}:{line}: {wrong}; the line is left out"))
            .collect();
        let more = parser.wrong - parser.first_wrong.len() as u64;
        if more != 0 {
            notes.push(format!("{at}: {more} more lines are not understood, and left out"));
        }
        if left_out != 0 {
            notes.push(format!("{at}: {left_out} events behind the first {MOST_EVENTS} are left out"));
        }
        let others: Vec<String> =
            processes.iter().filter(|of| of.pid != pid).map(ToString::to_string).collect();
        if !others.is_empty() {
            notes.push(format!(
                "{at}: this is process {process}; it also has {}: choose by --pid",
                others.join(", ")
            ));
        }
        Ok(Self { process, events, notes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &[u8], pid: Option<u32>) -> Result<Trace, Error> {
        // By chunks of any size it is the same.
        let by = |size: usize| {
            Trace::of(Path::new("a.log"), pid, |each| {
                text.chunks(size).for_each(&mut *each);
                Ok(())
            })
        };
        let (one, other) = (by(1), by(1 << 20));
        assert_eq!(format!("{one:?}"), format!("{other:?}"));
        one
    }

    const ALLOCATED: &str =
        r#"{"time":10.000002,"pid":7,"event":"allocated","address":"0x1000","bytes":5,"missing":2}"#;

    #[test]
    fn each_line_is_an_event() {
        let check = |line: &str, what: What| {
            let read = event(line.as_bytes()).expect(line);
            assert_eq!((read.what, read.pid, read.time), (what, 7, 10_000_002), "{line}");
        };
        let line = |rest: &str| format!(r#"{{"time":10.000002,"pid":7,"event":{rest}}}"#);
        check(ALLOCATED, What::Allocated { id: Id::Address(0x1000), bytes: 5, missing: 2, native: None });
        check(
            &line(r#""native-allocated","address":"0x1000","bytes":5"#),
            What::Allocated { id: Id::Address(0x1000), bytes: 5, missing: 0, native: Some(Kind::Device) },
        );
        check(
            &line(r#""native-allocated","handle":"0x7","bytes":5,"kind":"array""#),
            What::Allocated { id: Id::Array(7), bytes: 5, missing: 0, native: Some(Kind::Array) },
        );
        check(
            &line(r#""native-freed","handle":"0x7","bytes":5,"kind":"physical""#),
            What::Freed { id: Id::Physical(7) },
        );
        check(
            &line(r#""failed","bytes":18446744073709551615,"code":2"#),
            What::Failed { bytes: u64::MAX, code: 2 },
        );
        check(&line(r#""freed","address":"0x10","bytes":0"#), What::Freed { id: Id::Address(16) });
        check(
            &line(r#""moved","from":"0x1","to":"0x2","bytes":3"#),
            What::Moved { from: 1, to: 2, bytes: 3 },
        );
        check(
            &line(r#""filled","address":"0x1","bytes":3,"of":"host""#),
            What::Filled { address: 1, bytes: 3, of_host: true },
        );
        check(
            &line(r#""start","mode":"VMM","program":"/a\nb""#),
            What::Start { mode: "VMM".into(), program: "/a?b".into() },
        );
        check(&line(r#""paused","bytes":9,"dropped":3"#), What::Paused { bytes: 9 });
        check(&line(r#""resumed","bytes":9"#), What::Resumed);
        check(&line(r#""unheard-of","address":"0x1""#), What::Other);
    }

    #[test]
    fn nothing_that_is_read_is_trusted() {
        let check = |line: &str, says: &str| {
            let wrong = event(line.as_bytes()).expect_err(says);
            assert!(wrong.contains(says), "{}: {wrong}", printable(line, 80));
        };
        let line = |time: &str, rest: &str| format!(r#"{{"time":{time},"pid":7,"event":{rest}}}"#);
        check("", "EOF");
        check("[1]", "expected");
        check(&"[".repeat(60_000), "invalid type");
        check(&format!("{{\"x\":{}", "[".repeat(60_000)), "EOF");
        check(&line("-1", r#""freed","address":"0x1""#), "the time is -1");
        check(&line("1e300", r#""freed","address":"0x1""#), "the time");
        check(&line("1", r#""freed","address":17"#), "expected");
        check(&line("1", r#""freed","address":"17""#), "like \"0x7f00\"");
        check(&line("1", r#""freed""#), "lacks \"address\"");
        check(&line("1", r#""allocated","address":"0x1","bytes":-5"#), "-5");
        check(&line("1", r#""allocated","address":"0xffffffffffffffff","bytes":5"#), "are no memory");
        check(&line("1", r#""allocated","address":"0x1","bytes":5,"missing":99999999"#), "are missing");
        check(&line("1", r#""moved","from":"0x1","to":"0xfffffffffffffff0","bytes":99"#), "are no memory");
        check(&line("1", r#""failed","bytes":1e30"#), "invalid type");
        check("{\"time\":1,\"pid\":7,\"event\":\"\u{0}\"}", "control character");
    }

    #[test]
    fn what_is_left_out_is_told() {
        let check = |text: &str, pid: Option<u32>, events: usize, notes: &[&str]| {
            let trace = trace(text.as_bytes(), pid).expect("events");
            assert_eq!(trace.events.len(), events, "{:?}", trace.notes);
            assert_eq!(trace.notes.len(), notes.len(), "{:?}", trace.notes);
            assert!(
                trace.notes.iter().zip(notes).all(|(note, says)| note.contains(says)),
                "{:?}",
                trace.notes
            );
        };
        let other = ALLOCATED.replace(":7", ":8");
        check(&format!("{ALLOCATED}\n{ALLOCATED}\n"), None, 2, &[]);
        // The last line is not whole yet, or whole but for its end.
        check(&format!("{ALLOCATED}\n{}", &ALLOCATED[..40]), None, 1, &[]);
        check(&format!("{ALLOCATED}\n{ALLOCATED}"), None, 2, &[]);
        check(&format!("hello\n\n{ALLOCATED}\n"), None, 1, &["a.log:1: "]);
        check(
            &format!("{ALLOCATED}\n{}\n{ALLOCATED}\n", "x".repeat(LONGEST + 1)),
            None,
            2,
            &["a.log:2: it is longer than"],
        );
        check(
            &format!("{}{ALLOCATED}\n", "?\n".repeat(9)),
            None,
            1,
            &["a.log:1:", "a.log:2:", "a.log:3:", "6 more lines"],
        );
        check(&format!("{ALLOCATED}\n{other}\n"), None, 1, &["process 7; it also has 8: choose by --pid"]);
        check(&format!("{ALLOCATED}\n{other}\n{other}\n"), Some(8), 2, &["process 8; it also has 7"]);
    }

    #[test]
    fn a_log_of_nothing_is_an_error() {
        let check = |text: &[u8], pid: Option<u32>, says: &str| {
            let error = trace(text, pid).expect_err("nothing").to_string();
            assert!(error.contains(says), "{error}");
        };
        check(b"", None, "a.log is no log of the hook");
        check(b"\xff\xfe\n", None, "a.log:1: ");
        check(b"\n\n{\"a\":1}\n", Some(3), "a.log:3: missing field `time`");
        check(format!("{ALLOCATED}\n").as_bytes(), Some(8), "a.log has nothing of process 8: it has 7");
    }
}
