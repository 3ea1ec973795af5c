//! Where compiled kernels are kept.

use std::path::Path;
use std::sync::Arc;

use vm_jit::cache::{Cache, CacheOptions};

/// What compiled kernels may take on disk.
pub(crate) const CODE_BYTES: u64 = 1 << 30;

/// The cache in a folder, or in memory where there is none or it can't be used.
pub(crate) fn open(folder: Option<&Path>, disk_bytes: u64) -> Arc<Cache> {
    let on_disk = |folder: &Path| {
        let options = CacheOptions { folder: Some(folder.into()), disk_bytes, ..CacheOptions::default() };
        Cache::open(&options).inspect_err(|error| {
            tracing::warn!("compiled kernels are not kept in {}: {error}", folder.display());
        })
    };
    Arc::new(folder.and_then(|folder| on_disk(folder).ok()).unwrap_or_else(Cache::in_memory))
}
