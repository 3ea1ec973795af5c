//! Memory of a device, and how it is shared.

use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use ash::vk;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vm_accel::{Error, ExternalKind, Result};

use super::device::handle_type;
use super::{Device, failed};

/// Where memory is, and who reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the device alone.
    Device,
    /// Where the host reads and writes it too.
    Host,
    /// Where another API reaches it by such descriptors.
    Shared(ExternalKind),
}

/// A memfd, mapped.
struct HostMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

impl HostMemory {
    fn new(bytes: u64) -> Result<Self> {
        let failed = |what| move |error: rustix::io::Errno| Error::Host { what, cause: error.to_string() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("vm-graphics", flags).map_err(failed("making shared memory"))?;
        ftruncate(&fd, bytes).map_err(failed("giving shared memory its size"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&fd, seals).map_err(failed("sealing shared memory"))?;
        let bytes = usize::try_from(bytes)
            .map_err(|error| Error::Host { what: "mapping shared memory", cause: error.to_string() })?;
        // SAFETY: a new mapping, at no address in particular.
        let base =
            unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) };
        let base = base.map_err(failed("mapping shared memory"))?;
        let cause = "it is at address 0".to_owned();
        let base = NonNull::new(base.cast()).ok_or(Error::Host { what: "mapping shared memory", cause })?;
        Ok(Self { fd, base, bytes })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: it is this mapping, all of it; the device that had it imported has freed it.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) } {
            tracing::debug!(%error, "shared memory stays mapped");
        }
    }
}

/// Memory of a device.
pub(crate) struct Allocation {
    handle: vk::DeviceMemory,
    pub(crate) bytes: u64,
    pub(crate) dedicated: bool,
    place: Place,
    /// Where the host reaches it.
    mapped: Option<NonNull<u8>>,
    /// What it is made of, where that is the host's.
    host: Option<HostMemory>,
    device: Arc<Device>,
}

// SAFETY: the host reaches what is mapped by copies only, and the handle is the driver's, which this frees once.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

/// What memory is to be for.
#[derive(Clone, Copy)]
pub(super) enum For {
    Buffer(vk::Buffer),
    Image(vk::Image),
}

impl Allocation {
    /// Memory for a resource that was made for the same place.
    pub(super) fn new(device: &Arc<Device>, resource: For, place: Place) -> Result<Self> {
        let mut dedicated = vk::MemoryDedicatedRequirements::default();
        let mut needs = vk::MemoryRequirements2::default().push_next(&mut dedicated);
        match resource {
            For::Buffer(buffer) => {
                let info = vk::BufferMemoryRequirementsInfo2::default().buffer(buffer);
                // SAFETY: the buffer is one of the device; the structures are locals.
                unsafe { device.handle.get_buffer_memory_requirements2(&info, &mut needs) };
            }
            For::Image(image) => {
                let info = vk::ImageMemoryRequirementsInfo2::default().image(image);
                // SAFETY: as above, of the image.
                unsafe { device.handle.get_image_memory_requirements2(&info, &mut needs) };
            }
        }
        let needs = needs.memory_requirements;
        let wants = dedicated.prefers_dedicated_allocation | dedicated.requires_dedicated_allocation;
        let mut this = Self {
            handle: vk::DeviceMemory::null(),
            bytes: needs.size,
            dedicated: wants == vk::TRUE && place != Place::Shared(ExternalKind::HostFd),
            place,
            mapped: None,
            host: None,
            device: Arc::clone(device),
        };
        match place {
            Place::Shared(ExternalKind::HostFd) => this.take_host(needs)?,
            _ => this.allocate(resource, needs)?,
        }
        Ok(this)
    }

    fn allocate(&mut self, resource: For, needs: vk::MemoryRequirements) -> Result<()> {
        let device = Arc::clone(&self.device);
        let (wanted, liked) = match self.place {
            Place::Host => (
                vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT,
                vk::MemoryPropertyFlags::HOST_CACHED,
            ),
            _ => (vk::MemoryPropertyFlags::DEVICE_LOCAL, vk::MemoryPropertyFlags::empty()),
        };
        let index = device.memory_type(needs.memory_type_bits, wanted, liked)?;
        let mut info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(index);
        let mut one = match resource {
            For::Buffer(buffer) => vk::MemoryDedicatedAllocateInfo::default().buffer(buffer),
            For::Image(image) => vk::MemoryDedicatedAllocateInfo::default().image(image),
        };
        if self.dedicated {
            info = info.push_next(&mut one);
        }
        let mut export = vk::ExportMemoryAllocateInfo::default();
        if let Place::Shared(kind) = self.place {
            export = export.handle_types(handle_type(kind));
            info = info.push_next(&mut export);
        }
        // SAFETY: what the structure names are locals, and the resource is live.
        let handle = unsafe { device.handle.allocate_memory(&info, None) };
        self.handle = handle.map_err(failed("vkAllocateMemory"))?;
        if self.place == Place::Host {
            let flags = vk::MemoryMapFlags::empty();
            // SAFETY: the memory is such that the host can reach it, and is mapped once, as long as it is there.
            let mapped = unsafe { device.handle.map_memory(self.handle, 0, vk::WHOLE_SIZE, flags) };
            self.mapped = NonNull::new(mapped.map_err(failed("vkMapMemory"))?.cast());
        }
        Ok(())
    }

    /// Makes it of host memory that others can map by its descriptor.
    fn take_host(&mut self, needs: vk::MemoryRequirements) -> Result<()> {
        let device = Arc::clone(&self.device);
        if !device.traits.host_memory {
            return Err(device.unsupported("memory that the host shares (VK_EXT_external_memory_host)"));
        }
        self.bytes = needs.size.next_multiple_of(device.traits.host_alignment.max(needs.alignment));
        let host = HostMemory::new(self.bytes)?;
        let (kind, at) = (handle_type(ExternalKind::HostFd), host.base.as_ptr().cast());
        let mut found = vk::MemoryHostPointerPropertiesEXT::default();
        // SAFETY: the memory is mapped; the structure is a local.
        let told = unsafe {
            (device.memory_host.fp().get_memory_host_pointer_properties_ext)(
                device.handle.handle(),
                kind,
                at,
                &mut found,
            )
        };
        told.result().map_err(failed("vkGetMemoryHostPointerPropertiesEXT"))?;
        let (any, bits) = (vk::MemoryPropertyFlags::empty(), needs.memory_type_bits & found.memory_type_bits);
        let index = device.memory_type(bits, any, vk::MemoryPropertyFlags::HOST_COHERENT)?;
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(kind).host_pointer(at);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(self.bytes)
            .memory_type_index(index)
            .push_next(&mut import);
        // SAFETY: the memory stays mapped until the device has freed it.
        let handle = unsafe { device.handle.allocate_memory(&info, None) };
        self.handle = handle.map_err(failed("vkAllocateMemory"))?;
        self.host = Some(host);
        Ok(())
    }

    /// Gives it to the resource that it was made for.
    pub(super) fn bind(&self, resource: For) -> Result<()> {
        match resource {
            // SAFETY: the buffer has no memory yet, and this is for it.
            For::Buffer(buffer) => unsafe { self.device.handle.bind_buffer_memory(buffer, self.handle, 0) }
                .map_err(failed("vkBindBufferMemory")),
            // SAFETY: as above, of the image.
            For::Image(image) => unsafe { self.device.handle.bind_image_memory(image, self.handle, 0) }
                .map_err(failed("vkBindImageMemory")),
        }
    }

    /// A descriptor of it.
    pub(crate) fn export(&self) -> Result<(OwnedFd, ExternalKind)> {
        let Place::Shared(kind) = self.place else {
            return Err(self.device.unsupported("sharing memory that was not made to be shared"));
        };
        if let Some(host) = &self.host {
            let fd = host.fd.try_clone();
            return fd
                .map(|fd| (fd, kind))
                .map_err(|error| Error::Host { what: "sharing memory", cause: error.to_string() });
        }
        let info = vk::MemoryGetFdInfoKHR::default().memory(self.handle).handle_type(handle_type(kind));
        // SAFETY: the memory is live, and was made to be exported so.
        let fd = unsafe { self.device.memory_fd.get_memory_fd(&info) }.map_err(failed("vkGetMemoryFdKHR"))?;
        // SAFETY: the driver gave a new descriptor, which is the caller's.
        Ok((unsafe { OwnedFd::from_raw_fd(fd) }, kind))
    }

    /// Copies what the host can reach into `bytes`.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let from = self.host_at(bytes.len())?;
        // SAFETY: it is mapped, and has as many bytes; what the device writes meanwhile comes out torn.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies `bytes` to where the device reads them.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        let to = self.host_at(bytes.len())?;
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn host_at(&self, bytes: usize) -> Result<NonNull<u8>> {
        if bytes as u64 > self.bytes {
            return Err(Error::OutOfRange { offset: 0, bytes: bytes as u64, size: self.bytes });
        }
        self.mapped.ok_or(Error::NotHostVisible { kind: "device" })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: what used it holds it, and is gone. The host's memory behind it is unmapped after this.
        unsafe { self.device.handle.free_memory(self.handle, None) };
    }
}
