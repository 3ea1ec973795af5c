//! Locks between processes (flock(2)), which the Linux kernel drops with whoever holds them.
//!
//! Any user who can open a file for reading can lock it. So only files with mode 0600 are locked, never a directory.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use vm_files::Entry;

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

/// An exclusive lock for replacing a stale file at a path. The lock file is `.NAME.lock` in the same directory. Dropping this removes the lock file.
#[derive(Debug)]
pub(crate) struct PathLock {
    path: PathBuf,
    at: Entry,
    file: File,
}

impl PathLock {
    /// Takes the lock of a path.
    ///
    /// # Errors
    /// When its file can't be created or belongs to another user, or another process keeps it locked.
    pub(crate) fn take(path: &Path) -> io::Result<Self> {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().ok_or_else(|| io::Error::other("the path has no name"))?);
        name.push(".lock");
        let path = folder_of(path).join(name);
        let at = vm_files::entry(&path)?;
        let until = Instant::now() + FILE_LOCK;
        loop {
            let file = open_at(&path, &at)?;
            let is_locked = has_locked(&file)?;
            // The last holder may have removed the file: then another process can lock a new one.
            if is_locked && file.metadata()?.nlink() > 0 {
                return Ok(Self { path, at, file });
            }
            if Instant::now() >= until {
                let text = format!("another process has locked {}; `fuser` names it", path.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }
}

impl Drop for PathLock {
    fn drop(&mut self) {
        if let Err(error) = unlinkat(&self.at.folder, &self.at.name, AtFlags::empty()) {
            tracing::warn!("the lock file {} can't be removed: {error}", self.path.display());
        }
        // Not left to the end of the descriptor, which a child may have inherited. It can't fail on a locked file.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Opens a lock file with mode 0600, and creates a missing one.
///
/// # Errors
/// When the file is not a regular file, another user owns it, or its mode lets other users open it.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    open_at(path, &vm_files::entry(path)?)
}

fn open_at(path: &Path, at: &Entry) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let refused =
        |what: &str| io::Error::other(format!("the lock file {} {what}; remove it", path.display()));
    let file = match openat(&at.folder, &at.name, flags, Mode::RUSR | Mode::WUSR) {
        Err(Errno::LOOP) => return Err(refused("is a symbolic link")),
        file => File::from(file?),
    };
    let data = file.metadata()?;
    match () {
        () if !data.is_file() => Err(refused("is not a regular file")),
        () if data.uid() != geteuid().as_raw() => Err(refused(&format!("belongs to user {}", data.uid()))),
        () if data.mode() & 0o077 != 0 => Err(refused("can be opened by other users")),
        () => Ok(file),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn a_lock_file_is_the_owners_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, lock) = (folder.path().join("socket"), folder.path().join(".socket.lock"));
        let taken = PathLock::take(&path).expect("a lock");
        assert_eq!(lock.metadata().expect("its file").mode() & 0o777, 0o600);
        drop(taken);
        assert!(!lock.exists());
        let refused = |says: &str| {
            let said = PathLock::take(&path).expect_err(says).to_string();
            assert!(said.contains(says), "{said}");
            fs::remove_file(&lock).expect("removed");
        };
        symlink(folder.path().join("aim"), &lock).expect("a link");
        refused("is a symbolic link");
        assert!(!folder.path().join("aim").exists());
        rustix::fs::mknodat(CWD, &lock, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
        refused("is not a regular file");
        fs::write(&lock, "").expect("written");
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o604)).expect("a mode");
        refused("can be opened by other users");
        if geteuid().is_root() {
            fs::write(&lock, "").expect("written");
            chown(&lock, Some(65534), None).expect("another owner");
            refused("belongs to user 65534");
        }
        let held = PathLock::take(&path).expect("a lock");
        let said = PathLock::take(&path).expect_err("it is held").to_string();
        assert!(said.contains("another process has locked") && said.contains(".socket.lock"), "{said}");
        drop(held);
        PathLock::take(&path).expect("a lock");
    }

    #[test]
    fn one_of_many_holds_a_lock_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, holders) = (&folder.path().join("socket"), &std::sync::atomic::AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    for _ in 0..200 {
                        // Others may have had it each time within the deadline.
                        let Ok(_lock) = PathLock::take(path) else { continue };
                        assert_eq!(holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
