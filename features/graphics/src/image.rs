//! Images.

use std::fmt;
use std::sync::Arc;

use vm_accel::{Accelerator, Error, ExternalKind, ExternalMemory, Result, Shaped, Shareable, View};

use crate::format::Format;
use crate::gpu::Gpu;
use crate::sys::{Device, Place, RawBuffer, RawImage};

/// How the pixels of an image lie that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How each pixel is stored.
    pub format: Format,
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Bytes from one row to the next.
    pub pitch: u64,
}

impl Rows {
    /// Extents of the image as a kernel sees it whose elements are pixels: rows, and pixels of a row.
    pub fn extents(&self) -> [u64; 2] {
        [u64::from(self.height), u64::from(self.width)]
    }

    /// The rows of an image's memory as a kernel sees them whose elements are the numbers of pixels: rows, pixels of a row, numbers of
    /// a pixel.
    ///
    /// # Errors
    /// [`Error::Extents`].
    pub fn lanes<'a, A: Accelerator>(&self, memory: &'a vm_accel::Buffer<A>) -> Result<Shaped<'a, A>> {
        let [height, width] = self.extents();
        let (pixel, lanes) = (u64::from(self.format.bytes()), u64::from(self.format.lanes()));
        View::from(memory).of(self.format.element()).strided(&[height, width, lanes], &[self.pitch, pixel])
    }

    /// Rows that lie in so many bytes, and not in each other.
    pub(crate) fn checked(format: Format, [width, height]: [u64; 2], pitch: u64, bytes: u64) -> Option<Self> {
        let row = width.checked_mul(format.bytes().into()).filter(|row| *row > 0 && *row <= pitch)?;
        let end = pitch.checked_mul(height.checked_sub(1)?)?.checked_add(row)?;
        let (width, height) = (u32::try_from(width).ok()?, u32::try_from(height).ok()?);
        (end <= bytes).then_some(Self { format, width, height, pitch })
    }

    /// Bytes from the first pixel to behind the last.
    fn bytes(&self) -> u64 {
        self.pitch * u64::from(self.height - 1) + u64::from(self.width * self.format.bytes())
    }
}

/// A 2D image of a [`Gpu`], whose rows lie one behind the other for kernels.
pub struct Image {
    name: String,
    rows: Rows,
    pub(crate) store: Store,
}

/// Where an image is.
pub(crate) enum Store {
    /// In memory that is shared, with its first byte there.
    InPlace(Arc<RawImage>, u64),
    /// In memory of its own, and its rows, which are shared, in a buffer. A GPU may keep an image compressed, also one whose rows
    /// lie one behind the other, and does not see then what others wrote there.
    Beside { canvas: Arc<RawImage>, rows: Arc<RawBuffer> },
}

impl Store {
    /// What is rendered to.
    pub(crate) fn target(&self) -> &Arc<RawImage> {
        match self {
            Self::InPlace(image, _) | Self::Beside { canvas: image, .. } => image,
        }
    }
}

impl Image {
    pub(crate) fn new(gpu: &Gpu, name: &str, format: Format, size: [u32; 2]) -> Result<Self> {
        let [width, height] = size;
        let bytes = u64::from(width) * u64::from(height);
        if bytes == 0 {
            return Err(Error::OutOfRange { offset: 0, bytes, size: u64::MAX });
        }
        let (device, kind) = (gpu.device(), gpu.shares());
        let place = Place::Shared(kind);
        let in_place = match kind == ExternalKind::HostFd && !gpu.options().beside {
            true => RawImage::new(device, format.vulkan(), size, true, place),
            false => Err(device.unsupported("rendering in place")),
        };
        let (store, pitch) = match in_place {
            Ok(image) => {
                let (offset, pitch) = image.rows.ok_or_else(|| device.unsupported("images of rows"))?;
                (Store::InPlace(Arc::new(image), offset), pitch)
            }
            Err(Error::Unsupported { .. }) => {
                let pixel = u64::from(format.bytes());
                let pitch = (u64::from(width) * pixel).next_multiple_of(device.traits.row_alignment.max(64));
                let canvas = RawImage::new(device, format.vulkan(), size, false, Place::Device)?;
                let rows = RawBuffer::new(device, pitch * u64::from(height), place)?;
                (Store::Beside { canvas: Arc::new(canvas), rows: Arc::new(rows) }, pitch)
            }
            Err(error) => return Err(error),
        };
        let rows = Rows { format, width, height, pitch };
        let this = Self { name: name.to_owned(), rows, store };
        let mut frame = gpu.frame()?;
        frame.begin(&this);
        frame.submit()?;
        Ok(this)
    }

    /// Pixels from one row of the shared memory to the next.
    pub(crate) fn row(&self) -> u32 {
        (self.rows.pitch / u64::from(self.rows.format.bytes())) as u32
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.store.target().device
    }

    /// How its pixels are stored.
    pub fn format(&self) -> Format {
        self.rows.format
    }

    /// Width and height.
    pub fn size(&self) -> [u32; 2] {
        [self.rows.width, self.rows.height]
    }

    /// Whether the device renders into the memory that is shared; if not, it renders beside it and copies there, on the device.
    pub fn renders_in_place(&self) -> bool {
        matches!(self.store, Store::InPlace(..))
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("name", &self.name)
            .field("rows", &self.rows)
            .field("renders_in_place", &self.renders_in_place())
            .finish_non_exhaustive()
    }
}

impl Shareable for Image {
    type Layout = Rows;

    fn name(&self) -> &str {
        &self.name
    }

    fn layout(&self) -> Rows {
        self.rows
    }

    fn export(&self) -> Result<ExternalMemory> {
        let (memory, offset) = match &self.store {
            Store::InPlace(image, offset) => (&image.memory, *offset),
            Store::Beside { rows, .. } => (&rows.memory, 0),
        };
        let Some(memory) = memory else {
            return Err(self.device().unsupported("sharing an image without memory"));
        };
        let (fd, kind) = memory.export()?;
        let (allocation, dedicated) = (memory.bytes, memory.dedicated);
        Ok(ExternalMemory { fd, kind, allocation, offset, bytes: self.rows.bytes(), dedicated })
    }
}
