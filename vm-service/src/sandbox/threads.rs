//! Threads of the VMM that a guest may take over: those of vCPUs, and those that serve its devices.

use std::cell::Cell;
use std::io;
use std::sync::Once;
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::calls::confine_thread;

thread_local! {
    /// Whether this thread is confined.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// Begins a thread that has no capabilities, and makes only the system calls that vCPUs and devices need, as do those that it
/// begins. On a Linux kernel that does not confine it, that is told once.
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
