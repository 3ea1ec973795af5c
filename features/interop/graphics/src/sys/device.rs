//! A device with one queue.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use ash::{ext, khr, vk};
use vm_accel::{Error, ExternalKind, Result};

use super::{Instance, Physical, failed};

/// What a device has for sharing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    pub(crate) opaque_fd: bool,
    pub(crate) dma_buf: bool,
    pub(crate) host_memory: bool,
    /// Whether timelines have descriptors.
    pub(crate) semaphore_fd: bool,
    /// What host memory that is imported begins and ends at multiples of.
    pub(crate) host_alignment: u64,
}

/// A device with one queue, and the extensions that it has for sharing.
pub(crate) struct Device {
    pub(crate) handle: ash::Device,
    pub(crate) physical: Physical,
    pub(crate) traits: Traits,
    pub(crate) memory_fd: khr::external_memory_fd::Device,
    pub(crate) semaphore_fd: khr::external_semaphore_fd::Device,
    pub(crate) memory_host: ext::external_memory_host::Device,
    pub(crate) memory_types: Vec<vk::MemoryType>,
    queue: Mutex<vk::Queue>,
    pub(crate) instance: Arc<Instance>,
}

impl Device {
    pub(crate) fn new(instance: Arc<Instance>, physical: Physical) -> Result<Arc<Self>> {
        let lacks = |what: &str| Error::Unsupported { what: what.into(), device: physical.name.clone() };
        if physical.version < vk::API_VERSION_1_3 {
            return Err(lacks("Vulkan 1.3"));
        }
        let family = physical.family.ok_or_else(|| lacks("queues that render"))?;
        let mut traits = Traits {
            opaque_fd: physical.has(khr::external_memory_fd::NAME),
            dma_buf: physical.has(khr::external_memory_fd::NAME)
                && physical.has(ext::external_memory_dma_buf::NAME),
            host_memory: physical.has(ext::external_memory_host::NAME),
            semaphore_fd: physical.has(khr::external_semaphore_fd::NAME),
            host_alignment: 0,
        };
        traits.semaphore_fd = traits.semaphore_fd && exports_timelines(&instance, &physical);
        if traits.host_memory {
            let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut host);
            // SAFETY: the device is one of the instance.
            unsafe { instance.handle.get_physical_device_properties2(physical.handle, &mut properties) };
            traits.host_alignment = host.min_imported_host_pointer_alignment.max(4096);
        }
        let wanted: [(bool, &CStr); 4] = [
            (traits.opaque_fd, khr::external_memory_fd::NAME),
            (traits.dma_buf, ext::external_memory_dma_buf::NAME),
            (traits.host_memory, ext::external_memory_host::NAME),
            (traits.semaphore_fd, khr::external_semaphore_fd::NAME),
        ];
        let extensions: Vec<_> =
            wanted.iter().filter(|(has, _)| *has).map(|(_, name)| name.as_ptr()).collect();
        let queues =
            [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&[1.0])];
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(true);
        let mut v13 =
            vk::PhysicalDeviceVulkan13Features::default().synchronization2(true).dynamic_rendering(true);
        let info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .push_next(&mut v12)
            .push_next(&mut v13);
        // SAFETY: the device is one of the instance; what the structure names are locals.
        let handle = unsafe { instance.handle.create_device(physical.handle, &info, None) };
        let handle = handle.map_err(failed("vkCreateDevice"))?;
        // SAFETY: the device was made with such a queue.
        let queue = unsafe { handle.get_device_queue(family, 0) };
        // SAFETY: the device is one of the instance.
        let memory = unsafe { instance.handle.get_physical_device_memory_properties(physical.handle) };
        Ok(Arc::new(Self {
            memory_fd: khr::external_memory_fd::Device::new(&instance.handle, &handle),
            semaphore_fd: khr::external_semaphore_fd::Device::new(&instance.handle, &handle),
            memory_host: ext::external_memory_host::Device::new(&instance.handle, &handle),
            memory_types: memory.memory_types_as_slice().to_vec(),
            handle,
            physical,
            traits,
            queue: Mutex::new(queue),
            instance,
        }))
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>) -> Error {
        Error::Unsupported { what: what.into(), device: self.physical.name.clone() }
    }

    /// Gives the queue commands.
    ///
    /// # Safety
    /// What they use is there until they have run, and the buffer is not recorded again before.
    pub(crate) unsafe fn submit(&self, info: &vk::SubmitInfo2<'_>) -> Result<()> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as the caller promises; no other thread uses the queue.
        let submitted =
            unsafe { self.handle.queue_submit2(*queue, std::slice::from_ref(info), vk::Fence::null()) };
        submitted.map_err(failed("vkQueueSubmit2"))
    }

    /// The index of a type of memory among those of `bits` that has `wanted`, best with `liked` too.
    pub(crate) fn memory_type(
        &self,
        bits: u32,
        wanted: vk::MemoryPropertyFlags,
        liked: vk::MemoryPropertyFlags,
    ) -> Result<u32> {
        let find = |flags: vk::MemoryPropertyFlags| {
            (0u32..)
                .zip(&self.memory_types)
                .position(|(index, memory)| bits & (1 << index) != 0 && memory.property_flags.contains(flags))
        };
        let found = find(wanted | liked).or_else(|| find(wanted));
        found
            .and_then(|index| u32::try_from(index).ok())
            .ok_or_else(|| self.unsupported(format!("memory that is {wanted:?} for such a resource")))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: what was made of it holds it, and is gone.
        unsafe { self.handle.destroy_device(None) };
    }
}

/// Whether a device's timelines can be shared as descriptors.
fn exports_timelines(instance: &Instance, physical: &Physical) -> bool {
    let mut timeline = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
    let info = vk::PhysicalDeviceExternalSemaphoreInfo::default()
        .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD)
        .push_next(&mut timeline);
    let mut found = vk::ExternalSemaphoreProperties::default();
    // SAFETY: the device is one of the instance; the structures are locals.
    unsafe {
        instance.handle.get_physical_device_external_semaphore_properties(physical.handle, &info, &mut found);
    }
    found.external_semaphore_features.contains(vk::ExternalSemaphoreFeatureFlags::EXPORTABLE)
}

/// How Vulkan names a kind of descriptor; host memory is imported by its address.
pub(crate) fn handle_type(kind: ExternalKind) -> vk::ExternalMemoryHandleTypeFlags {
    match kind {
        ExternalKind::OpaqueFd => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
        ExternalKind::DmaBuf => vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT,
        ExternalKind::HostFd => vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
        ExternalKind::D3d11Resource => vk::ExternalMemoryHandleTypeFlags::D3D11_TEXTURE,
    }
}
