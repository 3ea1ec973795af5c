//! The device manager.

use crate::Host;

/// Finds, claims, attaches and releases the host's PCI devices.
#[derive(Debug)]
pub struct PassthroughManager {
    host: Host,
}

impl PassthroughManager {
    /// The host that it manages.
    pub fn host(&self) -> &Host {
        &self.host
    }
}
