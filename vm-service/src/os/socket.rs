//! Listening Unix sockets at paths.

use std::fs::{self, FileType};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::guest::control::reach;
use crate::os::flock::{PathLock, folder_of};

/// A path on which nothing can listen.
#[derive(Debug, Error)]
#[error("cannot listen on {path}: {cause}; {fix}", path = path.display(), fix = cause.fix())]
pub(crate) struct ListenError {
    path: PathBuf,
    /// The cause.
    pub(crate) cause: Cause,
}

/// The cause of a [`ListenError`].
#[derive(Debug, Error)]
pub(crate) enum Cause {
    /// Another process listens on the path.
    #[error("another process listens there")]
    Listened,
    /// The path names another kind of file.
    #[error("{0} is there")]
    Other(&'static str),
    /// The Linux kernel's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Cause {
    fn fix(&self) -> &'static str {
        match self {
            Self::Listened => "stop that process, or choose another path",
            Self::Other(_) => "remove it yourself if nobody needs it, or choose another path",
            Self::Io(_) => "choose another path",
        }
    }
}

/// Listens on a path, and sets its permissions to `mode` if given. Replaces a stale socket, never anything else, and follows no symbolic
/// link.
///
/// # Errors
/// When the path is in use, or the Linux kernel refuses.
pub(crate) fn listen(path: &Path, mode: Option<u32>) -> Result<UnixListener, ListenError> {
    make(path, mode).map_err(|cause| ListenError { path: path.to_owned(), cause })
}

fn make(path: &Path, mode: Option<u32>) -> Result<UnixListener, Cause> {
    let at = vm_files::entry(path)?;
    let name = at.name.to_str().ok_or_else(|| io::Error::other("its name is not UTF-8"))?;
    // A path to the open directory, which is also short enough for the address of a socket.
    let here = Path::new("/proc/self/fd").join(at.folder.as_raw_fd().to_string()).join(name);
    // Only the holder of the lock removes a stale socket: another process may have put a live one there since it was found stale.
    let lock = is_stale(&here, name)?.then(|| PathLock::take(path)).transpose()?;
    if lock.is_some() && is_stale(&here, name)? {
        fs::remove_file(&here)?;
    }
    // The path appears only after `listen` and with its final permissions, so a client that polls for it can connect.
    let prepared = tempfile::Builder::new().make_in(folder_of(&here), |path| UnixListener::bind(path))?;
    if let Some(mode) = mode {
        fs::set_permissions(prepared.path(), fs::Permissions::from_mode(mode))?;
    }
    let listening = prepared.persist_noclobber(&here).map_err(io::Error::from);
    match listening {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Cause::Listened),
        listening => Ok(listening?),
    }
}

/// Returns whether the path is a stale socket; false if there is nothing.
fn is_stale(path: &Path, name: &str) -> Result<bool, Cause> {
    match path.symlink_metadata() {
        Ok(there) if there.file_type().is_socket() => match reach(folder_of(path), name) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            _ => Err(Cause::Listened),
        },
        Ok(there) => Err(Cause::Other(kind(there.file_type()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn kind(of: FileType) -> &'static str {
    match () {
        () if of.is_symlink() => "a symbolic link",
        () if of.is_dir() => "a directory",
        () if of.is_fifo() => "a FIFO",
        () if of.is_file() => "a regular file",
        () => "a device",
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let refused = |name: &str, says: &str| {
            let said = listen(&path(name), None).expect_err(name).to_string();
            let begins = format!("cannot listen on {}: {says}", path(name).display());
            assert!(said.starts_with(&begins) && said.contains("; "), "{said}");
        };
        fs::write(path("file"), "precious").expect("written");
        symlink(path("file"), path("link")).expect("a link");
        fs::create_dir(path("folder")).expect("a folder");
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a FIFO");
        refused("file", "a regular file is there");
        refused("link", "a symbolic link is there");
        refused("folder", "a directory is there");
        refused("fifo", "a FIFO is there");
        refused("none/socket", "No such file");
        assert_eq!(fs::read(path("link")).expect("through the link"), b"precious");
        let (found, first) = std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                loop {
                    if path("socket").exists() {
                        break UnixStream::connect(path("socket"))
                            .map(|_| path("socket").metadata().expect("a socket").mode());
                    }
                }
            });
            let first = listen(&path("socket"), Some(0o600)).expect("a socket");
            (waits.join().expect("no panic").expect("connected"), first)
        });
        assert_eq!(found & 0o777, 0o600);
        refused("socket", "another process listens there");
        symlink(path("socket"), path("to-socket")).expect("a link");
        drop(first);
        refused("to-socket", "a symbolic link is there");
        // Any user who can read the directory can lock it.
        let directory = fs::File::open(folder.path()).expect("the directory");
        rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockShared).expect("locked");
        listen(&path("socket"), None).expect("in the place of a stale one");
        assert!(!path(".socket.lock").exists());
    }

    #[test]
    fn one_of_many_that_replace_a_stale_socket_listens() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = &folder.path().join("socket");
        // A child that another test forks has a copy of every listener until it executes its program.
        let until = Instant::now() + Duration::from_secs(60);
        let is_copied =
            |error: &ListenError| matches!(error.cause, Cause::Listened) && Instant::now() < until;
        let mut rounds = 0;
        while rounds < 100 {
            match listen(path, None) {
                Err(error) if is_copied(&error) => continue,
                first => drop(first.expect("a socket")),
            }
            let raced: Vec<_> = std::thread::scope(|scope| {
                let racers = [(); 3].map(|()| scope.spawn(|| listen(path, None)));
                racers.into_iter().map(|racer| racer.join().expect("no panic")).collect()
            });
            if raced.iter().all(|raced| raced.as_ref().is_err_and(is_copied)) {
                continue;
            }
            assert_eq!(raced.iter().flatten().count(), 1, "{raced:?}");
            UnixStream::connect(path).expect("the one that listens is at the path");
            rounds += 1;
        }
    }
}
