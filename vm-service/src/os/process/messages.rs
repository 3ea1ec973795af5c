//! What a worker writes to its standard error, in this process's log: there it is reported as this process's own messages are,
//! with their limits. A worker that a guest has taken over writes what and as much as it likes.

use std::io::{self, BufRead as _, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::log::{self, category_of};

/// Of a longer line the rest is left out.
const LINE: u64 = 1024;
/// How long the last words of a worker that is gone are waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The thread that reads them.
#[derive(Debug)]
pub(crate) struct Messages {
    thread: JoinHandle<()>,
    last: Arc<Mutex<String>>,
}

impl Messages {
    /// Hears `source` to its end. A VMM is no `worker`.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(crate) fn start(worker: Option<u32>, source: impl Read + Send + 'static) -> io::Result<Self> {
        let last = Arc::<Mutex<String>>::default();
        let keep = last.clone();
        let relay = move || relay(worker, source, &keep);
        Ok(Self { thread: std::thread::Builder::new().name("messages".into()).spawn(relay)?, last })
    }

    /// Waits a little until all was read from a worker that is gone.
    pub(crate) fn wait(&self) {
        let until = Instant::now() + LAST_WORDS;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The last line so far, whether it was logged or not.
    pub(crate) fn last(&self) -> String {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn relay(worker: Option<u32>, source: impl Read, last: &Mutex<String>) {
    let mut source = BufReader::new(source);
    let mut line = Vec::new();
    loop {
        line.clear();
        match source.by_ref().take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let line = printable(&String::from_utf8_lossy(&line));
                report(worker, &line);
                *last.lock().unwrap_or_else(PoisonError::into_inner) = line;
            }
        }
        // What of the line was too long.
        while line.last() != Some(&b'\n') {
            line.clear();
            match source.by_ref().take(LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }
}

/// Tells a line at the level that it begins with, and about what the module behind that logs.
fn report(worker: Option<u32>, line: &str) {
    let (level, said) = line.split_once(' ').unwrap_or(("", line));
    let (target, text) = of_module(said);
    let text = if log::shows_targets() { said } else { text };
    log::relayed(category_of(target), || match level {
        "TRACE" => tracing::trace!(worker, "{text}"),
        "DEBUG" => tracing::debug!(worker, "{text}"),
        "INFO" => tracing::info!(worker, "{text}"),
        "WARN" => tracing::warn!(worker, "{text}"),
        "ERROR" => tracing::error!(worker, "{text}"),
        _ => tracing::warn!(worker, "{line}"),
    });
}

/// A message without the module that logged it, and that.
fn of_module(said: &str) -> (&str, &str) {
    let is_name =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_:".contains(c));
    said.split_once(": ").filter(|(target, _)| is_name(target)).unwrap_or(("", said))
}

/// Text of a worker as it may go to a terminal: on one line, and not without end.
pub(crate) fn printable(text: &str) -> String {
    let clean = |letter: char| if letter.is_control() { ' ' } else { letter };
    text.trim_matches(|letter: char| letter.is_whitespace() || letter.is_control())
        .chars()
        .take(LINE as usize)
        .map(clean)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{LogCategory, LogLevel, LogRecord};

    #[test]
    fn what_a_worker_says_stays_on_one_short_line() {
        let check = |text: &str, expect: &str| assert_eq!(printable(text), expect);
        check(" WARN a \u{1b}[2Jb\n", "WARN a  [2Jb");
        check("a\r\nb\u{9b}c\0\n", "a  b c");
        assert_eq!(printable(&"ä".repeat(1 << 20)).chars().count(), LINE as usize);
    }

    #[test]
    fn a_message_is_about_what_its_module_is() {
        let check = |said: &str, expect: (&str, &str)| assert_eq!(of_module(said), expect, "{said}");
        check("vm_cuda::queue: it broke: at once", ("vm_cuda::queue", "it broke: at once"));
        check("it broke: at once", ("", "it broke: at once"));
        check("vm_cuda: ", ("vm_cuda", ""));
        check(": x", ("", ": x"));
        check("", ("", ""));
    }

    #[test]
    fn records_of_a_worker_have_the_category_of_its_module() {
        use tracing_subscriber::layer::SubscriberExt as _;
        let check = |line: &str, expect: (LogLevel, LogCategory, &str)| {
            let (send, receive) = std::sync::mpsc::channel();
            let subscriber =
                tracing_subscriber::registry().with(log::Records(move |record: &dyn Fn() -> LogRecord| {
                    send.send(record()).unwrap();
                }));
            tracing::subscriber::with_default(subscriber, || {
                report(Some(7), &printable(line));
                tracing::info!(target: "EGPU", "its own");
            });
            let records: Vec<_> = receive.iter().collect();
            assert_eq!(
                (records[0].level, records[0].category, records[0].message.as_str()),
                expect,
                "{line}"
            );
            assert_eq!((&records[0].fields["worker"], records[1].category), (&7.into(), LogCategory::Egpu));
        };
        let cuda = LogCategory::Cuda;
        check(" INFO vm_cuda::queue: it runs: well\n", (LogLevel::Info, cuda, "it runs: well"));
        check("ERROR vm_runtime::cuda: it broke", (LogLevel::Error, cuda, "it broke"));
        check("DEBUG vm_passthrough::vfio::space: mapped", (LogLevel::Debug, LogCategory::Memory, "mapped"));
        check("thread 'main' panicked", (LogLevel::Warn, LogCategory::General, "thread 'main' panicked"));
        check(" WARN \u{1b}[2J: x", (LogLevel::Warn, LogCategory::General, " [2J: x"));
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory_and_those_behind_it_are_heard() {
        let long = io::repeat(b'x').take(64 << 20).chain(&b"\nlast\n"[..]);
        let messages = Messages::start(Some(1), long).unwrap();
        let last = messages.last.clone();
        messages.thread.join().unwrap();
        assert_eq!(*last.lock().unwrap(), "last");
    }
}
