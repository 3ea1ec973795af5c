//! Timelines: the library's own, and those of its callers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_accel::{Error, ExternalSemaphore, HostTimeline, SemaphoreKind};

use super::error::Failure;
use crate::sys::accelerator::Theirs;

/// A timeline.
pub(crate) struct Timeline {
    fd: Option<OwnedFd>,
    pub(crate) host: Arc<dyn vm_accel::Timeline>,
    /// A link has it as graphics' or as its worker's.
    linked: AtomicBool,
    /// A worker signals it.
    computed: AtomicBool,
}

impl Timeline {
    fn over(fd: Option<OwnedFd>, host: Arc<dyn vm_accel::Timeline>) -> Arc<Self> {
        Arc::new(Self { fd, host, linked: AtomicBool::default(), computed: AtomicBool::default() })
    }

    /// The library's own, at 0.
    pub(crate) fn own() -> Arc<Self> {
        Self::over(None, Arc::new(HostTimeline::default()))
    }

    /// The caller's.
    pub(crate) fn theirs(fd: Option<OwnedFd>, theirs: Theirs) -> Arc<Self> {
        Self::over(fd, Arc::new(theirs))
    }

    /// It, for a worker.
    pub(crate) fn external(&self) -> Result<ExternalSemaphore, Failure> {
        let fd = self.fd.as_ref().map(OwnedFd::try_clone).transpose();
        let failed =
            |error: std::io::Error| Error::Host { what: "sharing a timeline", cause: error.to_string() };
        let kind = SemaphoreKind::Timeline;
        Ok(ExternalSemaphore { fd: fd.map_err(failed)?, kind, host: Arc::clone(&self.host) })
    }

    /// Has it be graphics' from now on.
    ///
    /// # Errors
    /// A worker signals it.
    pub(crate) fn be_graphics(&self, parameter: &str) -> Result<(), Failure> {
        self.linked.store(true, Ordering::SeqCst);
        self.not_computed(parameter)
    }

    /// Has it be a worker's from now on.
    ///
    /// # Errors
    /// It is linked, or was.
    pub(crate) fn be_computed(&self, parameter: &str) -> Result<(), Failure> {
        if self.linked.swap(true, Ordering::SeqCst) {
            return Err(Failure::state(
                parameter,
                "was linked already: a worker's timeline is one that never was",
            ));
        }
        self.computed.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// That no worker signals it.
    ///
    /// # Errors
    /// One does.
    pub(crate) fn not_computed(&self, parameter: &str) -> Result<(), Failure> {
        if self.computed.load(Ordering::SeqCst) {
            return Err(Failure::state(parameter, "is signalled by a worker, which alone does so"));
        }
        Ok(())
    }
}
