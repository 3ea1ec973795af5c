//! Opens and reads files that a user names.
//!
//! A path may name a FIFO, whose `open` blocks until a writer comes, or a device, whose content has no end. These functions accept regular
//! files only and never block on another process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens a regular file for reading.
///
/// # Errors
/// Those of `open`; that it is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Opens a regular file with the access of `options`, whose custom flags are replaced.
///
/// # Errors
/// As [`open`].
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32).open(path);
    let refused = || io::Error::other("not a regular file");
    match file {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(refused()),
        // Of a socket; of a FIFO without a reader, for writing.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NXIO) => Err(refused()),
        Err(error) => Err(error),
    }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open`]; those of `read`; that it is larger.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("larger than {limit} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), b"text").expect("written");
        std::os::unix::fs::symlink("file", path("link")).expect("a link");
        assert!(Command::new("mkfifo").arg(path("fifo")).status().expect("mkfifo").success());
        let _listener = UnixListener::bind(path("socket")).expect("a socket");

        for name in ["file", "link"] {
            assert_eq!(read(&path(name), 4).expect("it fits"), b"text");
        }
        assert_eq!(read(&path("file"), 3).expect_err("it does not fit").to_string(), "larger than 3 bytes");
        for special in [path("fifo"), path("socket"), folder.path().into(), "/dev/zero".into()] {
            let error = read(&special, 4).expect_err("not a file");
            assert_eq!(error.to_string(), "not a regular file", "{}", special.display());
        }
        let writable = open_with(OpenOptions::new().read(true).write(true), &path("fifo"));
        assert_eq!(writable.expect_err("not a file").to_string(), "not a regular file");
        assert_eq!(read(&path("none"), 4).expect_err("nothing").kind(), io::ErrorKind::NotFound);
    }
}
