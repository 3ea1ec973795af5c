//! Images.

use std::fmt;
use std::sync::Arc;

use vm_accel::{ExternalKind, ExternalMemory, Pixels, Result, Shareable};

use crate::format::{Format, ImageOptions};
use crate::gpu::Gpu;
use crate::sys::{self, Device, Place, RawImage};

/// Bytes from the first pixel of rows to behind the last, if such rows do not lie in each other.
pub(crate) fn row_bytes(pixels: &Pixels, pitch: u64) -> Option<u64> {
    let [width, height] = pixels.size.map(u64::from);
    let row =
        width.checked_mul(u64::from(pixels.element.bytes() * pixels.lanes)).filter(|row| *row <= pitch)?;
    pitch.checked_mul(height.checked_sub(1)?)?.checked_add(row)
}

/// A 2D image of a [`Gpu`], which kernels work on in place.
pub struct Image {
    name: String,
    format: Format,
    pixels: Pixels,
    /// The first byte that is shared, and how many are.
    shared: (u64, u64),
    pub(crate) raw: Arc<RawImage>,
}

impl Image {
    pub(crate) fn new(
        gpu: &Gpu,
        name: &str,
        format: Format,
        size: [u32; 2],
        options: ImageOptions,
    ) -> Result<Self> {
        let (device, kind) = (gpu.device(), gpu.shares());
        let mut pixels = options.pixels(format, size).ok_or_else(|| {
            let [width, height] = size;
            let ImageOptions { levels, layers } = options;
            device.unsupported(format!(
                "an image of {width}x{height} pixels, {levels} levels and {layers:?} layers"
            ))
        })?;
        // A renderer on the processor shares rows, which kernels there take for a surface.
        let in_rows = kind != ExternalKind::OpaqueFd;
        if in_rows && options != ImageOptions::default() {
            return Err(device.unsupported("sharing an image of levels or layers, as it shares rows of one,"));
        }
        let raw = RawImage::new(device, sys::format(format), &pixels, in_rows, Place::Shared(kind))?;
        let shared = match raw.rows {
            Some((offset, pitch)) => {
                pixels.pitch = Some(pitch);
                (offset, row_bytes(&pixels, pitch).ok_or_else(|| device.unsupported("rows in each other"))?)
            }
            None => (0, raw.memory.as_ref().map_or(0, |memory| memory.bytes)),
        };
        let this = Self { name: name.to_owned(), format, pixels, shared, raw: Arc::new(raw) };
        let mut frame = gpu.frame()?;
        frame.begin(&this);
        frame.submit()?;
        Ok(this)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.raw.device
    }

    /// How its pixels are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Width and height.
    pub fn size(&self) -> [u32; 2] {
        self.pixels.size
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("name", &self.name)
            .field("format", &self.format)
            .field("pixels", &self.pixels)
            .finish_non_exhaustive()
    }
}

impl Shareable for Image {
    type Layout = Pixels;

    fn name(&self) -> &str {
        &self.name
    }

    fn layout(&self) -> Pixels {
        self.pixels
    }

    fn export(&self) -> Result<ExternalMemory> {
        let Some(memory) = &self.raw.memory else {
            return Err(self.device().unsupported("sharing an image without memory"));
        };
        let (fd, kind) = memory.export()?;
        let (allocation, dedicated, (offset, bytes)) = (memory.bytes, memory.dedicated, self.shared);
        Ok(ExternalMemory { fd, kind, allocation, offset, bytes, dedicated })
    }
}
