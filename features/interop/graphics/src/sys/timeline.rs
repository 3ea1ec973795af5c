//! Timeline semaphores.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ash::vk;
use vm_accel::Result;

use super::{Device, failed};

/// A timeline semaphore.
pub(crate) struct RawTimeline {
    pub(super) handle: vk::Semaphore,
    pub(crate) device: Arc<Device>,
}

impl RawTimeline {
    /// One at 0, to be shared if the device can.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let mut export = vk::ExportSemaphoreCreateInfo::default()
            .handle_types(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD);
        let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let mut info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        if device.traits.semaphore_fd {
            info = info.push_next(&mut export);
        }
        // SAFETY: what the structure names are locals.
        let handle = unsafe { device.handle.create_semaphore(&info, None) };
        let handle = handle.map_err(failed("vkCreateSemaphore"))?;
        Ok(Self { handle, device: Arc::clone(device) })
    }

    /// A descriptor of it, where the device has such.
    pub(crate) fn export(&self) -> Result<Option<OwnedFd>> {
        if !self.device.traits.semaphore_fd {
            return Ok(None);
        }
        let info = vk::SemaphoreGetFdInfoKHR::default()
            .semaphore(self.handle)
            .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD);
        // SAFETY: the semaphore is live, and was made to be exported so.
        let fd = unsafe { self.device.semaphore_fd.get_semaphore_fd(&info) };
        let fd = fd.map_err(failed("vkGetSemaphoreFdKHR"))?;
        // SAFETY: the driver gave a new descriptor, which is the caller's.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it that of a descriptor, for good.
    pub(crate) fn import(&self, fd: OwnedFd) -> Result<()> {
        if !self.device.traits.semaphore_fd {
            return Err(self.device.unsupported("timelines of other processes"));
        }
        let info = vk::ImportSemaphoreFdInfoKHR::default()
            .semaphore(self.handle)
            .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD)
            .fd(fd.as_raw_fd());
        // SAFETY: nobody uses the semaphore yet; the descriptor is open.
        unsafe { self.device.semaphore_fd.import_semaphore_fd(&info) }
            .map_err(failed("vkImportSemaphoreFdKHR"))?;
        // It is the driver's now.
        let _ = fd.into_raw_fd();
        Ok(())
    }

    pub(crate) fn value(&self) -> Result<u64> {
        // SAFETY: the semaphore is live.
        let value = unsafe { self.device.handle.get_semaphore_counter_value(self.handle) };
        value.map_err(failed("vkGetSemaphoreCounterValue"))
    }

    /// Waits for a value; false if it did not come by the deadline.
    pub(crate) fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        let (semaphores, values) = ([self.handle], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let left = deadline.saturating_duration_since(Instant::now());
        let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the semaphore is live; what the structure names are locals.
        match unsafe { self.device.handle.wait_semaphores(&info, left) } {
            Ok(()) => Ok(true),
            Err(vk::Result::TIMEOUT) => Ok(false),
            Err(error) => Err(failed("vkWaitSemaphores")(error)),
        }
    }

    /// Sets it to a value, unless it has got so far.
    pub(crate) fn signal(&self, value: u64) -> Result<()> {
        if self.value()? >= value {
            return Ok(());
        }
        let info = vk::SemaphoreSignalInfo::default().semaphore(self.handle).value(value);
        // SAFETY: the semaphore is live, and its value smaller; whoever else signals it has ended.
        unsafe { self.device.handle.signal_semaphore(&info) }.map_err(failed("vkSignalSemaphore"))
    }
}

impl Drop for RawTimeline {
    fn drop(&mut self) {
        // SAFETY: what waits for it or signals it holds it, and has run.
        unsafe { self.device.handle.destroy_semaphore(self.handle, None) };
    }
}
