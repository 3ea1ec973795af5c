//! The directory of recordings. It limits each recording, and the bytes of all files together.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::BridgeError;

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
    folder: PathBuf,
    limit: u64,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    count: u64,
    left: u64,
}

/// The reservation of one recording.
#[derive(Debug)]
pub(super) struct Record {
    /// Its file.
    pub(super) path: PathBuf,
    /// The most bytes that it may have.
    pub(super) limit: u64,
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Records {
    /// Opens the directory, and creates a missing one.
    ///
    /// # Errors
    /// When that fails, or other users may write to it.
    pub(super) fn open(options: &RecordOptions) -> Result<Self, BridgeError> {
        let RecordOptions { folder, limit, total } = options;
        let opened = || {
            match DirBuilder::new().mode(0o700).create(folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            // Workers have another working directory.
            let folder = folder.canonicalize()?;
            if folder.metadata()?.mode() & 0o022 != 0 {
                return Err(io::Error::other("other users may write to it"));
            }
            let mut used = 0u64;
            for entry in folder.read_dir()? {
                used = used.saturating_add(size(&entry?.path()));
            }
            let state = State { count: 0, left: total.saturating_sub(used) };
            Ok(Self { folder, limit: *limit, state: Arc::new(Mutex::new(state)) })
        };
        opened().map_err(|source| BridgeError::Record { path: folder.clone(), source })
    }

    /// Reserves room for a recording; `None` when the directory is full.
    pub(super) fn take(&self) -> Option<Record> {
        let mut state = lock(&self.state);
        let limit = self.limit.min(state.left);
        if limit < BLOCK {
            tracing::warn!(
                "a CUDA program is not recorded: {} is full; raise --record-total, or remove recordings and start the \
                 server again",
                self.folder.display()
            );
            return None;
        }
        state.left -= limit;
        let number = state.count;
        state.count += 1;
        drop(state);
        let path = self.folder.join(format!("{}-{number}", std::process::id()));
        Some(Record { path, limit, state: self.state.clone() })
    }
}

/// Returns the bytes that a file counts with.
fn size(path: &Path) -> u64 {
    path.symlink_metadata().map_or(0, |data| data.len().max(BLOCK))
}

impl Drop for Record {
    /// Returns the unused part of the reservation.
    fn drop(&mut self) {
        let left = self.limit.saturating_sub(size(&self.path));
        lock(&self.state).left += left;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_directory_of_recordings_is_private_and_bounded() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("records");
        let options = RecordOptions { folder: folder.clone(), limit: 64 << 10, total: 100 << 10 };
        let records = Records::open(&options).expect("a directory");
        assert_eq!(folder.metadata().expect("a directory").mode() & 0o777, 0o700);
        let limits = |records: &Records| [records.take(), records.take(), records.take()];
        let limit = |record: &Option<Record>| record.as_ref().map(|record| record.limit);
        let taken = limits(&records);
        assert_eq!(taken.each_ref().map(limit), [Some(64 << 10), Some(36 << 10), None]);
        let path = &taken[0].as_ref().expect("a recording").path;
        fs::write(path, vec![0; 20 << 10]).expect("written");
        drop(taken);
        // The next recordings get the rest, also those of a later server.
        for records in [records, Records::open(&options).expect("a directory")] {
            assert_eq!(limits(&records).each_ref().map(limit), [Some(64 << 10), Some(16 << 10), None]);
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("open to all");
        let refused = Records::open(&options).expect_err("a refusal").to_string();
        assert!(refused.contains("other users may write"), "{refused}");
    }
}
