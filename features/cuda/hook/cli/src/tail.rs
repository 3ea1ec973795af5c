//! A file that grows: what is new of it, also once another has taken its name or it was emptied.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// What is read at once; the rest is for the next time.
const MOST: u64 = 16 << 20;

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Bytes of the file.
    More,
    /// What follows is a file's beginning.
    Restarted,
    /// There is no more yet.
    Nothing,
}

/// Reads a file as it grows.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    file: File,
    position: u64,
}

impl Tail {
    /// Opens it, at its beginning.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // A pipe would be waited for without end.
        if !path.metadata()?.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        Ok(Self { path: path.into(), file: File::open(path)?, position: 0 })
    }

    /// Reads what is new.
    ///
    /// # Errors
    /// The system's; a file whose name is gone is read on.
    pub(crate) fn read(&mut self, each: &mut dyn FnMut(&[u8])) -> io::Result<News> {
        let mut chunk = vec![0; 256 << 10];
        let mut read = 0;
        while read < MOST {
            match self.file.read(&mut chunk) {
                Ok(0) => break,
                Ok(more) => {
                    each(&chunk[..more]);
                    read += more as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.position += read;
        if read != 0 {
            return Ok(News::More);
        }
        let own = self.file.metadata()?;
        if own.len() < self.position {
            self.position = self.file.seek(SeekFrom::Start(0))?;
            return Ok(News::Restarted);
        }
        match self.path.metadata() {
            Ok(other) if (other.dev(), other.ino()) != (own.dev(), own.ino()) => {
                *self = Self::open(&self.path)?;
                Ok(News::Restarted)
            }
            _ => Ok(News::Nothing),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write as _;

    use super::*;

    #[test]
    fn nothing_of_it_is_missed_or_read_twice() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let append = |text: &str| {
            let mut file = OpenOptions::new().append(true).create(true).open(&path).expect("a file");
            file.write_all(text.as_bytes()).expect("written");
        };
        append("one");
        let mut tail = Tail::open(&path).expect("the file");
        let mut check = |news: &[News], text: &str| {
            let (mut read, mut all) = (Vec::new(), Vec::new());
            for _ in news {
                read.push(tail.read(&mut |bytes| all.extend_from_slice(bytes)).expect("read"));
            }
            assert_eq!((&read[..], String::from_utf8_lossy(&all).as_ref()), (news, text));
        };
        use News::{More, Nothing, Restarted};
        check(&[More, Nothing, Nothing], "one");
        append("two");
        check(&[More, Nothing], "two");
        // It is emptied, and written again.
        fs::write(&path, "3").expect("written");
        check(&[Restarted, More, Nothing], "3");
        // Its name is gone, then another's; the rest of the old one is read first.
        fs::rename(&path, folder.path().join("log.1")).expect("renamed");
        check(&[Nothing], "");
        OpenOptions::new()
            .append(true)
            .open(folder.path().join("log.1"))
            .expect("it")
            .write_all(b"4")
            .expect("written");
        append("five");
        check(&[More, Restarted, More, Nothing], "4five");
    }
}
