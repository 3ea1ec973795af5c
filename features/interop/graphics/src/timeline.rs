//! Timelines.

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use vm_accel::{ExternalSemaphore, Result, SemaphoreKind};

use crate::parcel::send_timeline;
use crate::sys::{Device, RawTimeline};

/// A timeline semaphore of a [`Gpu`](crate::Gpu): a number that only grows. Clones are the same timeline.
#[derive(Clone)]
pub struct Timeline(pub(crate) Arc<RawTimeline>);

impl Timeline {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        RawTimeline::new(device).map(|raw| Self(Arc::new(raw)))
    }

    pub(crate) fn import(device: &Arc<Device>, fd: OwnedFd) -> Result<Self> {
        let raw = RawTimeline::new(device)?;
        raw.import(fd)?;
        Ok(Self(Arc::new(raw)))
    }

    /// Sends it to another process, which [receives](crate::Gpu::receive_timeline) it.
    ///
    /// # Errors
    /// [`Error::Unsupported`](vm_accel::Error::Unsupported) where timelines have no descriptors;
    /// [`Error::Host`](vm_accel::Error::Host) when the socket fails.
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        let device = &self.0.device;
        let fd = self.0.export()?.ok_or_else(|| device.unsupported("timelines of other processes"))?;
        send_timeline(socket, fd, device.physical.uuid)
    }

    /// How far it has come.
    ///
    /// # Errors
    /// The driver's.
    pub fn value(&self) -> Result<u64> {
        self.0.value()
    }

    /// It, for a worker to import.
    ///
    /// # Errors
    /// The driver's.
    pub fn export(&self) -> Result<ExternalSemaphore> {
        let (fd, kind) = (self.0.export()?, SemaphoreKind::Timeline);
        Ok(ExternalSemaphore { fd, kind, host: Arc::new(self.clone()) })
    }
}

impl vm_accel::Timeline for Timeline {
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        self.0.wait(value, deadline)
    }

    fn signal(&self, value: u64) -> Result<()> {
        self.0.signal(value)
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").field("value", &self.0.value()).finish()
    }
}
