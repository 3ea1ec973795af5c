//! One message-signalled interrupt of the VMM's own functions: an eventfd, and the route that takes it to the guest.

use std::sync::{Arc, Mutex, PoisonError};

use vm_passthrough::guest::{MsiMessage, RouteId, Vmm, VmmError};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vmm::sys;

/// An interrupt vector, masked at first.
#[derive(Debug)]
pub(super) struct Vector {
    vmm: Arc<dyn Vmm>,
    trigger: EventFd,
    route: RouteId,
    /// Where the route leads.
    routed: Mutex<Option<MsiMessage>>,
}

impl Vector {
    /// # Errors
    /// When there are no file descriptors or interrupt routes left.
    pub(super) fn new(vmm: Arc<dyn Vmm>) -> Result<Self, VmmError> {
        let trigger = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
            .map_err(|error| VmmError::new("create an eventfd", error))?;
        let route = vmm.add_route(sys::borrow(&trigger))?;
        Ok(Self { vmm, trigger, route, routed: Mutex::new(None) })
    }

    /// Signals it; while it is masked that is delivered when it is unmasked.
    pub(super) fn signal(&self) {
        // It fails only when the counter is full, and then it is signalled.
        let _ = self.trigger.write(1);
    }

    /// The eventfd that signals it, for another process; `None` where there is no descriptor left.
    pub(super) fn trigger(&self) -> Option<EventFd> {
        self.trigger.try_clone().ok()
    }

    /// Whether it was signalled while it is masked.
    pub(super) fn is_pending(&self) -> bool {
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).is_none() && sys::signalled(&self.trigger)
    }

    /// Gives it its message, or masks it.
    pub(super) fn set(&self, message: Option<MsiMessage>) {
        let mut routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        if *routed == message {
            return;
        }
        match self.vmm.set_route(self.route, message) {
            Ok(()) => *routed = message,
            Err(error) => tracing::warn!(%error, "an interrupt of the guest stays masked"),
        }
    }

    /// Forgets that it was signalled.
    pub(super) fn clear(&self) {
        // It fails when it was not signalled.
        let _ = self.trigger.read();
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        if let Err(error) = self.vmm.remove_route(self.route) {
            tracing::warn!(%error, "an interrupt route was not removed");
        }
    }
}
