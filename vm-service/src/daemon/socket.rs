//! The daemon's socket: made here, or passed by systemd.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use thiserror::Error;
use vm_passthrough::Host;
use vm_passthrough::ledger::check_trusted;

use super::socket_of;
use crate::os::flock::{self, has_locked};
use crate::os::socket::{self, Cause, ListenError};

/// The name of the file that a daemon locks in its state directory.
const LOCK: &str = "daemon.lock";

/// Why there is no socket.
#[derive(Debug, Error)]
pub(super) enum SocketError {
    /// A daemon serves the same guests.
    #[error("another daemon serves the guests of {}; stop it first", .0.display())]
    Taken(PathBuf),
    /// A daemon, or whatever it is, listens there.
    #[error("another daemon listens on {}; stop it first, or choose another place with `--socket`", .0.display())]
    Listened(PathBuf),
    /// The path is taken by something else.
    #[error(transparent)]
    Listen(ListenError),
    /// It can't be made.
    #[error("{} can't be made: {source}", .path.display())]
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
    /// Dropped before the listener: other processes replace only a stale socket.
    _made: Option<Made>,
    pub(super) listener: UnixListener,
    /// One daemon at a time serves the guests of a host.
    lock: File,
    state: PathBuf,
}

impl Listening {
    /// Checks that the daemon still has the lock of its state directory: without it, another may serve the same guests.
    ///
    /// # Errors
    /// When the directory was removed, or another is in its place.
    pub(super) fn check_state(&self) -> io::Result<()> {
        let own = self.lock.metadata()?;
        match id_of(&self.state.join(LOCK)) {
            Ok(id) if id == (own.dev(), own.ino()) => Ok(()),
            _ => Err(io::Error::other(format!(
                "{} was removed or replaced under the daemon; its guests go on, but no command finds them: end each by a signal \
                 to its process (`pgrep -af 'vm-service run'`)",
                self.state.display()
            ))),
        }
    }
}

/// A socket that was made here, and what tells it from another one in its place.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    id: (u64, u64),
}

impl Drop for Made {
    fn drop(&mut self) {
        let removed = id_of(&self.path).and_then(|id| match id == self.id {
            true => fs::remove_file(&self.path),
            false => Ok(()),
        });
        if let Err(error) = removed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("the socket {} can't be removed: {error}", self.path.display());
        }
    }
}

fn id_of(path: &Path) -> io::Result<(u64, u64)> {
    let there = path.symlink_metadata()?;
    Ok((there.dev(), there.ino()))
}

/// Listens on the socket that systemd passed, or on one of its own.
///
/// # Errors
/// When another daemon serves, or it can't be made.
pub(super) fn listen(host: &Host, named: Option<&PathBuf>) -> Result<Listening, SocketError> {
    let state = host.state.clone();
    let lock = lock(&state).map_err(|source| SocketError::Unusable { path: state.join(LOCK), source })?;
    let lock = lock.ok_or_else(|| SocketError::Taken(state.clone()))?;
    let path = socket_of(host, named);
    let unusable = |source| SocketError::Unusable { path: path.clone(), source };
    let passed = listenfd::ListenFd::from_env().take_unix_listener(0).map_err(unusable)?;
    let (listener, made) = match passed {
        Some(passed) => (passed, None),
        None => {
            let listener = socket::listen(&path, Some(0o600)).map_err(|error| match error.cause {
                Cause::Listened => SocketError::Listened(path.clone()),
                _ => SocketError::Listen(error),
            })?;
            let id = id_of(&path).map_err(unusable)?;
            (listener, Some(Made { path: path.clone(), id }))
        }
    };
    listener.set_nonblocking(true).map_err(unusable)?;
    Ok(Listening { _made: made, listener, lock, state })
}

/// The lock of whoever serves; `None` when another has it. A daemon that has just ended may have left it for a moment to a child
/// that it made, until that has closed what it does not need.
fn lock(state: &Path) -> io::Result<Option<File>> {
    let folder = vm_files::open_folder(state, 0o755, true)?;
    // Another user could take the names in it, or move it.
    check_trusted(state, &folder.metadata()?, true).map_err(io::Error::other)?;
    let lock = flock::open(&state.join(LOCK))?;
    Ok(has_locked(&lock)?.then_some(lock))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    #[test]
    fn a_state_directory_of_another_user_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("state");
        assert!(lock(&state).expect("a directory").is_some());
        let refused = |says: &str| {
            let said = lock(&state).expect_err(says).to_string();
            assert!(said.contains(says), "{said}");
        };
        fs::set_permissions(state.join(LOCK), fs::Permissions::from_mode(0o644)).expect("a mode");
        refused("can be opened by other users");
        fs::set_permissions(&state, fs::Permissions::from_mode(0o1777)).expect("a mode");
        refused("can be written to by others");
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).expect("a mode");
        if rustix::process::geteuid().is_root() {
            chown(&state, Some(65534), None).expect("another owner");
            refused("belongs to user 65534");
        }
    }
}
