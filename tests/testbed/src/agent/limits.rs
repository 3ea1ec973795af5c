//! Programs that may lock little memory, and may not raise that.

use anyhow::{Context, Result, anyhow};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

/// Starts programs that have this soft and hard limit of locked memory, in bytes, and lack some capabilities.
///
/// # Errors
/// When the Linux kernel refuses the limit, or `start` fails.
pub fn with_locked_memory<T: Send>(
    (soft, hard): (Option<u64>, Option<u64>),
    without: CapabilitySet,
    start: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: soft, maximum: hard })
        .context("the limit of locked memory can't be set")?;
    // Programs inherit the bounding set of the thread that starts them.
    let bounded = || {
        without.iter().try_for_each(remove_capability_from_bounding_set)?;
        start()
    };
    let started = std::thread::scope(|scope| scope.spawn(bounded).join());
    setrlimit(Resource::Memlock, before).context("the limit of locked memory can't be set back")?;
    started.map_err(|_| anyhow!("the thread that starts programs panicked"))?
}
