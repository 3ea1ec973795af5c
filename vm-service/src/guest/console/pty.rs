//! A pseudo-terminal, for a terminal program to open while the guest runs, and again later.
//!
//! Nobody having it open is like a serial line without a cable: what the guest writes meanwhile is dropped, so that it need not
//! wait. The Linux kernel shows that as a hangup, once the terminal's side was opened and closed for the first time.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags, readlinkat, symlinkat, unlinkat};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use vm_files::Entry;

use crate::os::flock::PathLock;

/// The guest's side of a pseudo-terminal. A slow reader makes writing to it [block](io::ErrorKind::WouldBlock), an absent one
/// does not.
#[derive(Debug)]
pub struct Pty {
    controller: OwnedFd,
}

impl Pty {
    /// Makes a pseudo-terminal in raw mode, and answers its guest's side and the path to open, as in `/dev/pts/3`.
    ///
    /// # Errors
    /// When there are no descriptors or pseudo-terminals left.
    pub fn open() -> io::Result<(Self, PathBuf)> {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&controller)?;
        let name = ptsname(&controller, Vec::new())?.into_string().map_err(io::Error::other)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = rustix::fs::open(&name, flags, Mode::empty())?;
        let mut raw = tcgetattr(&terminal)?;
        raw.make_raw();
        tcsetattr(&terminal, OptionalActions::Now, &raw)?;
        rustix::io::ioctl_fionbio(&controller, true)?;
        Ok((Self { controller }, name.into()))
    }
}

impl AsFd for Pty {
    /// To read what is typed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.controller.as_fd()
    }
}

impl Write for Pty {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut files = [PollFd::new(&self.controller, PollFlags::OUT)];
        poll(&mut files, Some(&Timespec::default()))?;
        if files[0].revents().contains(PollFlags::HUP) {
            return Ok(data.len());
        }
        Ok(rustix::io::write(&self.controller, data)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A symbolic link to a pseudo-terminal, whose own name differs each time. Dropping it removes it, unless somebody replaced it.
#[derive(Debug)]
pub struct Link {
    path: PathBuf,
    at: Entry,
    terminal: PathBuf,
}

impl Link {
    /// Makes the link, in the place of one that a killed process left. Its pseudo-terminal is gone, or is the one that `terminal`
    /// has got the name of since.
    ///
    /// # Errors
    /// When something else is there, as a link to a pseudo-terminal that somebody has, or no link can be made.
    pub fn new(terminal: &Path, path: &Path) -> io::Result<Self> {
        let at = vm_files::entry(path)?;
        // Only the holder of the lock removes a stale link: another guest may have replaced it since it was found stale.
        let lock = is_stale(&at, terminal)?.then(|| PathLock::take(path)).transpose()?;
        if lock.is_some() && is_stale(&at, terminal)? {
            unlinkat(&at.folder, &at.name, AtFlags::empty())?;
        }
        symlinkat(terminal, &at.folder, &at.name)?;
        Ok(Self { path: path.into(), at, terminal: terminal.into() })
    }
}

/// Returns the target of a link; `None` if there is no link.
fn target(at: &Entry) -> Option<PathBuf> {
    let target = readlinkat(&at.folder, &at.name, Vec::new()).ok()?;
    Some(OsString::from_vec(target.into_bytes()).into())
}

/// Whether a path is a link to a pseudo-terminal that is gone, or is `terminal`.
///
/// # Errors
/// When another process has that pseudo-terminal.
fn is_stale(at: &Entry, terminal: &Path) -> io::Result<bool> {
    let Some(target) = target(at) else { return Ok(false) };
    if target != terminal && target.starts_with("/dev/pts") && target.try_exists()? {
        let reason = format!("it leads to {}, which is in use", target.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
    }
    Ok(target.starts_with("/dev/pts"))
}

impl Drop for Link {
    fn drop(&mut self) {
        let is_ours = target(&self.at).is_some_and(|target| target == self.terminal);
        if is_ours && let Err(error) = unlinkat(&self.at.folder, &self.at.name, AtFlags::empty()) {
            tracing::warn!("the link {} to the console can't be removed: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_link_replaces_only_what_an_earlier_one_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("console");
        for gone in ["/dev/pts/none", "/dev/pts/1"] {
            std::mem::forget(Link::new(Path::new(gone), &path).expect("a link"));
        }
        drop(Link::new(Path::new("/dev/pts/1"), &path).expect("a link"));
        assert!(path.symlink_metadata().is_err(), "it is gone");
        let replaced = Link::new(Path::new("/dev/pts/1"), &path).expect("a link");
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "precious").expect("written");
        drop(replaced);
        let refused = Link::new(Path::new("/dev/pts/1"), &path).expect_err("a file is there");
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).expect("a file"), b"precious");
        let live = folder.path().join("live");
        let (_pty, terminal) = Pty::open().expect("a pseudo-terminal");
        let _link = Link::new(&terminal, &live).expect("a link");
        let refused = Link::new(Path::new("/dev/pts/none"), &live).expect_err("a guest has it");
        assert!(refused.to_string().contains("which is in use"), "{refused}");
        assert_eq!(fs::read_link(&live).expect("a link"), terminal);
        // Any user who can read the directory can lock it.
        let directory = fs::File::open(folder.path()).expect("the directory");
        rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockShared).expect("locked");
        let stale = folder.path().join("stale");
        std::os::unix::fs::symlink("/dev/pts/none", &stale).expect("a link");
        drop(Link::new(&terminal, &stale).expect("in the place of a stale one"));
    }

    #[test]
    fn of_two_that_replace_a_link_at_once_one_has_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = &folder.path().join("console");
        let terminals = [(); 2].map(|()| Pty::open().expect("a pseudo-terminal"));
        let begin = &std::sync::Barrier::new(2);
        for _ in 0..500 {
            std::mem::forget(Link::new(Path::new("/dev/pts/none"), path).expect("a link"));
            let links: Vec<_> = std::thread::scope(|scope| {
                let racers = terminals.each_ref().map(|(_, terminal)| {
                    scope.spawn(move || {
                        begin.wait();
                        Link::new(terminal, path)
                    })
                });
                racers.into_iter().flat_map(|racer| racer.join().expect("no panic")).collect()
            });
            let [link] = links.as_slice() else { panic!("{} have it", links.len()) };
            assert_eq!(fs::read_link(path).expect("a link"), link.terminal);
        }
    }
}
