//! Buffers and images.

use std::sync::Arc;

use ash::vk;
use vm_accel::{ExternalKind, Pixels, Result};

use super::allocation::{Allocation, For, Place};
use super::device::handle_type;
use super::{Device, failed};

/// A buffer with memory of its own.
pub(crate) struct RawBuffer {
    pub(super) handle: vk::Buffer,
    pub(crate) bytes: u64,
    pub(crate) memory: Option<Allocation>,
    pub(crate) device: Arc<Device>,
}

impl RawBuffer {
    pub(crate) fn new(device: &Arc<Device>, bytes: u64, place: Place) -> Result<Self> {
        let usage = vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::STORAGE_BUFFER;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default();
        let mut info = vk::BufferCreateInfo::default().size(bytes).usage(usage);
        if let Place::Shared(kind) = place {
            check_buffer(device, usage, kind)?;
            external = external.handle_types(handle_type(kind));
            info = info.push_next(&mut external);
        }
        // SAFETY: what the structure names are locals.
        let handle = unsafe { device.handle.create_buffer(&info, None) }.map_err(failed("vkCreateBuffer"))?;
        let mut this = Self { handle, bytes, memory: None, device: Arc::clone(device) };
        let memory = Allocation::new(device, For::Buffer(handle), place)?;
        memory.bind(For::Buffer(handle))?;
        this.memory = Some(memory);
        Ok(this)
    }
}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        // SAFETY: what was recorded with it holds it, and has run; its memory is freed after it.
        unsafe { self.device.handle.destroy_buffer(self.handle, None) };
    }
}

fn check_buffer(device: &Device, usage: vk::BufferUsageFlags, kind: ExternalKind) -> Result<()> {
    let info = vk::PhysicalDeviceExternalBufferInfo::default().usage(usage).handle_type(handle_type(kind));
    let mut found = vk::ExternalBufferProperties::default();
    let (instance, physical) = (&device.instance.handle, device.physical.handle);
    // SAFETY: the device is one of the instance; the structures are locals.
    unsafe { instance.get_physical_device_external_buffer_properties(physical, &info, &mut found) };
    check_features(device, found.external_memory_properties, kind, "buffers")
}

fn check_features(
    device: &Device,
    found: vk::ExternalMemoryProperties,
    kind: ExternalKind,
    what: &str,
) -> Result<()> {
    let wanted = match kind {
        ExternalKind::HostFd => vk::ExternalMemoryFeatureFlags::IMPORTABLE,
        _ => vk::ExternalMemoryFeatureFlags::EXPORTABLE,
    };
    match found.external_memory_features.contains(wanted) {
        true => Ok(()),
        false => Err(device.unsupported(format!("{what} shared as {kind}"))),
    }
}

/// A 2D image, whose first level and layer can be rendered to.
pub(crate) struct RawImage {
    pub(super) handle: vk::Image,
    pub(super) view: vk::ImageView,
    pub(crate) size: [u32; 2],
    /// First byte and bytes of a row, of an image whose rows lie one behind the other.
    pub(crate) rows: Option<(u64, u64)>,
    pub(crate) memory: Option<Allocation>,
    pub(crate) device: Arc<Device>,
}

impl RawImage {
    /// An image whose rows lie one behind the other, if `linear`, or as the device likes them best.
    pub(crate) fn new(
        device: &Arc<Device>,
        format: vk::Format,
        pixels: &Pixels,
        linear: bool,
        place: Place,
    ) -> Result<Self> {
        let tiling = if linear { vk::ImageTiling::LINEAR } else { vk::ImageTiling::OPTIMAL };
        let usage = vk::ImageUsageFlags::TRANSFER_SRC
            | vk::ImageUsageFlags::TRANSFER_DST
            | vk::ImageUsageFlags::COLOR_ATTACHMENT;
        let mut external = vk::ExternalMemoryImageCreateInfo::default();
        let mut info = image_info(format, tiling, usage, pixels);
        check_image(device, &info, place)?;
        if let Place::Shared(kind) = place {
            external = external.handle_types(handle_type(kind));
            info = info.push_next(&mut external);
        }
        // SAFETY: what the structure names are locals.
        let handle = unsafe { device.handle.create_image(&info, None) }.map_err(failed("vkCreateImage"))?;
        let view = vk::ImageView::null();
        let (size, device_of) = (pixels.size, Arc::clone(device));
        let mut this = Self { handle, view, size, rows: None, memory: None, device: device_of };
        let memory = Allocation::new(device, For::Image(handle), place)?;
        memory.bind(For::Image(handle))?;
        this.memory = Some(memory);
        if linear {
            let part = vk::ImageSubresource::default().aspect_mask(vk::ImageAspectFlags::COLOR);
            // SAFETY: the image is live, and linear.
            let layout = unsafe { device.handle.get_image_subresource_layout(handle, part) };
            this.rows = Some((layout.offset, layout.row_pitch));
        }
        let info = vk::ImageViewCreateInfo::default()
            .image(handle)
            .view_type(vk::ImageViewType::TYPE_2D)
            .format(format)
            .subresource_range(vk::ImageSubresourceRange { level_count: 1, layer_count: 1, ..WHOLE });
        // SAFETY: the image is live and has its memory.
        let view = unsafe { device.handle.create_image_view(&info, None) };
        this.view = view.map_err(failed("vkCreateImageView"))?;
        Ok(this)
    }
}

impl Drop for RawImage {
    fn drop(&mut self) {
        // SAFETY: what was recorded with it holds it, and has run.
        unsafe { self.device.handle.destroy_image_view(self.view, None) };
        // SAFETY: as above; its memory is freed after it.
        unsafe { self.device.handle.destroy_image(self.handle, None) };
    }
}

/// All of an image.
pub(super) const WHOLE: vk::ImageSubresourceRange = vk::ImageSubresourceRange {
    aspect_mask: vk::ImageAspectFlags::COLOR,
    base_mip_level: 0,
    level_count: vk::REMAINING_MIP_LEVELS,
    base_array_layer: 0,
    layer_count: vk::REMAINING_ARRAY_LAYERS,
};

fn image_info(
    format: vk::Format,
    tiling: vk::ImageTiling,
    usage: vk::ImageUsageFlags,
    pixels: &Pixels,
) -> vk::ImageCreateInfo<'static> {
    let [width, height] = pixels.size;
    vk::ImageCreateInfo::default()
        .image_type(vk::ImageType::TYPE_2D)
        .format(format)
        .extent(vk::Extent3D { width, height, depth: 1 })
        .mip_levels(pixels.levels)
        .array_layers(pixels.layers.unwrap_or(1))
        .samples(vk::SampleCountFlags::TYPE_1)
        .tiling(tiling)
        .usage(usage)
}

fn check_image(device: &Device, image: &vk::ImageCreateInfo<'_>, place: Place) -> Result<()> {
    let (format, tiling) = (image.format, image.tiling);
    let mut external = vk::PhysicalDeviceExternalImageFormatInfo::default();
    let mut info = vk::PhysicalDeviceImageFormatInfo2::default()
        .format(format)
        .ty(vk::ImageType::TYPE_2D)
        .tiling(tiling)
        .usage(image.usage);
    let mut shared = vk::ExternalImageFormatProperties::default();
    let mut found = vk::ImageFormatProperties2::default();
    if let Place::Shared(kind) = place {
        external = external.handle_type(handle_type(kind));
        info = info.push_next(&mut external);
        found = found.push_next(&mut shared);
    }
    let (instance, physical) = (&device.instance.handle, device.physical.handle);
    // SAFETY: the device is one of the instance; the structures are locals.
    let told = unsafe { instance.get_physical_device_image_format_properties2(physical, &info, &mut found) };
    let what = format!("{tiling:?} images of {format:?}");
    match (told, place) {
        (Err(vk::Result::ERROR_FORMAT_NOT_SUPPORTED), Place::Shared(kind)) => {
            Err(device.unsupported(format!("{what} shared as {kind}")))
        }
        (Err(vk::Result::ERROR_FORMAT_NOT_SUPPORTED), _) => Err(device.unsupported(what)),
        (Err(other), _) => Err(failed("vkGetPhysicalDeviceImageFormatProperties2")(other)),
        (Ok(()), _) if !fits(image, &found.image_format_properties) => {
            let vk::Extent3D { width, height, .. } = image.extent;
            let (levels, layers) = (image.mip_levels, image.array_layers);
            Err(device
                .unsupported(format!("{what} of {width}x{height}, {levels} levels and {layers} layers")))
        }
        (Ok(()), Place::Shared(kind)) => {
            check_features(device, shared.external_memory_properties, kind, &what)
        }
        (Ok(()), _) => Ok(()),
    }
}

fn fits(image: &vk::ImageCreateInfo<'_>, most: &vk::ImageFormatProperties) -> bool {
    image.extent.width <= most.max_extent.width
        && image.extent.height <= most.max_extent.height
        && image.mip_levels <= most.max_mip_levels
        && image.array_layers <= most.max_array_layers
}
