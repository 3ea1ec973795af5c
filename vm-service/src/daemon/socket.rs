//! The daemon's socket: made here, or passed by systemd.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use thiserror::Error;
use vm_passthrough::Host;

use super::socket_of;
use crate::control::in_folder;
use crate::deadlines::DAEMON_LOCK;

/// Why there is no socket.
#[derive(Debug, Error)]
pub(super) enum SocketError {
    /// A daemon serves the same guests.
    #[error("another daemon serves the guests of {}; stop it first", .0.display())]
    Taken(PathBuf),
    /// It can't be made.
    #[error("the socket {} can't be made: {source}", .path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A socket that listens. One that was made here is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) listener: UnixListener,
    made: Option<PathBuf>,
    /// One daemon at a time serves the guests of a host.
    _lock: File,
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(path) = &self.made
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!("the socket {} can't be removed: {error}", path.display());
        }
    }
}

/// Listens on the socket that systemd passed, or on one of its own.
///
/// # Errors
/// When another daemon serves, or it can't be made.
pub(super) fn listen(host: &Host, named: Option<&PathBuf>) -> Result<Listening, SocketError> {
    let state = host.state.clone();
    let lock =
        lock(&state).map_err(|source| SocketError::Unusable { path: state.join("daemon.lock"), source })?;
    let lock = lock.ok_or(SocketError::Taken(state))?;
    let path = socket_of(host, named);
    let unusable = |source| SocketError::Unusable { path: path.clone(), source };
    let passed = listenfd::ListenFd::from_env().take_unix_listener(0).map_err(unusable)?;
    let made = passed.is_none().then(|| path.clone());
    let listener = passed.map_or_else(|| make(&path), Ok).map_err(unusable)?;
    listener.set_nonblocking(true).map_err(unusable)?;
    Ok(Listening { listener, made, _lock: lock })
}

/// The lock of whoever serves; `None` when another has it. A daemon that has just ended may have left it for a moment to a child
/// that it made, until that has closed what it does not need.
fn lock(state: &Path) -> io::Result<Option<File>> {
    DirBuilder::new().recursive(true).mode(0o755).create(state)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = File::from(openat(CWD, state.join("daemon.lock"), flags, Mode::RUSR | Mode::WUSR)?);
    let until = Instant::now() + DAEMON_LOCK;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes a socket, in the place of one that a killed daemon left.
fn make(path: &Path) -> io::Result<UnixListener> {
    let (folder, name) = (path.parent(), path.file_name().and_then(|name| name.to_str()));
    let name = name.ok_or_else(|| io::Error::other("its path has no name"))?;
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match path.symlink_metadata() {
        Ok(there) if there.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::other("something that is no socket is there")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = in_folder(folder, name, UnixListener::bind)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
