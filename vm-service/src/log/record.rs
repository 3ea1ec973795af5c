//! Makes records of what is logged: a line of JSON each, which no text can break, and none of which is longer than [`LONGEST`].
//!
//! A guest's name, a device's, a worker's words are in messages. JSON escapes what would end a line; what of a terminal's
//! controls JSON lets stand is escaped here.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use super::{LONGEST, category_of, now};
use crate::api::{LogCategory, LogLevel, LogRecord};

/// Bytes of a record's message as it is written; what is longer is cut.
const MESSAGE: usize = LONGEST / 2;
/// Bytes of its other fields together, their names not counted.
const FIELDS: usize = LONGEST / 4;
/// Bytes of a thread's name, and of a target.
const NAME: usize = 256;

/// The line of a record.
pub(super) fn line(record: &LogRecord) -> Vec<u8> {
    // It has no keys but strings, and no numbers that JSON does not know.
    let json = serde_json::to_string(record).unwrap_or_default();
    let mut line = String::with_capacity(json.len() + 1);
    for letter in json.chars() {
        match letter.is_control() {
            // A String takes any write.
            true => drop(write!(line, "\\u{:04x}", u32::from(letter))),
            false => line.push(letter),
        }
    }
    line.push('\n');
    line.into_bytes()
}

/// A record that this program makes itself, of the present time.
pub(super) fn make(
    level: LogLevel,
    target: &str,
    message: &str,
    fields: impl IntoIterator<Item = (&'static str, Value)>,
) -> LogRecord {
    let thread = std::thread::current();
    let thread =
        thread.name().map_or_else(|| format!("{:?}", thread.id()), |name| Cut::of(NAME, &name).into());
    LogRecord {
        time: now(),
        level,
        category: category_of(target),
        target: Cut::of(NAME, &target).into(),
        pid: std::process::id(),
        thread,
        message: Cut::of(MESSAGE, &message).into(),
        fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    }
}

/// The record of an event, about `category` where that is known better than by its target.
pub(super) fn of(event: &Event<'_>, category: Option<LogCategory>) -> LogRecord {
    let mut parts = Parts { message: String::new(), fields: BTreeMap::new(), room: FIELDS };
    event.record(&mut parts);
    let level = match *event.metadata().level() {
        Level::TRACE => LogLevel::Trace,
        Level::DEBUG => LogLevel::Debug,
        Level::INFO => LogLevel::Info,
        Level::WARN => LogLevel::Warn,
        Level::ERROR => LogLevel::Error,
    };
    let made = make(level, event.metadata().target(), "", []);
    LogRecord {
        category: category.unwrap_or(made.category),
        message: parts.message,
        fields: parts.fields,
        ..made
    }
}

/// What an event says.
struct Parts {
    message: String,
    fields: BTreeMap<String, Value>,
    /// Bytes that are left for fields.
    room: usize,
}

impl Parts {
    fn text(&mut self, field: &Field, text: &dyn fmt::Display) {
        if field.name() == "message" {
            self.message = Cut::of(MESSAGE, text).into();
            return;
        }
        let cut = Cut::of(self.room, text);
        self.room = cut.room;
        self.fields.insert(field.name().to_owned(), String::from(cut).into());
    }

    fn value(&mut self, field: &Field, value: Value) {
        self.fields.insert(field.name().to_owned(), value);
    }
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field, &format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, &value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.text(field, &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.value(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.value(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.value(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.value(field, value.into()),
            false => self.text(field, &value),
        }
    }
}

/// Text that is cut where it would take more room than it may, as JSON writes it.
struct Cut {
    text: String,
    room: usize,
    left_out: usize,
}

impl Cut {
    fn of(room: usize, text: &dyn fmt::Display) -> Self {
        let mut cut = Self { text: String::new(), room, left_out: 0 };
        // What a type fails to say is not there.
        let _ = write!(cut, "{text}");
        cut
    }
}

impl From<Cut> for String {
    fn from(cut: Cut) -> Self {
        match cut.left_out {
            0 => cut.text,
            left_out => format!("{}… ({left_out} bytes are left out)", cut.text),
        }
    }
}

impl fmt::Write for Cut {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            let bytes = match letter {
                '"' | '\\' | '\n' | '\r' | '\t' => 2,
                letter if letter.is_control() => 6,
                letter => letter.len_utf8(),
            };
            // Behind the first that does not fit, nothing does.
            match self.room.checked_sub(bytes).filter(|_| self.left_out == 0) {
                Some(room) => {
                    self.room = room;
                    self.text.push(letter);
                }
                None => self.left_out += letter.len_utf8(),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of this message and field, as it is read again.
    fn read(message: &str, field: &str) -> (LogRecord, usize) {
        let fields = [("field", Value::from(String::from(Cut::of(FIELDS, &field))))];
        let line = line(&make(LogLevel::Info, "vm_passthrough::pci", message, fields));
        let text = String::from_utf8(line).expect("text");
        let (body, end) = text.split_at(text.len() - 1);
        assert!(end == "\n" && !body.chars().any(char::is_control), "{body:?}");
        (serde_json::from_str(body).expect("a record"), text.len())
    }

    #[test]
    fn no_text_breaks_a_line() {
        for text in [
            "plain",
            "a\nb\r\n",
            "\"}\n{\"time\":1}",
            "\u{1b}[2J\u{9b}2J\u{7f}\0",
            "\u{2028}\u{202e}äöü😀",
            "",
        ] {
            let (record, _) = read(text, text);
            assert_eq!((record.message.as_str(), &record.fields["field"]), (text, &Value::from(text)));
            assert_eq!(record.category, LogCategory::Pcie);
            record.time.parse::<jiff::Timestamp>().expect("a time");
            assert!(record.time.len() == "2026-01-01T00:00:00.000000Z".len(), "{}", record.time);
        }
    }

    #[test]
    fn no_text_makes_a_line_too_long() {
        for letter in ["x", "\"", "\u{1}", "\u{9f}", "ä", "😀", "\n"] {
            let (record, length) = read(&letter.repeat(1 << 20), &letter.repeat(1 << 20));
            assert!(length <= LONGEST, "{letter:?}: {length}");
            assert!(length > LONGEST / 2, "{letter:?}: {length}");
            let kept = record.message.matches(letter).count();
            let left_out = ((1 << 20) - kept) * letter.len();
            assert!(record.message.ends_with(&format!("… ({left_out} bytes are left out)")), "{letter:?}");
        }
    }

    #[test]
    fn fields_keep_their_kinds() {
        use tracing_subscriber::layer::SubscriberExt as _;
        struct Made(std::sync::mpsc::Sender<LogRecord>);
        impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Made {
            fn on_event(&self, event: &Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
                self.0.send(of(event, None)).expect("heard");
            }
        }
        let (send, receive) = std::sync::mpsc::channel();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(Made(send)), || {
            let error = std::io::Error::other("broke");
            tracing::error!(target: "EGPU", fatal = true, count = 3u32, by = -1, share = 0.5, odd = f64::NAN, %error, "it {}", "ends");
        });
        let record = receive.recv().expect("a record");
        assert!(record.is_fatal() && record.category == LogCategory::Egpu && record.message == "it ends");
        let fields = serde_json::to_string(&record.fields).expect("JSON");
        assert_eq!(fields, r#"{"by":-1,"count":3,"error":"broke","fatal":true,"odd":"NaN","share":0.5}"#);
        let text = record.to_string();
        assert!(text.contains(" FATAL EGPU    ["), "{text}");
        assert!(text.ends_with("] it ends by=-1 count=3 error=broke odd=NaN share=0.5"), "{text}");
    }
}
