//! The log file, which several threads of several processes write, and its rotation.
//!
//! ```text
//! vm-service.log.lock   flock(2): who has it writes, or rotates; nobody else does either
//! vm-service.log        the newest records; each is one write(2) with O_APPEND
//! vm-service.log.1 …    older ones, the higher the number the older
//! ```
//!
//! A process holds the lock for one batch of records, a few milliseconds at most. One that was stopped meanwhile (SIGSTOP)
//! holds it on, so the others wait for it no longer than [`LogFile::deadline`], and not again before it has let go. Under the lock
//! whoever writes looks whether directory, lock and file are still those that the paths lead to; they are opened again
//! where another process rotated, or somebody removed them.
//!
//! A write that fails in its middle is taken back. What a killed process left of a record ends in no newline; who writes next
//! begins a new line behind it.
//!
//! The directory is this user's, and nobody else may write to it, or they could put a link or another file at these names. Links
//! are not followed all the same. The lock's file is for its owner alone: whoever may open it could lock it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use vm_passthrough::ledger::check_trusted;

/// The newest file; the others have a number behind it.
pub(crate) const NAME: &str = "vm-service.log";
/// What is locked.
const LOCK: &str = "vm-service.log.lock";
/// Most files that may be kept besides the newest.
pub(crate) const MOST_KEPT: u32 = 99;
/// Between two attempts at a lock: at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];

/// How often what is open may turn out not to be what is at the paths any more.
const ATTEMPTS: usize = 8;
/// A file's mode: its group may read it.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR).union(Mode::RGRP);

/// The name of a file, by its age.
pub(crate) fn name_of(number: u32) -> String {
    match number {
        0 => NAME.to_owned(),
        number => format!("{NAME}.{number}"),
    }
}

/// The log file of a directory.
#[derive(Debug)]
pub(super) struct LogFile {
    /// The directory.
    pub(super) folder: PathBuf,
    /// A file that would grow beyond so many bytes is rotated.
    pub(super) size: u64,
    /// How many are kept besides the newest.
    pub(super) kept: u32,
    /// How long another process may have the lock.
    pub(super) deadline: Duration,
    open: Option<Open>,
    /// Whether the last wait for the lock was in vain.
    gave_up: bool,
}

/// What is open of it.
#[derive(Debug)]
struct Open {
    folder: File,
    lock: File,
    /// The newest file; `None` before the first record.
    file: Option<File>,
    /// Where the file ended when this process had last written; `None` before.
    end: Option<u64>,
}

/// Records that were not written.
#[derive(Debug)]
pub(super) struct Lost {
    /// How many.
    pub(super) count: u64,
    /// Why the first was not.
    pub(super) error: io::Error,
}

impl LogFile {
    /// The log file of `folder`; nothing is opened yet.
    pub(super) fn new(folder: PathBuf, size: u64, kept: u32, deadline: Duration) -> Self {
        Self { folder, size, kept, deadline, open: None, gave_up: false }
    }

    /// Writes records, each a line with its end.
    ///
    /// # Errors
    /// How many were not written, and why.
    pub(super) fn append(&mut self, lines: &[u8]) -> Result<(), Lost> {
        let mut lines = lines.split_inclusive(|byte| *byte == b'\n');
        let mut open = match self.locked() {
            Ok(open) => open,
            Err(error) => return Err(Lost { count: lines.count() as u64, error }),
        };
        let failed = lines.find_map(|line| open.append(&self.folder, line, self.size, self.kept).err());
        open.unlock();
        self.open = Some(open);
        failed.map_or(Ok(()), |error| Err(Lost { count: lines.count() as u64 + 1, error }))
    }

    /// All that is open, with the lock, and such as the paths lead to.
    fn locked(&mut self) -> io::Result<Open> {
        let until = Instant::now() + if self.gave_up { Duration::ZERO } else { self.deadline };
        for _ in 0..ATTEMPTS {
            let mut open = self.open.take().map_or_else(|| Open::new(&self.folder), Ok)?;
            self.gave_up = !open.lock(until)?;
            if self.gave_up {
                self.open = Some(open);
                let what = format!(
                    "another process does not let go of {}; `fuser` tells which, and it may be stopped",
                    self.folder.join(LOCK).display()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            match open.refresh(&self.folder) {
                Ok(true) => return Ok(open),
                refreshed => {
                    open.unlock();
                    refreshed?;
                }
            }
        }
        Err(io::Error::other("its files are replaced time and again"))
    }
}

impl Open {
    fn new(path: &Path) -> io::Result<Self> {
        let folder = vm_files::open_folder(path, 0o750, true)?;
        check_trusted(path, &folder.metadata()?, true).map_err(io::Error::other)?;
        let lock = open_in(&folder, path, LOCK, Mode::RUSR | Mode::WUSR)?;
        Ok(Self { folder, lock, file: None, end: None })
    }

    /// Waits for the lock, and answers whether it came about in time.
    fn lock(&self, until: Instant) -> io::Result<bool> {
        let [mut pause, longest] = PAUSE;
        loop {
            match flock(&self.lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(true),
                Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(pause),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            pause = (pause * 2).min(longest);
        }
    }

    /// Not left to the descriptor's end: a child that this process forked meanwhile may have it too.
    fn unlock(&self) {
        // It can't fail on a descriptor that is locked.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }

    /// Opens the newest file if it is not the one that is open. Answers whether directory and lock are still those at their
    /// paths; all is to be opened again if they are not.
    fn refresh(&mut self, path: &Path) -> io::Result<bool> {
        let folder = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            folder => folder?,
        };
        if id_of(&folder) != id_of(&self.folder.metadata()?)
            || self.id_at(LOCK)? != Some(id_of(&self.lock.metadata()?))
        {
            return Ok(false);
        }
        let file = self.file.as_ref().map(File::metadata).transpose()?;
        if file.is_none_or(|file| !matches!(self.id_at(NAME), Ok(Some(id)) if id == id_of(&file))) {
            self.file = None;
            self.file = Some(open_in(&self.folder, path, NAME, FILE_MODE)?);
            self.end = None;
        }
        Ok(true)
    }

    /// What is at a name of the directory.
    fn id_at(&self, name: &str) -> io::Result<Option<(u64, u64)>> {
        match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            there => Ok(Some(there.map(|there| (there.st_dev, there.st_ino))?)),
        }
    }

    /// Writes a record, after a rotation where it would make the file too large. All of it is written, or nothing.
    fn append(&mut self, path: &Path, line: &[u8], size: u64, kept: u32) -> io::Result<()> {
        let mut file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut length = file.metadata()?.len();
        if length > 0 && length + line.len() as u64 > size {
            self.rotate(kept)?;
            self.file = None;
            self.end = None;
            file = self.file.insert(open_in(&self.folder, path, NAME, FILE_MODE)?);
            length = file.metadata()?.len();
        }
        let is_torn = || {
            let mut last = [0];
            Ok::<_, io::Error>(file.read_at(&mut last, length - 1)? == 1 && last != *b"\n")
        };
        let begin: &[u8] = if length > 0 && self.end != Some(length) && is_torn()? { b"\n" } else { b"" };
        let line = [begin, line].concat();
        self.end = None;
        let written = loop {
            match file.write(&line) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                written => break written?,
            }
        };
        if written < line.len() {
            // Nobody else has written behind it. If it stays, whoever writes next sees that.
            let _ = file.set_len(length);
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.end = Some(length + line.len() as u64);
        Ok(())
    }

    /// Gives each file the next number. Where a number is free, as after a process that was killed here, the files
    /// behind it stay; else the oldest goes.
    fn rotate(&self, kept: u32) -> io::Result<()> {
        let mut free = kept;
        for number in (1..=kept).rev() {
            if self.id_at(&name_of(number))?.is_none() {
                free = number;
            }
        }
        for number in (0..free).rev() {
            renameat(&self.folder, name_of(number), &self.folder, name_of(number + 1))?;
        }
        // Of a time when more were kept.
        for number in kept + 1..=MOST_KEPT {
            match unlinkat(&self.folder, name_of(number), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn id_of(data: &fs::Metadata) -> (u64, u64) {
    (data.dev(), data.ino())
}

/// Opens a file of the directory, which is made if there is none.
fn open_in(folder: &File, path: &Path, name: &str, mode: Mode) -> io::Result<File> {
    let path = path.join(name);
    // Not following a link, and not waiting for the other end of a FIFO.
    let flags = OFlags::RDWR
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::CLOEXEC;
    let file = match openat(folder, name, flags, mode) {
        Err(Errno::LOOP) => {
            return Err(io::Error::other(format!("{} is a symbolic link; remove it", path.display())));
        }
        file => File::from(file?),
    };
    check_trusted(&path, &file.metadata()?, false).map_err(io::Error::other)?;
    Ok(file)
}

#[cfg(test)]
mod tests;
