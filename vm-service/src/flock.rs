//! Locks between processes (flock(2)), which the Linux kernel drops with whoever holds them.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::deadlines::FILE_LOCK;

/// Locks a file, and answers whether that came about in time.
pub(crate) fn has_locked(file: &File) -> io::Result<bool> {
    let until = Instant::now() + FILE_LOCK;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The directory of a path.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Locks the directory of a path, for who looks at what is there and then replaces or removes it.
///
/// # Errors
/// When it can't be opened, or another process keeps it locked.
pub(crate) fn lock_folder_of(path: &Path) -> io::Result<File> {
    let folder = File::open(folder_of(path))?;
    match has_locked(&folder)? {
        true => Ok(folder),
        false => Err(io::Error::other("another process has locked its directory")),
    }
}
