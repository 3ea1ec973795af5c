//! Reads small files and links of sysfs and procfs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// More than any file that is read here has on a healthy host.
const MOST_BYTES: u64 = 16 << 20;

/// Opens a file for reading. A FIFO in its place, as a captured tree may have, is not waited for.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// Text of a file, `None` when there is none or its device is gone. What is not UTF-8 is replaced.
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    let read = || {
        let mut bytes = Vec::new();
        open(path)?.take(MOST_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    Ok(present(read())?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

/// As [`read`], without the white space around; `None` also when it can't be read.
pub(crate) fn read_trimmed(path: &Path) -> Option<String> {
    Some(read(path).ok()??.trim().to_owned())
}

/// Names in a directory, sorted; none when there is no such directory.
pub(crate) fn names(path: &Path) -> io::Result<Vec<String>> {
    let Some(entries) = present(fs::read_dir(path))? else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        let Some(entry) = present(entry)? else { continue };
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Last part of a link's target, `None` when it is not a link.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Turns the errors that mean "not there" into `None`.
fn present<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.kind() == io::ErrorKind::NotADirectory
                || matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
