//! The cache: directories that are complete or absent, and one writer at a time.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use super::say;

/// How long to wait for another testbed that fills the cache: a Linux kernel build and more.
const LOCK_DEADLINE: Duration = Duration::from_secs(45 * 60);

/// The cache directory.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// Held while the cache is written.
#[derive(Debug)]
pub(super) struct CacheLock {
    _file: File,
}

impl Cache {
    /// The user's cache.
    ///
    /// # Errors
    /// When neither `XDG_CACHE_HOME` nor `HOME` is set, or the directory can't be made.
    pub fn of_user() -> Result<Self> {
        let set = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let base = match (set("XDG_CACHE_HOME"), set("HOME")) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => PathBuf::from(home).join(".cache"),
            (None, None) => bail!("there is nowhere to cache Linux kernels; set HOME or XDG_CACHE_HOME"),
        };
        Self::at(base.join("vm-testbed"))
    }

    /// A cache in `root`.
    ///
    /// # Errors
    /// When the directory can't be made.
    pub fn at(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root)
            .with_context(|| format!("can't make the cache directory {}", root.display()))?;
        Ok(Self { root })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The newest entry named `PREFIX*SUFFIX`, by version order.
    pub(super) fn newest(&self, prefix: &str, suffix: &str) -> Option<PathBuf> {
        let names =
            fs::read_dir(&self.root).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter(|name| {
                name.len() >= prefix.len() + suffix.len()
                    && name.starts_with(prefix)
                    && name.ends_with(suffix)
            })
            .max_by_key(|name| version_key(name))
            .map(|name| self.root.join(name))
    }

    /// Waits until no other testbed writes to the cache.
    pub(super) fn lock(&self) -> Result<CacheLock> {
        let path = self.root.join("lock");
        let file = File::create(&path).with_context(|| format!("can't open {}", path.display()))?;
        let start = Instant::now();
        let mut told = false;
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if !told {
                say(format_args!("another testbed fills {}; waiting for it", self.root.display()));
                told = true;
            }
            if start.elapsed() > LOCK_DEADLINE {
                bail!(
                    "another process has held {} for {} s; end it and try again",
                    path.display(),
                    LOCK_DEADLINE.as_secs()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(CacheLock { _file: file })
    }

    /// Fills the entry `name` through `fill`, which gets an empty directory, and puts it in place when all is there.
    pub(super) fn fill(
        &self,
        _lock: &CacheLock,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let place = self.root.join(name);
        let part = self.root.join(format!("{name}.part"));
        for leftover in [&place, &part] {
            if leftover.exists() {
                fs::remove_dir_all(leftover)
                    .with_context(|| format!("can't remove {}", leftover.display()))?;
            }
        }
        fs::create_dir(&part).with_context(|| format!("can't make {}", part.display()))?;
        fill(&part)?;
        fs::rename(&part, &place).with_context(|| format!("can't put {} in place", place.display()))?;
        Ok(place)
    }

    /// A directory for logs of commands.
    pub(super) fn logs(&self) -> Result<PathBuf> {
        let logs = self.root.join("logs");
        fs::create_dir_all(&logs).with_context(|| format!("can't make {}", logs.display()))?;
        Ok(logs)
    }
}

/// Orders version strings as people do: runs of digits as numbers, all else as text.
pub(super) fn version_key(text: &str) -> Vec<(u64, String)> {
    let mut key = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (letters, after) = rest.split_at(word);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        key.push((0, letters.to_owned()));
        key.push((number.parse().unwrap_or(0), String::new()));
        rest = after;
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_as_numbers() {
        assert!(version_key("6.12.100+deb12") > version_key("6.12.95+deb12"));
        assert!(version_key("6.12.117") > version_key("6.12.95"));
        assert!(version_key("6.12.9-2") > version_key("6.12.9-1"));
    }

    #[test]
    fn an_entry_is_complete_or_absent() {
        let root = std::env::temp_dir().join(format!("vm-testbed-cache-{}", std::process::id()));
        let cache = Cache::at(root.clone()).unwrap();
        let lock = cache.lock().unwrap();
        assert!(cache.fill(&lock, "linux-1-x", |_| bail!("the disk is full")).is_err());
        assert_eq!(cache.newest("linux-", "-x"), None);
        for version in ["9", "10"] {
            let fill = |part: &Path| Ok(fs::write(part.join("image"), version)?);
            cache.fill(&lock, &format!("linux-{version}-x"), fill).unwrap();
        }
        let newest = cache.newest("linux-", "-x").unwrap();
        assert_eq!(fs::read_to_string(newest.join("image")).unwrap(), "10");
        assert_eq!(cache.newest("linux-", "-y"), None);
        fs::remove_dir_all(root).unwrap();
    }
}
