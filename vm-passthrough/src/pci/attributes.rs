//! The directory of one function in sysfs, and its attributes, read with as few system calls as can be.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{Access, AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::config::ConfigSource;

/// An open directory of a function.
///
/// Once the Linux kernel has removed the function, every look-up in the directory fails, even when another
/// function has come to the same address: what is read through one value is all of one function.
///
/// One that is only [`below`](Self::below) another directory is looked up by its path each time.
#[derive(Debug)]
pub(super) struct Attributes<'a> {
    dir: Dir<'a>,
}

#[derive(Debug)]
enum Dir<'a> {
    Open(OwnedFd),
    Kept(Arc<KeptDir>),
    Below(&'a OwnedFd, &'a [u8]),
}

/// How many directories may be kept open at once.
#[derive(Debug)]
pub(super) struct Budget {
    kept: AtomicUsize,
    limit: fn() -> usize,
}

impl Budget {
    /// Of this process: half of the files that it may open (`ulimit -n`); the other half is for the rest of it.
    pub(super) fn of_process() -> &'static Self {
        fn half() -> usize {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            limit.map_or(usize::MAX, |limit| usize::try_from(limit / 2).unwrap_or(usize::MAX))
        }
        static BUDGET: Budget = Budget::new(half);
        &BUDGET
    }

    const fn new(limit: fn() -> usize) -> Self {
        Self { kept: AtomicUsize::new(0), limit }
    }

    fn take(&self) -> bool {
        let limit = (self.limit)();
        let more = |kept: usize| (kept < limit).then_some(kept + 1);
        self.kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }
}

/// A directory that stays open.
#[derive(Debug)]
pub(super) struct KeptDir {
    dir: OwnedFd,
    budget: &'static Budget,
}

impl Drop for KeptDir {
    fn drop(&mut self) {
        self.budget.kept.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Room for an address, a `/` and the name of an attribute.
const PATH_SIZE: usize = 64;

/// Room for the longest attribute that is read: a `uevent`, or the seven lines of `resource` that matter.
const TEXT_SIZE: usize = 1024;

/// Text of an attribute.
pub(super) struct Text {
    bytes: [u8; TEXT_SIZE],
    len: usize,
}

impl Text {
    /// Room for one.
    pub(super) fn new() -> Self {
        Self { bytes: [0; TEXT_SIZE], len: 0 }
    }

    /// The target of the link `name` in `dir`; `None` when it is not a link.
    pub(super) fn link_target(&mut self, dir: impl AsFd, name: &[u8]) -> Result<Option<&str>, Errno> {
        self.read_link(dir, name)?;
        Ok(std::str::from_utf8(self.bytes()).ok())
    }

    /// Reads the target of a link; nothing when it is not a link.
    fn read_link(&mut self, dir: impl AsFd, name: &[u8]) -> Result<(), Errno> {
        self.len = 0;
        match rustix::fs::readlinkat_raw(dir, name, &mut self.bytes[..]) {
            Ok(len) => self.len = len,
            Err(Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What was read last.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Which directory it is: one that is made later at the same place differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, u64),
}

impl<'a> Attributes<'a> {
    /// Opens the directory `name` in `parent`.
    pub(super) fn open(parent: impl AsFd, name: &[u8]) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: Dir::Open(rustix::fs::openat(parent, name, flags, Mode::empty())?) })
    }

    /// A directory that was kept open.
    pub(super) fn kept(dir: Arc<KeptDir>) -> Self {
        Self { dir: Dir::Kept(dir) }
    }

    /// The directory, to be kept open if the budget allows.
    pub(super) fn keep(self, budget: &'static Budget) -> Option<Arc<KeptDir>> {
        match self.dir {
            Dir::Open(dir) => budget.take().then(|| Arc::new(KeptDir { dir, budget })),
            Dir::Kept(dir) => Some(dir),
            Dir::Below(..) => None,
        }
    }

    /// The directory `name` in `parent`, not opened: for a few attributes that is less work, and for a function that
    /// is known to stay.
    pub(super) fn below(parent: &'a OwnedFd, name: &'a [u8]) -> Self {
        Self { dir: Dir::Below(parent, name) }
    }

    /// Calls `act` with the directory and path that lead to the attribute `name`.
    fn at<T>(
        &self,
        name: &str,
        act: impl FnOnce(BorrowedFd<'_>, &[u8]) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match &self.dir {
            Dir::Open(dir) => act(dir.as_fd(), name.as_bytes()),
            Dir::Kept(kept) => act(kept.dir.as_fd(), name.as_bytes()),
            Dir::Below(parent, dir) => {
                let mut path = [0; PATH_SIZE];
                let len = dir.len() + 1 + name.len();
                let (Some(start), true) = (path.get_mut(..=dir.len()), len <= PATH_SIZE) else {
                    return Err(Errno::NAMETOOLONG);
                };
                start[..dir.len()].copy_from_slice(dir);
                start[dir.len()] = b'/';
                path[dir.len() + 1..len].copy_from_slice(name.as_bytes());
                act(parent.as_fd(), &path[..len])
            }
        }
    }

    fn open_attribute(&self, name: &str) -> Result<OwnedFd, Errno> {
        self.at(name, |dir, path| {
            // A FIFO in its place, as a captured tree may have, is not waited for.
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::openat(dir, path, flags, Mode::empty())
        })
    }

    /// Which directory it is.
    ///
    /// In sysfs the inode number is the node's 64-bit ID, which the Linux kernel gives out once per boot. Where
    /// the file system reuses numbers the time of change tells the two apart.
    pub(super) fn identity(&self) -> Result<Identity, Errno> {
        let stat = match &self.dir {
            Dir::Open(dir) => rustix::fs::fstat(dir)?,
            Dir::Kept(kept) => rustix::fs::fstat(&kept.dir)?,
            Dir::Below(parent, name) => rustix::fs::statat(parent, *name, AtFlags::empty())?,
        };
        Ok(Identity { device: stat.st_dev, inode: stat.st_ino, changed: (stat.st_ctime, stat.st_ctime_nsec) })
    }

    /// Reads the attribute `name` into `text`; `false` when there is none, or nothing to tell: of a function that was pulled out,
    /// and is still there for whoever has it open, the state of the link is an error.
    pub(super) fn read(&self, name: &str, text: &mut Text) -> Result<bool, Errno> {
        text.len = 0;
        let file = match self.open_attribute(name) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(error),
        };
        match rustix::io::read(&file, &mut text.bytes) {
            Ok(len) => {
                text.len = len;
                Ok(true)
            }
            Err(error) if is_gone(error) || matches!(error, Errno::INVAL | Errno::IO | Errno::AGAIN) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The last part of the link `name`'s target; `None` when there is no such link.
    pub(super) fn link<'t>(&self, name: &str, text: &'t mut Text) -> Result<Option<&'t str>, Errno> {
        match self.at(name, |dir, path| text.read_link(dir, path)) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let target = std::str::from_utf8(text.bytes()).ok();
        Ok(target.and_then(|target| target.rsplit('/').next()).filter(|name| !name.is_empty()))
    }

    /// Whether there is an entry `name`.
    pub(super) fn has(&self, name: &str) -> bool {
        self.at(name, |dir, path| rustix::fs::accessat(dir, path, Access::EXISTS, AtFlags::empty())).is_ok()
    }

    /// How many virtual functions are enabled, of at most `total`: Linux links them as `virtfn0`, `virtfn1` … without
    /// gaps. Reading `sriov_numvfs` would wait for the function's lock.
    pub(super) fn enabled_vfs(&self, total: u16) -> u16 {
        let (mut there, mut missing) = (0, total);
        // The first question is for the first, as most often there is none.
        let mut next = 0;
        while there < missing {
            if self.has(&format!("virtfn{next}")) {
                there = next + 1;
            } else {
                missing = next;
            }
            next = there + (missing - there) / 2;
        }
        there
    }

    /// Opens config space; `None` when it can't be.
    pub(super) fn config(&self) -> Result<Option<ConfigFile>, Errno> {
        match self.open_attribute("config") {
            Ok(file) => Ok(Some(ConfigFile { file })),
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Whether the error says that the function is no longer there.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NODEV | Errno::NXIO)
}

/// The file `config`.
#[derive(Debug)]
pub(super) struct ConfigFile {
    file: OwnedFd,
}

impl ConfigSource for ConfigFile {
    fn read(&self, offset: usize, data: &mut [u8]) -> usize {
        rustix::io::pread(&self.file, data, offset as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_directories_are_kept_open_than_allowed() {
        static TWO: Budget = Budget::new(|| 2);
        let keep = || Attributes::open(rustix::fs::CWD, b"/").unwrap().keep(&TWO);
        let (first, second) = (keep(), keep());
        assert!(first.is_some() && second.is_some() && keep().is_none());
        drop(first);
        assert!(keep().is_some());
    }
}
