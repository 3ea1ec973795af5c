//! The error log: what went wrong, in words, for the guest to read.

use std::collections::VecDeque;

use vm_paravirt::{LogEntry, LogWriter, MAX_TEXT, Status};

/// The most entries; the oldest give way.
const ENTRIES: usize = 256;

/// The last things that went wrong.
#[derive(Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<(u64, u32, Status, Box<str>)>,
}

impl Log {
    /// Adds an entry. Of its text is kept what will be read: a compiler's can be a megabyte.
    pub(super) fn add(&mut self, batch: u64, operation: u32, status: Status, text: String) {
        tracing::debug!(batch, operation, %status, text, "an operation of the guest failed");
        if self.entries.len() == ENTRIES {
            self.entries.pop_front();
        }
        let end = (0..=text.len().min(MAX_TEXT)).rev().find(|end| text.is_char_boundary(*end));
        let kept = text.get(..end.unwrap_or(0)).unwrap_or_default();
        self.entries.push_back((batch, operation, status, kept.into()));
    }

    /// Takes the oldest entries, as many as fit `room` bytes.
    pub(super) fn take(&mut self, room: usize) -> Vec<u8> {
        let mut bytes = vec![0; room];
        let mut writer = LogWriter::new(&mut bytes);
        while let Some((batch, operation, status, text)) = self.entries.front() {
            let entry = LogEntry { batch: *batch, operation: *operation, status: *status, text };
            if writer.entry(&entry).is_err() {
                break;
            }
            self.entries.pop_front();
        }
        let len = writer.finish();
        bytes.truncate(len);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_kept_than_is_read() {
        let mut log = Log::default();
        for text in ["ä".repeat(1 << 20), "x".repeat(MAX_TEXT)] {
            log.add(0, 0, Status::Module, text);
        }
        let kept: Vec<usize> = log.entries.iter().map(|(.., text)| text.len()).collect();
        let read: Vec<usize> =
            vm_paravirt::LogReader::new(&log.take(1 << 20)).map(|entry| entry.unwrap().text.len()).collect();
        assert_eq!(kept, read);
        assert_eq!(kept, [MAX_TEXT & !1, MAX_TEXT]);
    }

    #[test]
    fn the_oldest_give_way_and_what_was_read_is_gone() {
        let mut log = Log::default();
        for batch in 0..ENTRIES as u64 + 2 {
            log.add(batch, 0, Status::Range, "x".into());
        }
        let read = |bytes: &[u8]| -> Vec<u64> {
            vm_paravirt::LogReader::new(bytes).map(|entry| entry.unwrap().batch).collect()
        };
        assert_eq!(read(&log.take(50)), [2, 3]);
        assert_eq!(read(&log.take(1 << 20)).len(), ENTRIES - 2);
        assert!(log.take(100).is_empty());
    }
}
