//! What was compiled, kept in memory and on disk, for many processes at once.
//!
//! An entry is found by a [`Key`]: the SHA-256 of the module's binary form, the trust it was validated for,
//! the target with its options, a hash of the compiler's sources, and what the caller calls the product (`"ptx"`; on
//! CUDA also `"cubin 13000"`, a driver's). So one cache holds the code and what a driver made of it.
//!
//! On disk an entry is a file of its own, named by its key. It is written beside its place, flushed and
//! renamed, so another process sees all of it or nothing. Its head has the key and a checksum: a file that
//! does not agree with them is removed and counts as absent. When the files take more than the bound, those
//! used longest ago go first; one process at a time does that. A disk that is full or read-only costs speed,
//! never a result: every failure to write is logged and otherwise ignored.

mod disk;
mod memory;

use crate::{Artifact, Rejected, Target, compile};
use disk::Disk;
use memory::Memory;
use sha2::{Digest, Sha256};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use vm_ir::binary::{Lines, encode};
use vm_ir::{Trust, ValidModule};

/// Which compiler this is. Code that another one made is not used: what was wrong in it may have been mended since.
const COMPILER: &str = concat!(env!("CARGO_PKG_VERSION"), " ", env!("VM_JIT_SOURCES"));

/// What an entry is found by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of what a module becomes.
    pub fn new(module: &ValidModule, target: &Target, product: &str) -> Key {
        // Lines are part of the code only if it says which lines it is from, or is the module.
        let lines = match target {
            Target::Ptx(options) if options.source.is_some() => Lines::Keep,
            Target::Ir => Lines::Keep,
            _ => Lines::Strip,
        };
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(b"vm-jit");
        part(COMPILER.as_bytes());
        part(target.to_string().as_bytes());
        part(product.as_bytes());
        part(&[u8::from(module.trust() == Trust::Trusted)]);
        part(&encode(module, lines));
        Key(hash.finalize().into())
    }

    /// The key of something else that is kept beside code: `what` it is, and what tells it from others of that. It is no key of a
    /// module, and another with each compiler.
    pub fn of(what: &str, parts: &[&[u8]]) -> Key {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(b"vm-jit beside code");
        part(COMPILER.as_bytes());
        part(what.as_bytes());
        parts.iter().for_each(|bytes| part(bytes));
        Key(hash.finalize().into())
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// How much a cache may hold, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder, made if it is not there; `None` for memory alone. What lies there is run, so files that another user but
    /// root owns or may write to are not read.
    pub folder: Option<PathBuf>,
    /// Bytes of all files.
    pub disk_bytes: u64,
    /// Bytes of the entries in memory.
    pub memory_bytes: usize,
}

impl Default for CacheOptions {
    /// Memory alone, 64 MiB of it; 1 GiB on disk once there is a folder.
    fn default() -> CacheOptions {
        CacheOptions { folder: None, disk_bytes: 1 << 30, memory_bytes: 64 << 20 }
    }
}

/// How often a cache had what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Found in memory.
    pub memory_hits: u64,
    /// Found on disk.
    pub disk_hits: u64,
    /// Not found.
    pub misses: u64,
    /// Files that were removed because they were damaged.
    pub discarded: u64,
}

/// A cache. It may be shared between threads.
#[derive(Debug)]
pub struct Cache {
    disk: Option<Disk>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    memory: Memory,
    statistics: CacheStatistics,
}

impl Cache {
    /// Opens a cache.
    ///
    /// # Errors
    ///
    /// The folder is not there and can't be made.
    pub fn open(options: &CacheOptions) -> io::Result<Cache> {
        let disk = match &options.folder {
            Some(folder) => Some(Disk::open(folder, options.disk_bytes)?),
            None => None,
        };
        let state =
            State { memory: Memory::new(options.memory_bytes), statistics: CacheStatistics::default() };
        Ok(Cache { disk, state: Mutex::new(state) })
    }

    /// A cache in memory alone, as large as the default options say.
    pub fn in_memory() -> Cache {
        let memory = Memory::new(CacheOptions::default().memory_bytes);
        Cache { disk: None, state: Mutex::new(State { memory, statistics: CacheStatistics::default() }) }
    }

    /// What is kept under a key.
    pub fn get(&self, key: &Key) -> Option<Arc<[u8]>> {
        {
            let mut state = self.lock();
            if let Some(found) = state.memory.get(key) {
                state.statistics.memory_hits += 1;
                return Some(found);
            }
        }
        // Other threads go on while this one reads.
        let read = self.disk.as_ref().map(|disk| disk.read(key));
        let mut state = self.lock();
        match read {
            Some(disk::Read::Found(bytes)) => {
                let bytes: Arc<[u8]> = bytes.into();
                state.statistics.disk_hits += 1;
                state.memory.put(*key, bytes.clone());
                return Some(bytes);
            }
            Some(disk::Read::Damaged) => state.statistics.discarded += 1,
            Some(disk::Read::Absent) | None => {}
        }
        state.statistics.misses += 1;
        None
    }

    /// Keeps something under a key.
    pub fn put(&self, key: &Key, bytes: impl Into<Arc<[u8]>>) {
        let bytes = bytes.into();
        if let Some(disk) = &self.disk
            && let Err(error) = disk.write(key, &bytes)
        {
            tracing::warn!(%key, %error, folder = %disk.folder().display(), "a compiled kernel could not be kept");
        }
        self.lock().memory.put(*key, bytes);
    }

    /// Forgets what is kept under a key, for one who found it unusable.
    pub fn remove(&self, key: &Key) {
        if let Some(disk) = &self.disk {
            disk.remove(key);
        }
        self.lock().memory.remove(key);
    }

    /// Compiles a module, or gives what was compiled before.
    ///
    /// # Errors
    ///
    /// Those of [`compile`].
    pub fn compile(&self, module: &ValidModule, target: &Target) -> Result<Artifact, Rejected> {
        let key = Key::new(module, target, "artifact");
        if let Some(bytes) = self.get(&key) {
            match Artifact::from_bytes(&bytes) {
                Some(artifact) => return Ok(artifact),
                None => self.remove(&key),
            }
        }
        let artifact = compile(module, target)?;
        self.put(&key, artifact.to_bytes());
        Ok(artifact)
    }

    /// How often it had what was asked for.
    pub fn statistics(&self) -> CacheStatistics {
        self.lock().statistics
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Nothing under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
