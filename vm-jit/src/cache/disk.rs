//! Entries as files.
//!
//! ```text
//! file = "vm-jit cache 1\n"  key (32 bytes)  length: u64le  SHA-256 of what follows (32 bytes)  the bytes
//! ```
//!
//! What is found is run. The folder may be another user's (root's `HOME` may be, behind `sudo`), so a file is read only if this
//! user or root owns it and nobody else may write to it.

use super::Key;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder, File, FileTimes, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

const MAGIC: &[u8; 15] = b"vm-jit cache 1\n";
const HEAD: u64 = 15 + 32 + 8 + 32;
/// No entry is larger.
const LARGEST: u64 = 1 << 30;
/// Opens neither a link nor a pipe that someone put there.
const NO_LINK: i32 = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits() as i32;
const SUFFIX: &str = "entry";
/// A file that a process was writing when it died is removed after so long.
const ABANDONED: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(super) struct Disk {
    folder: PathBuf,
    limit: u64,
    /// Bytes written since the files were last counted.
    written: AtomicU64,
}

pub(super) enum Read {
    Found(Vec<u8>),
    Absent,
    Damaged,
}

impl Disk {
    pub(super) fn open(folder: &Path, limit: u64) -> io::Result<Disk> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // The first write counts what is there.
        Ok(Disk { folder: folder.to_owned(), limit, written: AtomicU64::new(u64::MAX / 2) })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{key}.{SUFFIX}"))
    }

    pub(super) fn read(&self, key: &Key) -> Read {
        let path = self.path(key);
        let file = match OpenOptions::new().read(true).custom_flags(NO_LINK).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Read::Absent,
            Err(error) => return self.discard(key, &error.to_string()),
        };
        // What is found is run, and its checksum anybody can make.
        if !file.metadata().is_ok_and(|data| is_own(&data)) {
            let path = path.display();
            tracing::warn!(%path, "a cache entry that another user could have written is not used; remove it");
            return Read::Absent;
        }
        match contents(&file, key, self.limit.min(LARGEST)) {
            Ok(bytes) => {
                // The time of the last use, for the choice of what goes first.
                let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
                Read::Found(bytes)
            }
            Err(what) => self.discard(key, &what),
        }
    }

    fn discard(&self, key: &Key, what: &str) -> Read {
        tracing::warn!(%key, what, folder = %self.folder.display(), "a damaged cache entry is removed");
        self.remove(key);
        Read::Damaged
    }

    pub(super) fn remove(&self, key: &Key) {
        let _ = fs::remove_file(self.path(key));
    }

    pub(super) fn write(&self, key: &Key, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() as u64 + HEAD > self.limit.min(LARGEST) {
            return Ok(());
        }
        let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(&self.folder)?;
        file.write_all(MAGIC)?;
        file.write_all(key.bytes())?;
        file.write_all(&(bytes.len() as u64).to_le_bytes())?;
        file.write_all(&Sha256::digest(bytes))?;
        file.write_all(bytes)?;
        file.as_file().sync_data()?;
        file.persist(self.path(key)).map_err(|error| error.error)?;
        let new = bytes.len() as u64 + HEAD;
        // Counting all files is worth it only now and then.
        if self.written.fetch_add(new, Ordering::Relaxed).saturating_add(new) > self.limit / 16 {
            self.written.store(0, Ordering::Relaxed);
            self.trim()?;
        }
        Ok(())
    }

    /// Removes what was used longest ago until the rest is within seven eighths of the bound.
    fn trim(&self) -> io::Result<()> {
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .custom_flags(NO_LINK)
            .open(self.folder.join("lock"))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            // Another process is at it.
            return Ok(());
        }
        let now = SystemTime::now();
        let mut files = Vec::new();
        let mut total = 0u64;
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let path = entry.path();
            let Ok(metadata) = entry.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if path.extension().is_some_and(|e| e == SUFFIX) {
                total += metadata.len();
                files.push((used, metadata.len(), path));
            } else if entry.file_name().to_string_lossy().starts_with(".new-")
                && now.duration_since(used).is_ok_and(|age| age > ABANDONED)
            {
                let _ = fs::remove_file(path);
            }
        }
        if total <= self.limit - self.limit / 16 {
            return Ok(());
        }
        files.sort();
        for (_, size, path) in files {
            if total <= self.limit - self.limit / 8 {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= size;
            }
        }
        Ok(())
    }
}

/// Whether nobody wrote a file but this user or root, as far as its owner and its permissions tell.
fn is_own(data: &fs::Metadata) -> bool {
    [0, geteuid().as_raw()].contains(&data.uid()) && data.mode() & 0o022 == 0
}

/// The entry's bytes, or what is wrong with the file, which is at most so large.
fn contents(mut file: &File, key: &Key, largest: u64) -> Result<Vec<u8>, String> {
    let size = file.metadata().map_err(|e| e.to_string())?;
    if !size.is_file() || size.len() < HEAD || size.len() > largest {
        return Err("it is no entry".to_owned());
    }
    let mut head = [0; HEAD as usize];
    file.read_exact(&mut head).map_err(|e| e.to_string())?;
    let (magic, rest) = head.split_at(MAGIC.len());
    let (found, rest) = rest.split_at(32);
    let (length, sum) = rest.split_at(8);
    if magic != MAGIC || found != key.bytes() {
        return Err("its head is another's".to_owned());
    }
    if length != (size.len() - HEAD).to_le_bytes() {
        return Err("its length is wrong".to_owned());
    }
    let mut bytes = Vec::with_capacity((size.len() - HEAD) as usize);
    file.take(largest).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if Sha256::digest(&bytes).as_slice() != sum {
        return Err("its checksum is wrong".to_owned());
    }
    Ok(bytes)
}
