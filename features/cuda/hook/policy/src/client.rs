//! The way to a program's socket, for who asks it and for who makes it: the directories, which are the user's alone.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use thiserror::Error;

use crate::control::{self, Refused};

/// Why a program can't be asked.
#[derive(Debug, Error)]
pub enum Unreachable {
    /// It has no socket.
    #[error("process {pid} has no socket at {}: it runs without the hook, under another user, or has not called cuInit", list(.tried))]
    None {
        /// The process.
        pid: u32,
        /// Where one could be.
        tried: Vec<PathBuf>,
    },
    /// The directory is not safe.
    #[error("{} is not used: {why}", folder.display())]
    Folder {
        /// The directory.
        folder: PathBuf,
        /// What is wrong with it.
        why: Refused,
    },
    /// The process has ended, and its socket was removed.
    #[error("process {0} has ended")]
    Ended(u32),
    /// The system refuses.
    #[error("can't connect to {}: {source}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or ")
}

/// The directories of this user's sockets.
pub fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    control::folders(runtime.as_deref(), geteuid().as_raw())
}

/// Opens a directory, and checks that it is this user's alone.
///
/// # Errors
/// What is wrong with it; the system's.
pub fn check(folder: &Path) -> io::Result<File> {
    // The open descriptor is checked, so that no link can take the path in between.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(open(folder, flags, Mode::empty())?);
    let of = file.metadata()?;
    control::is_private(of.is_dir(), of.uid(), of.mode() & 0o7777, geteuid().as_raw())
        .map_err(io::Error::other)?;
    Ok(file)
}

/// Makes a directory for sockets, if there is none, then opens and checks it.
///
/// # Errors
/// As [`check`].
pub fn prepare(folder: &Path) -> io::Result<File> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => check(folder),
    }
}

/// The path of a file in an open directory, whatever its own path leads to by now.
pub fn within(folder: &File, name: impl AsRef<Path>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Removes a stale socket, and returns whether it did. Never removes anything but a socket.
pub fn remove_stale(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
        && reach(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        && std::fs::remove_file(path).is_ok()
}

/// Connects to a socket at once, or not at all.
///
/// # Errors
/// The system's.
pub fn reach(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Connects to a program.
///
/// # Errors
/// [`Unreachable`].
pub fn program(pid: u32) -> Result<UnixStream, Unreachable> {
    let tried: Vec<PathBuf> = folders().iter().map(|folder| control::socket(folder, pid)).collect();
    for socket in &tried {
        if std::fs::symlink_metadata(socket).is_err() {
            continue;
        }
        if let Some(folder) = socket.parent()
            && let Err(error) = check(folder)
        {
            let why = error.downcast::<Refused>().unwrap_or(Refused::NoDirectory);
            return Err(Unreachable::Folder { folder: folder.into(), why });
        }
        return match reach(socket) {
            Ok(stream) => Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // Nobody has it open any more. Who can't remove it has said what counts.
                remove_stale(socket);
                Err(Unreachable::Ended(pid))
            }
            Err(source) => Err(Unreachable::Connect { socket: socket.clone(), source }),
        };
    }
    Err(Unreachable::None { pid, tried })
}
