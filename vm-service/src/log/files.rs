//! The way of records into the log file: a queue, which holds nobody up, and the thread that writes.
//!
//! What does not fit in the queue, and what can't be written, is lost and counted. The first time is reported on standard error; the
//! number is a record of its own once the file can be written again.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::file::{LogFile, Lost};
use super::settings::Settings;
use super::{record, say};
use crate::api::{LogLevel, LogRecord};
use crate::deadlines::LOG_FILE_LOCK;
use crate::os::output::OutputQueue;

/// Records that wait to be written, in bytes.
const LIMIT: usize = 1 << 20;

/// The log files of this process.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) settings: Settings,
    queue: Arc<OutputQueue>,
    lost: Arc<AtomicU64>,
}

impl Files {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there is none to spare.
    pub(super) fn start(settings: Settings) -> io::Result<Self> {
        let (queue, lost) = (OutputQueue::new(LIMIT), Arc::new(AtomicU64::new(0)));
        let Settings { folder, size, kept, .. } = settings.clone();
        let file = LogFile::new(folder, size, kept, LOG_FILE_LOCK);
        let sink = Sink { file, pending: Vec::new(), lost: lost.clone(), is_reported: false };
        queue.start("log file", sink, drop)?;
        Ok(Self { settings, queue, lost })
    }

    /// Has a record written, or counts it.
    pub(super) fn push(&self, record: &LogRecord) {
        let line = match self.settings.simulated {
            true => {
                let mut record = record.clone();
                record.fields.insert("simulated".into(), true.into());
                record::line(&record)
            }
            false => record::line(record),
        };
        if !self.queue.push(&line) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes what waits, for a bounded time, and reports what was lost.
    pub(super) fn flush(&self, timeout: Duration, most: Duration) {
        let left = self.queue.flush(timeout, most);
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if left > 0 || lost > 0 {
            let folder = self.settings.folder.display();
            let last = if left > 0 { ", and the last ones" } else { "" };
            say(format_args!("({lost} records{last} are missing from the log in {folder})\n"));
        }
    }
}

/// Takes records in any pieces, and writes them whole.
struct Sink {
    file: LogFile,
    /// What came of a record whose end has not.
    pending: Vec<u8>,
    lost: Arc<AtomicU64>,
    /// Whether standard error has heard that something was lost.
    is_reported: bool,
}

impl Sink {
    fn append(&mut self, lines: &[u8]) -> Result<(), Lost> {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let message = format!("{lost} records before this one are lost");
            let note = record::make(LogLevel::Warn, module_path!(), &message, [("lost", lost.into())]);
            if let Err(Lost { error, .. }) = self.file.append(&record::line(&note)) {
                let count = lines.iter().filter(|byte| **byte == b'\n').count() as u64;
                return Err(Lost { count: lost + count, error });
            }
        }
        self.file.append(lines)
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend(bytes);
        let end = self.pending.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines: Vec<u8> = self.pending.drain(..end).collect();
        if let Err(Lost { count, error }) = self.append(&lines) {
            self.lost.fetch_add(count, Ordering::Relaxed);
            if !std::mem::replace(&mut self.is_reported, true) {
                let folder = self.file.folder.display();
                say(format_args!(
                    "warning: the log in {folder} is not written: {error}; mend that, or name another directory with `--log-dir`. \
                     The command goes on without its log\n"
                ));
            }
        }
        // An error would be reported each time.
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
