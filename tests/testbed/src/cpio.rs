//! Writes cpio archives in the `newc` format, which the Linux kernel unpacks as its initial RAM disk
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// An archive being written. Parent directories must be added before what they hold.
#[derive(Debug)]
pub struct Archive<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Adds a directory.
    ///
    /// # Errors
    /// When writing fails.
    pub fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY | 0o755, 0, &mut io::empty())
    }

    /// Adds a file with the given content.
    ///
    /// # Errors
    /// When writing fails, or the content is 4 GiB or larger.
    pub fn bytes(&mut self, name: &str, mode: u32, mut content: &[u8]) -> io::Result<()> {
        self.entry(name, REGULAR | mode, content.len() as u64, &mut content)
    }

    /// Adds a copy of a file of this machine.
    ///
    /// # Errors
    /// When reading or writing fails, or the file is 4 GiB or larger.
    pub fn file(&mut self, name: &str, mode: u32, source: &Path) -> io::Result<()> {
        let file = File::open(source)?;
        let size = file.metadata()?.len();
        self.entry(name, REGULAR | mode, size, &mut BufReader::new(file))
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// When writing fails.
    pub fn symlink(&mut self, name: &str, target: &str) -> io::Result<()> {
        self.entry(name, SYMLINK | 0o777, target.len() as u64, &mut target.as_bytes())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// When writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, 0, &mut io::empty())?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, size: u64, content: &mut dyn Read) -> io::Result<()> {
        let size = u32::try_from(size).map_err(|_| {
            io::Error::new(io::ErrorKind::FileTooLarge, format!("{name} does not fit in a cpio archive"))
        })?;
        let name_size = name.len() as u32 + 1;
        self.inode += 1;
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        write!(self.out, "070701")?;
        for field in [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0] {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + name_size)?;
        let copied = io::copy(&mut content.take(u64::from(size)), &mut self.out)?;
        if copied != u64::from(size) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{name} shrank while it was read"),
            ));
        }
        self.pad(size)
    }

    /// Fills up to a multiple of four bytes.
    fn pad(&mut self, written: u32) -> io::Result<()> {
        self.out.write_all(&[0; 3][..(written.next_multiple_of(4) - written) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_documented_layout() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("d").unwrap();
        archive.bytes("d/f", 0o644, b"hello").unwrap();
        archive.symlink("l", "d/f").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        // Header of the second entry: the first one is 110 + 2 bytes.
        let second = &bytes[112..];
        assert_eq!(&second[..6], b"070701");
        assert_eq!(&second[14..22], b"000081A4", "mode");
        assert_eq!(&second[54..62], b"00000005", "size");
        assert_eq!(&second[94..102], b"00000004", "name size");
        assert_eq!(&second[110..114], b"d/f\0");
        assert_eq!(&second[116..121], b"hello", "data starts at a multiple of four from the header");
        let third = &second[124..];
        assert_eq!(&third[..6], b"070701");
        assert_eq!(&third[112..115], b"d/f");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }

    #[test]
    fn a_file_that_does_not_fit_is_refused() {
        let error = Archive::new(io::sink()).entry("big", REGULAR, 1 << 32, &mut io::empty()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
