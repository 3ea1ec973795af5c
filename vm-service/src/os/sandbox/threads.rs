//! Threads of the VMM that a guest may take over: those of vCPUs, and those that serve its devices.

use std::cell::Cell;
use std::fs::{self, DirEntry};
use std::io;
use std::sync::Once;
use std::thread::{Builder, JoinHandle, sleep};
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::calls::confine_thread;

thread_local! {
    /// Whether this thread is confined.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// Begins a thread that has no capabilities, and makes only the system calls that vCPUs and devices need, as do those that it
/// begins. On a Linux kernel that does not confine it, that is logged once.
///
/// # Errors
/// When there are no threads left.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // The Linux kernel passes it on.
    let inherits = CONFINED.get();
    Builder::new().name(name.to_owned()).spawn(move || {
        static TOLD: Once = Once::new();
        match if inherits { Ok(()) } else { confine() } {
            Ok(()) => CONFINED.set(true),
            Err(error) => TOLD.call_once(|| {
                tracing::warn!(
                    "the guest's vCPUs and devices are not confined: {error}; see whether the Linux kernel has \
                     CONFIG_SECCOMP_FILTER"
                );
            }),
        }
        work();
    })
}

/// Whether this is the process's only thread, but for those of vhost, which are the Linux kernel's. One that was joined is there
/// for a moment more.
pub(crate) fn is_alone() -> bool {
    let is_ours = |task: &DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| !name.starts_with("vhost-"))
    };
    let is_alone =
        || fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.flatten().filter(is_ours).count() == 1);
    (0..20).any(|_| {
        is_alone() || {
            sleep(Duration::from_millis(1));
            false
        }
    })
}

/// Confines this thread.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn confine() -> Result<(), String> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .map_err(|error| error.to_string())?;
    confine_thread()
}
