//! Reads the log files: the records of the whole set, oldest first, and then what is added, across rotations.
//!
//! A rotation only ever gives a file a higher number. So the files are opened from the newest on, and none is missed whatever
//! happens meanwhile; one that was renamed then is recognised by its inode, which is its own while it is open here.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;

use super::LONGEST;
use super::file::{MOST_KEPT, name_of};
use crate::api::LogRecord;

/// What is longer is no record. It is skipped, and not kept in memory.
const LONGEST_LINE: usize = 4 * LONGEST;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;
/// How often, and how long each time, the end of a record is waited for that somebody writes just now.
const REST: (u32, Duration) = (10, Duration::from_millis(2));

/// The records of a directory's log files.
#[derive(Debug)]
pub(crate) struct LogReader {
    folder: PathBuf,
    /// Files to be read, the oldest first.
    files: VecDeque<Lines>,
    /// Files that were read and are still there. They stay open, so that their inodes are no other file's.
    read: Vec<File>,
    /// Lines that are no records.
    damaged: u64,
    /// What is in the place of log files and is not read, and why.
    refused: BTreeSet<String>,
    /// Whether the newest file ends in a line without an end.
    is_within_line: bool,
}

/// The lines of a file.
#[derive(Debug)]
struct Lines {
    file: File,
    /// Where the next line begins.
    position: u64,
    /// What was read from there on.
    buffer: Vec<u8>,
    /// How much of that was taken.
    taken: usize,
    /// Whether the rest of a line that is too long is left out.
    is_skipping: bool,
}

/// What comes next in a file.
enum Next {
    Record(Box<(LogRecord, Timestamp)>),
    Damaged,
    /// Nothing as yet; perhaps a part of a line.
    End {
        is_within_line: bool,
    },
}

impl LogReader {
    /// The log files of a directory.
    ///
    /// # Errors
    /// When it can't be read.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::read_dir(&folder)?;
        let mut this = Self {
            folder,
            files: VecDeque::new(),
            read: Vec::new(),
            damaged: 0,
            refused: BTreeSet::new(),
            is_within_line: false,
        };
        this.look()?;
        Ok(this)
    }

    /// How many lines were no records, so far; one whose end is missing counts as long as it is.
    pub(crate) fn damaged(&self) -> u64 {
        self.damaged + u64::from(self.is_within_line)
    }

    /// What is in the place of log files and is not read, and why, so far.
    pub(crate) fn refused(&self) -> Option<String> {
        let refused: Vec<_> = self.refused.iter().map(String::as_str).collect();
        (!refused.is_empty()).then(|| refused.join(", "))
    }

    /// The next record and its time; `None` when there is none yet.
    ///
    /// # Errors
    /// When a file can't be read.
    pub(crate) fn next(&mut self) -> io::Result<Option<(LogRecord, Timestamp)>> {
        let mut waits = REST.0;
        self.is_within_line = false;
        loop {
            let Some(file) = self.files.front_mut() else {
                match self.look()? {
                    true => continue,
                    false => return Ok(None),
                }
            };
            let is_within_line = match file.next()? {
                Next::Record(record) => return Ok(Some(*record)),
                Next::Damaged => {
                    self.damaged += 1;
                    continue;
                }
                Next::End { is_within_line } => is_within_line,
            };
            if self.files.len() > 1 {
                // Nobody writes to it any more.
                self.damaged += u64::from(is_within_line);
                self.read.extend(self.files.pop_front().map(|lines| lines.file));
            } else if !self.look()? {
                if !is_within_line || waits == 0 {
                    self.is_within_line = is_within_line;
                    return Ok(None);
                }
                waits -= 1;
                std::thread::sleep(REST.1);
            }
            // Otherwise to its end: something may have been added before it was rotated.
        }
    }

    /// Looks for files that are newer than all that are known. Answers whether there are any.
    fn look(&mut self) -> io::Result<bool> {
        let mut newer = Vec::new();
        let mut known = Vec::new();
        for file in self.files.iter().map(|lines| &lines.file).chain(&self.read) {
            known.push(id_of(file)?);
        }
        for number in 0..=MOST_KEPT {
            let path = self.folder.join(name_of(number));
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
            let file = match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
                Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                    self.refused.insert(format!("{} is a symbolic link", path.display()));
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())));
                }
                Ok(file) => file,
            };
            if !file.metadata()?.is_file() {
                self.refused.insert(format!("{} is not a regular file", path.display()));
                continue;
            }
            let id = id_of(&file)?;
            if known.contains(&id) {
                break;
            }
            known.push(id);
            newer.push(file);
        }
        let found = !newer.is_empty();
        self.files.extend(newer.into_iter().rev().map(Lines::new));
        // What is removed does not come back.
        self.read.retain(|file| file.metadata().is_ok_and(|data| data.nlink() > 0));
        Ok(found)
    }
}

fn id_of(file: &File) -> io::Result<(u64, u64)> {
    let data = file.metadata()?;
    Ok((data.dev(), data.ino()))
}

impl Lines {
    fn new(file: File) -> Self {
        Self { file, position: 0, buffer: Vec::new(), taken: 0, is_skipping: false }
    }

    fn next(&mut self) -> io::Result<Next> {
        loop {
            let rest = self.buffer.get(self.taken..).unwrap_or_default();
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let record = if self.is_skipping { None } else { parse(rest.get(..end).unwrap_or_default()) };
                self.is_skipping = false;
                self.taken += end + 1;
                self.position += end as u64 + 1;
                return Ok(record.map_or(Next::Damaged, |record| Next::Record(Box::new(record))));
            }
            if rest.len() > LONGEST_LINE {
                self.position += rest.len() as u64;
                self.taken = self.buffer.len();
                self.is_skipping = true;
            }
            self.buffer.drain(..self.taken);
            self.taken = 0;
            let had = self.buffer.len();
            self.buffer.resize(had + CHUNK, 0);
            let added =
                self.file.read_at(self.buffer.get_mut(had..).unwrap_or_default(), self.position + had as u64);
            self.buffer.truncate(had + *added.as_ref().unwrap_or(&0));
            if added? > 0 {
                continue;
            }
            // What is there of a line is read again: whoever could not write all of it takes it back.
            let is_within_line = had > 0 || self.is_skipping;
            self.buffer.clear();
            let length = self.file.metadata()?.len();
            if length >= self.position {
                return Ok(Next::End { is_within_line });
            }
            // Somebody has emptied it.
            (self.position, self.is_skipping) = (0, false);
        }
    }
}

/// A line's record, if it is one.
fn parse(line: &[u8]) -> Option<(LogRecord, Timestamp)> {
    let record: LogRecord = serde_json::from_slice(line).ok()?;
    let time = record.time.parse().ok()?;
    Some((record, time))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::api::LogLevel;
    use crate::log::file::LogFile;
    use crate::log::record::{line, make};

    fn record(message: &str) -> Vec<u8> {
        line(&make(LogLevel::Info, "EGPU", message, []))
    }

    fn read(reader: &mut LogReader) -> Vec<String> {
        std::iter::from_fn(|| reader.next().expect("read")).map(|(record, _)| record.message).collect()
    }

    #[test]
    fn damaged_lines_are_counted_and_no_others_are_lost() {
        #[track_caller]
        fn check(parts: &[&[u8]], expect: &[&str], damaged: u64) {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join(name_of(0)), parts.concat()).expect("written");
            let mut reader = LogReader::open(folder.path().into()).expect("a reader");
            assert_eq!(read(&mut reader), expect);
            assert_eq!(reader.damaged(), damaged);
        }
        let (a, b) = (&record("a")[..], &record("b")[..]);
        check(&[], &[], 0);
        check(&[a, b], &["a", "b"], 0);
        check(&[a, b"\n", b], &["a", "b"], 1);
        check(&[a, &b[..30]], &["a"], 1);
        check(&[&a[..30], b"\n", b], &["b"], 1);
        check(&[b"\0\xff\x80\n", a, b"\x1b[2J\n", b], &["a", "b"], 2);
        check(&[b"{}\n", b"[]\n", b"null\n", b"{\"time\":1}\n", a], &["a"], 4);
        let no_time = String::from_utf8(a.to_vec()).expect("text").replace("\"time\":\"2", "\"time\":\"x2");
        check(&[no_time.as_bytes(), b], &["b"], 1);
        check(&[&vec![b'['; 100_000], b"\n", a], &["a"], 1);
        check(&[&vec![b'x'; 3 * LONGEST_LINE], b"\n", a], &["a"], 1);
        check(&[a, &vec![0; 3 * LONGEST_LINE]], &["a"], 1);
        check(&[a, &record(&"long ".repeat(100_000))[..0], b], &["a", "b"], 0);
    }

    #[test]
    fn what_is_no_log_file_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |number| folder.path().join(name_of(number));
        fs::write(path(0), record("new")).expect("written");
        std::os::unix::fs::symlink("/etc/passwd", path(1)).expect("a link");
        fs::create_dir(path(2)).expect("a directory");
        rustix::fs::mknodat(rustix::fs::CWD, path(3), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a FIFO");
        fs::write(path(7), record("old")).expect("written");
        let mut reader = LogReader::open(folder.path().into()).expect("a reader");
        assert_eq!((read(&mut reader), reader.damaged()), (vec!["old".into(), "new".into()], 0));
        LogReader::open(path(9)).expect_err("there is none");
    }

    #[test]
    fn a_reader_follows_any_number_of_rotations() {
        for between in [1, 2, 7, 30, 100] {
            let folder = tempfile::tempdir().expect("a folder");
            // Three records a file.
            let size = 3 * record("number 100").len() as u64;
            let mut file = LogFile::new(folder.path().into(), size, 60, Duration::from_secs(60));
            let mut reader = None;
            let mut got = Vec::new();
            for number in 100..300 {
                file.append(&record(&format!("number {number}"))).expect("written");
                if number % between == 0 {
                    let reader = reader
                        .get_or_insert_with(|| LogReader::open(folder.path().into()).expect("a reader"));
                    got.extend(read(reader));
                }
            }
            let mut reader = reader.expect("a reader");
            got.extend(read(&mut reader));
            let expect: Vec<_> = (100..300).map(|number| format!("number {number}")).collect();
            // Nobody read for so long that the oldest are gone.
            let gone =
                if between == 100 { got.iter().position(|of| *of == expect[expect.len() - 1]) } else { None };
            match gone {
                Some(_) => assert!(expect.ends_with(&got[got.len() - 150..]), "{got:?}"),
                None => assert_eq!(got, expect, "{between}"),
            }
            assert_eq!(reader.damaged(), 0);
        }
    }

    #[test]
    fn a_file_that_is_emptied_or_removed_is_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name_of(0));
        let mut reader = LogReader::open(folder.path().into()).expect("a reader");
        assert!(read(&mut reader).is_empty());
        fs::write(&path, [record("a"), record("b")].concat()).expect("written");
        assert_eq!(read(&mut reader), ["a", "b"]);
        File::create(&path).expect("emptied");
        assert!(read(&mut reader).is_empty());
        fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .expect("a file")
            .write_all(&record("c"))
            .expect("written");
        assert_eq!(read(&mut reader), ["c"]);
        fs::remove_file(&path).expect("removed");
        assert!(read(&mut reader).is_empty());
        fs::write(&path, record("d")).expect("written");
        assert_eq!((read(&mut reader), reader.damaged()), (vec!["d".to_owned()], 0));
        // A record whose end comes later is read once, and as a whole.
        let e = record("e");
        let mut file = fs::OpenOptions::new().append(true).open(&path).expect("a file");
        file.write_all(&e[..20]).expect("written");
        assert!(read(&mut reader).is_empty());
        assert_eq!(reader.damaged(), 1);
        file.write_all(&e[20..]).expect("written");
        assert_eq!((read(&mut reader), reader.damaged()), (vec!["e".to_owned()], 0));
    }
}
