//! Resolves paths, one component at a time.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat, fstat, fstatfs, mkdirat, openat, readlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::Entry;

/// Links that are followed in one path, as many as Linux follows.
const LINKS: u32 = 40;
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Where a path leads.
pub(crate) enum Place {
    /// To this, which was no link, or absent.
    Named(Entry),
    /// To a link of procfs, as `/dev/stdout` does. Only the kernel can follow it.
    Descriptor(Entry),
}

/// The kinds of path components other than directories.
enum Node {
    /// A link, whose target the walk goes on to.
    Link,
    /// A link of procfs.
    Descriptor,
    /// No link.
    Other,
}

struct Walk {
    /// The directories from the start of the walk to where it is. `..` returns to the one before, even if another user
    /// has moved the last one meanwhile.
    folders: Vec<OwnedFd>,
    /// The components that are left, the next one last.
    rest: Vec<OsString>,
    links: u32,
    /// Where the walk is, for messages.
    path: PathBuf,
}

/// Resolves a path up to its last component.
pub(crate) fn entry(path: &Path) -> io::Result<Entry> {
    let mut walk = Walk::begin(path)?;
    loop {
        let name = walk.next()?;
        match walk.rest.is_empty() && name != ".." {
            true => return walk.end(name),
            false => walk.enter(&name)?,
        }
    }
}

/// Resolves a path, and the link that its last component is.
pub(crate) fn follow(path: &Path) -> io::Result<Place> {
    let mut walk = Walk::begin(path)?;
    loop {
        let name = walk.next()?;
        if !walk.rest.is_empty() || name == ".." {
            walk.enter(&name)?;
            continue;
        }
        match walk.read(&name) {
            Ok(Node::Link) => {}
            Ok(Node::Descriptor) => return Ok(Place::Descriptor(walk.end(name)?)),
            Err(error) if error.raw_os_error() != Some(Errno::NOENT.raw_os_error()) => return Err(error),
            Ok(Node::Other) | Err(_) => return Ok(Place::Named(walk.end(name)?)),
        }
    }
}

/// Opens a directory, and creates a missing one.
pub(crate) fn make_folder(path: &Path, mode: Mode, parents: bool) -> io::Result<OwnedFd> {
    let mut walk = Walk::begin(path)?;
    while let Some(name) = walk.rest.pop() {
        let is_last = walk.rest.is_empty();
        let mut entered = walk.enter_or_link(&name);
        if entered == Err(Errno::NOENT) && (is_last || parents) {
            match mkdirat(walk.folder()?, &name, mode) {
                Ok(()) | Err(Errno::EXIST) => entered = walk.enter_or_link(&name),
                Err(error) => return Err(error.into()),
            }
        }
        match entered {
            Err(Errno::NOTDIR | Errno::LOOP) if !is_last => walk.enter(&name)?,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let is_link = !matches!(walk.read(&name)?, Node::Other);
                return Err(if is_link {
                    io::Error::other("it is a symbolic link")
                } else {
                    Errno::NOTDIR.into()
                });
            }
            entered => entered?,
        }
    }
    walk.folders.pop().ok_or(Errno::NOENT.into())
}

impl Walk {
    fn begin(path: &Path) -> io::Result<Self> {
        let mut walk = Self { folders: Vec::new(), rest: Vec::new(), links: 0, path: PathBuf::new() };
        if path.is_relative() {
            if path.as_os_str().is_empty() {
                return Err(Errno::NOENT.into());
            }
            walk.folders.push(openat(CWD, ".", FOLDER, Mode::empty())?);
        }
        walk.push(path)?;
        Ok(walk)
    }

    /// Goes on with a path, before the components that are left.
    fn push(&mut self, path: &Path) -> io::Result<()> {
        if path.is_absolute() {
            self.folders = vec![openat(CWD, "/", FOLDER, Mode::empty())?];
            self.path = "/".into();
        }
        self.rest.extend(path.components().rev().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        }));
        Ok(())
    }

    /// Returns the next component, which is `.` at the end of a path without a name.
    fn next(&mut self) -> io::Result<OsString> {
        Ok(self.rest.pop().unwrap_or_else(|| ".".into()))
    }

    fn folder(&self) -> io::Result<&OwnedFd> {
        self.folders.last().ok_or(Errno::NOENT.into())
    }

    fn end(mut self, name: OsString) -> io::Result<Entry> {
        Ok(Entry { folder: self.folders.pop().ok_or(Errno::NOENT)?, name })
    }

    /// Enters a directory. The error is `NOTDIR` or `LOOP` if it is a link.
    fn enter_or_link(&mut self, name: &OsStr) -> Result<(), Errno> {
        match name == ".." && self.folders.len() > 1 {
            true => drop(self.folders.pop()),
            false => {
                let from = self.folders.last().ok_or(Errno::NOENT)?;
                let folder = openat(from, name, FOLDER | OFlags::NOFOLLOW, Mode::empty())?;
                if name == ".." {
                    self.folders.clear();
                }
                self.folders.push(folder);
            }
        }
        self.path.push(name);
        Ok(())
    }

    /// Enters a directory, or goes on to a link's target.
    fn enter(&mut self, name: &OsStr) -> io::Result<()> {
        match self.enter_or_link(name) {
            Err(Errno::NOTDIR | Errno::LOOP) => match self.read(name)? {
                Node::Link => Ok(()),
                Node::Other => Err(Errno::NOTDIR.into()),
                Node::Descriptor => {
                    self.folders = vec![openat(self.folder()?, name, FOLDER, Mode::empty())?];
                    self.path.push(name);
                    Ok(())
                }
            },
            entered => Ok(entered?),
        }
    }

    /// Checks what a component is, and goes on to the target of a link.
    fn read(&mut self, name: &OsStr) -> io::Result<Node> {
        let folder = self.folder()?;
        let node = openat(folder, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let data = fstat(&node)?;
        let is_link = FileType::from_raw_mode(data.st_mode) == FileType::Symlink;
        if is_link && fstatfs(&node)?.f_type == PROC_SUPER_MAGIC {
            return Ok(Node::Descriptor);
        }
        check_node(&self.path.join(name), &data)?;
        if !is_link {
            return Ok(Node::Other);
        }
        self.links += 1;
        if self.links > LINKS {
            return Err(Errno::LOOP.into());
        }
        let target = OsString::from_vec(readlinkat(&node, "", Vec::new())?.into_bytes());
        self.push(Path::new(&target))?;
        Ok(Node::Link)
    }
}

/// Checks that root or the operator owns a link or a FIFO: any user can create these.
pub(crate) fn check_node(path: &Path, data: &Stat) -> io::Result<()> {
    let what = match FileType::from_raw_mode(data.st_mode) {
        FileType::Symlink => "link",
        FileType::Fifo => "FIFO",
        _ => return Ok(()),
    };
    if data.st_uid == 0 || data.st_uid == geteuid().as_raw() {
        return Ok(());
    }
    let what = format!("{} is a {what} that the user {} made; remove it", path.display(), data.st_uid);
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}
