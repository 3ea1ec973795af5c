//! The directory of one function in sysfs, and its attributes, read with as few system calls as can be.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Access, AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::config::ConfigSource;

/// Room for the longest attribute that is read: a `uevent`, or the seven lines of `resource` that matter.
pub(super) type Buffer = [u8; 1024];

/// An open directory of a function.
///
/// Once the Linux kernel has removed the function, every look-up in the directory fails, even when another
/// function has come to the same address: what is read through one value is all of one function.
#[derive(Debug)]
pub(super) struct Attributes {
    dir: OwnedFd,
}

impl Attributes {
    /// Opens the directory `name` in `parent`.
    pub(super) fn open(parent: impl AsFd, name: &str) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: rustix::fs::openat(parent, name, flags, Mode::empty())? })
    }

    fn open_attribute(&self, name: &str) -> Result<OwnedFd, Errno> {
        // A FIFO in its place, as a captured tree may have, is not waited for.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, name, flags, Mode::empty())
    }

    /// Text of the attribute `name`; `None` when there is none, or it can't say: of a function that was pulled out, and is
    /// still there for whoever has it open, the state of the link is an error.
    pub(super) fn read<'b>(&self, name: &str, buffer: &'b mut Buffer) -> Result<Option<&'b [u8]>, Errno> {
        let file = match self.open_attribute(name) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        match rustix::io::read(&file, &mut buffer[..]) {
            Ok(len) => Ok(Some(&buffer[..len])),
            Err(error) if is_gone(error) || matches!(error, Errno::INVAL | Errno::IO | Errno::AGAIN) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The last part of the link `name`'s target; `None` when there is no such link.
    pub(super) fn link<'b>(&self, name: &str, buffer: &'b mut Buffer) -> Result<Option<&'b str>, Errno> {
        let target = match link_target(&self.dir, name, buffer) {
            Err(Errno::NOENT) => None,
            target => target?,
        };
        Ok(target.and_then(|target| target.rsplit('/').next()).filter(|name| !name.is_empty()))
    }

    /// Whether there is an entry `name`.
    pub(super) fn has(&self, name: &str) -> bool {
        rustix::fs::accessat(&self.dir, name, Access::EXISTS, AtFlags::empty()).is_ok()
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

/// The target of the link `name` in `dir`; `None` when it is not a link.
pub(super) fn link_target<'b>(
    dir: impl AsFd,
    name: &str,
    buffer: &'b mut Buffer,
) -> Result<Option<&'b str>, Errno> {
    match rustix::fs::readlinkat_raw(dir, name, &mut buffer[..]) {
        Ok(len) => Ok(std::str::from_utf8(&buffer[..len]).ok()),
        Err(Errno::INVAL) => Ok(None),
        Err(error) => Err(error),
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
