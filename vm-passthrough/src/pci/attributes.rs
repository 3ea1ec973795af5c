//! The directory of one function in sysfs, and its attributes, read with as few system calls as can be.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::config::ConfigSource;

/// An open directory of a function.
///
/// Once the Linux kernel has removed the function, every look-up in the directory fails, even when another
/// function has come to the same address: what is read through one value is all of one function.
#[derive(Debug)]
pub(super) struct Attributes {
    dir: OwnedFd,
}

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
        match rustix::fs::readlinkat_raw(dir, name, &mut self.bytes[..]) {
            Ok(len) => Ok(std::str::from_utf8(&self.bytes[..len]).ok()),
            Err(Errno::INVAL) => Ok(None),
            Err(error) => Err(error),
        }
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

impl Attributes {
    /// Opens the directory `name` in `parent`.
    pub(super) fn open(parent: impl AsFd, name: &[u8]) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: rustix::fs::openat(parent, name, flags, Mode::empty())? })
    }

    /// Which directory it is.
    ///
    /// In sysfs the inode number is the node's 64-bit ID, which the Linux kernel gives out once per boot. Where
    /// the file system reuses numbers the time of change tells the two apart.
    pub(super) fn identity(&self) -> Result<Identity, Errno> {
        let stat = rustix::fs::fstat(&self.dir)?;
        Ok(Identity { device: stat.st_dev, inode: stat.st_ino, changed: (stat.st_ctime, stat.st_ctime_nsec) })
    }

    /// Reads the attribute `name` into `text`; `false` when there is none.
    pub(super) fn read(&self, name: &str, text: &mut Text) -> Result<bool, Errno> {
        text.len = 0;
        let file = match rustix::fs::openat(&self.dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(error),
        };
        match rustix::io::read(&file, &mut text.bytes) {
            Ok(len) => {
                text.len = len;
                Ok(true)
            }
            Err(error) if is_gone(error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The last part of the link `name`'s target; `None` when there is no such link.
    pub(super) fn link<'a>(&self, name: &str, text: &'a mut Text) -> Result<Option<&'a str>, Errno> {
        let target = match text.link_target(&self.dir, name.as_bytes()) {
            Ok(target) => target,
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error),
        };
        Ok(target.and_then(|target| target.rsplit('/').next()))
    }

    /// Whether there is an entry `name`.
    pub(super) fn has(&self, name: &str) -> bool {
        rustix::fs::accessat(&self.dir, name, rustix::fs::Access::EXISTS, rustix::fs::AtFlags::empty())
            .is_ok()
    }

    /// Opens config space; `None` when it can't be.
    pub(super) fn config(&self) -> Result<Option<ConfigFile>, Errno> {
        match rustix::fs::openat(&self.dir, "config", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
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
