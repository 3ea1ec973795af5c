//! The directory of recordings. It limits each recording, and the bytes of all files together.
//!
//! The server creates and writes the files, in the directory that it checked when it started. A worker, which its program may have taken over, only
//! sends its recording over a socket.

use std::fs::File;
use std::io::{self, Read as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use vm_passthrough::ledger::check_trusted;

use super::BridgeError;
use super::capacity::Reserved;

/// The least size that a file counts with: a block.
const BLOCK: u64 = 4096;

/// The directory of recordings and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordOptions {
    /// The directory. The server creates a missing one with mode 0700.
    pub(crate) folder: PathBuf,
    /// The most bytes of a recording.
    pub(crate) limit: u64,
    /// The most bytes of all files.
    pub(crate) total: u64,
}

/// The open directory. An unfinished recording counts with its limit.
#[derive(Debug)]
pub(super) struct Records {
    path: PathBuf,
    folder: File,
    limit: u64,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    count: u64,
    left: u64,
}

/// The file of one recording, with its reservation.
#[derive(Debug)]
struct Record {
    file: File,
    /// The most bytes that it may have.
    limit: u64,
    state: Arc<Mutex<State>>,
}

/// A recording that a thread writes while its worker runs.
#[derive(Debug)]
pub(super) struct Recording {
    /// The most bytes that it may have.
    pub(super) limit: u64,
    ours: Arc<UnixStream>,
    theirs: OwnedFd,
}

/// Ends a recording when it is dropped, even if another process holds the worker's end.
#[derive(Debug)]
pub(super) struct End(Arc<UnixStream>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Records {
    /// Opens the directory, and creates a missing one.
    ///
    /// # Errors
    /// When that fails, it belongs to another user, others may write to it, or its name is a link.
    pub(super) fn open(options: &RecordOptions) -> Result<Self, BridgeError> {
        let RecordOptions { folder: path, limit, total } = options;
        let opened = || {
            let folder = vm_files::open_folder(path, 0o700, false)?;
            check_trusted(path, &folder.metadata()?, true).map_err(io::Error::other)?;
            let mut used = 0u64;
            for entry in Dir::read_from(&folder)? {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    let data = statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
                    used = used.saturating_add(data.map_or(0, |data| size(data.st_size.unsigned_abs())));
                }
            }
            let state = State { count: 0, left: total.saturating_sub(used) };
            Ok(Self { path: path.clone(), folder, limit: *limit, state: Arc::new(Mutex::new(state)) })
        };
        opened().map_err(|source| BridgeError::Record { path: path.clone(), source })
    }

    /// Begins the recording of a worker, in descriptors that are `reserved`. Logs why there is none.
    pub(super) fn begin(&self, reserved: Option<Reserved>) -> Option<Recording> {
        let record = match self.take() {
            Ok(Some(record)) => record,
            Ok(None) => {
                tracing::warn!(
                    "a CUDA program is not recorded: {} is full; raise --record-total, or remove recordings and start the \
                     server again",
                    self.path.display()
                );
                return None;
            }
            Err(error) => {
                tracing::warn!(
                    "a CUDA program is not recorded: cannot record into {}: {error}",
                    self.path.display()
                );
                return None;
            }
        };
        let limit = record.limit;
        let begun = UnixStream::pair().and_then(|(ours, theirs)| {
            // Nothing goes to the worker.
            ours.shutdown(Shutdown::Write)?;
            let ours = Arc::new(ours);
            let from = ours.clone();
            let write = move || {
                if let Err(error) = record.write(&from) {
                    tracing::warn!(%error, "the recording of a CUDA program ends");
                }
                // The worker need not send what is not written.
                let _ = from.shutdown(Shutdown::Read);
                drop((record, reserved));
            };
            std::thread::Builder::new().name("recording".into()).spawn(write)?;
            Ok(Recording { limit, ours, theirs: theirs.into() })
        });
        begun
            .inspect_err(|error| {
                tracing::warn!("a CUDA program is not recorded: {error}; see `ulimit -n` and `ulimit -u`")
            })
            .ok()
    }

    /// Creates the file of a recording; `None` when the directory is full.
    fn take(&self) -> io::Result<Option<Record>> {
        let limit = {
            let mut state = lock(&self.state);
            let limit = self.limit.min(state.left);
            if limit < BLOCK {
                return Ok(None);
            }
            state.left -= limit;
            limit
        };
        let file = self.create().inspect_err(|_| lock(&self.state).left += limit)?;
        Ok(Some(Record { file, limit, state: self.state.clone() }))
    }

    /// Creates a file of a new name: an earlier process of this number may have left some.
    fn create(&self) -> io::Result<File> {
        // It may hold a program's secrets.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            let number = {
                let mut state = lock(&self.state);
                state.count += 1;
                state.count - 1
            };
            let name = format!("{}-{number}", std::process::id());
            match openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => {}
                file => return Ok(file?.into()),
            }
        }
    }
}

/// Returns the bytes that a file of a length counts with.
fn size(len: u64) -> u64 {
    len.max(BLOCK)
}

impl Recording {
    /// The worker's end.
    pub(super) fn theirs(&self) -> BorrowedFd<'_> {
        self.theirs.as_fd()
    }

    /// Closes the worker's end here, as the worker has it.
    pub(super) fn close(self) -> End {
        End(self.ours)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It fails where the thread has ended the recording.
        let _ = self.0.shutdown(Shutdown::Read);
    }
}

impl Record {
    /// Writes what a worker sends, and no more than the limit.
    fn write(&self, from: &UnixStream) -> io::Result<u64> {
        io::copy(&mut from.take(self.limit), &mut &self.file)
    }
}

impl Drop for Record {
    /// Returns the unused part of the reservation.
    fn drop(&mut self) {
        let used = self.file.metadata().map_or(self.limit, |data| size(data.len()));
        lock(&self.state).left += self.limit.saturating_sub(used);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_directory_of_recordings_is_private_and_bounded() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("records");
        let options = RecordOptions { folder: folder.clone(), limit: 64 << 10, total: 100 << 10 };
        let records = Records::open(&options).expect("a directory");
        assert_eq!(folder.metadata().expect("a directory").mode() & 0o777, 0o700);
        let limits = |records: &Records| [(); 3].map(|()| records.take().expect("a record"));
        let limit = |record: &Option<Record>| record.as_ref().map(|record| record.limit);
        let taken = limits(&records);
        assert_eq!(taken.each_ref().map(limit), [Some(64 << 10), Some(36 << 10), None]);
        let mut file = &taken[0].as_ref().expect("a recording").file;
        file.write_all(&[0; 20 << 10]).expect("written");
        drop(taken);
        // The next recordings get the rest, also those of a later server. Each empty file counts with a block.
        for records in [records, Records::open(&options).expect("a directory")] {
            assert_eq!(limits(&records).each_ref().map(limit), [Some(64 << 10), Some(12 << 10), None]);
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("open to all");
        let refused = Records::open(&options).expect_err("a refusal").to_string();
        assert!(refused.contains("can be written to by others"), "{refused}");
    }
}
