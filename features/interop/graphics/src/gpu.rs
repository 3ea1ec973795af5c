//! A device that renders, and reads back.

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::{Accelerator, Error, ExternalKind, ExternalSemaphore, Result, Worker};

use crate::buffer::Buffer;
use crate::format::{Format, ImageOptions};
use crate::frame::Frame;
use crate::image::Image;
use crate::interop::{Graphics, Interop};
use crate::parcel::receive_timeline;
use crate::pattern::Pattern;
use crate::sys::{Device, Instance, Physical, Place, Ring};
use crate::timeline::Timeline;

/// How a device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuOptions {
    /// How long anything may take that is waited for.
    pub timeout: Duration,
    /// Whether the validation layer watches, where it is installed.
    pub validate: bool,
    /// Whether memory is shared as [dma-bufs](ExternalKind::DmaBuf), and not as the accelerator likes best. The images have rows then, one
    /// level and no layers.
    pub dma_buf: bool,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), validate: false, dma_buf: false }
    }
}

/// A Vulkan device with one queue. Clones are the same device.
///
/// When the last clone is dropped, what was submitted is waited for, for as long as its options say, and let go of.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    ring: Ring,
    options: GpuOptions,
    /// How memory is shared with the accelerator on the same device.
    kind: ExternalKind,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.ring.end(Instant::now() + self.options.timeout);
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name())
            .field("shares", &self.0.kind)
            .finish_non_exhaustive()
    }
}

/// A UUID in its usual form.
pub(crate) fn shown(uuid: [u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let [a, b, c, d, e] = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
    format!("{a}-{b}-{c}-{d}-{e}")
}

impl Gpu {
    /// The Vulkan device that is the same as an accelerator: by its UUID, or the host's processor for the host's processor.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is no Vulkan, with what to install; [`Error::Host`] where no device is the same, with
    /// those that there are; [`Error::Unsupported`] for one that can't share or render; the driver's.
    pub fn beside<A: Accelerator>(accelerator: &A, options: GpuOptions) -> Result<Self> {
        let name = &accelerator.info().name;
        let kind = |best| if options.dma_buf { ExternalKind::DmaBuf } else { best };
        match accelerator.uuid()? {
            Some(uuid) => {
                let wanted = format!("{name} ({})", shown(uuid));
                Self::open(options, &wanted, kind(ExternalKind::OpaqueFd), |device| device.uuid == uuid)
            }
            None => {
                let wanted =
                    format!("{name}: a renderer on the host's processor, as mesa-vulkan-drivers has");
                Self::open(options, &wanted, kind(ExternalKind::HostFd), |device| device.software)
            }
        }
    }

    fn open(
        options: GpuOptions,
        wanted: &str,
        kind: ExternalKind,
        is: impl Fn(&Physical) -> bool,
    ) -> Result<Self> {
        let instance = Instance::new(options.validate)?;
        let devices = instance.devices()?;
        let Some(found) = devices.iter().find(|device| is(device)) else {
            let there: Vec<_> =
                devices.iter().map(|device| format!("{} ({})", device.name, shown(device.uuid))).collect();
            let there = if there.is_empty() { "there is none".to_owned() } else { there.join(", ") };
            return Err(Error::Host {
                what: "choosing a Vulkan device",
                cause: format!(
                    "none is {wanted}; found: {there}; check the driver's ICD and VK_DRIVER_FILES"
                ),
            });
        };
        let device = Device::new(instance, found.clone())?;
        let has = match kind {
            ExternalKind::OpaqueFd => device.traits.opaque_fd && device.traits.semaphore_fd,
            ExternalKind::DmaBuf => {
                device.traits.dma_buf && (device.physical.software || device.traits.semaphore_fd)
            }
            ExternalKind::HostFd => device.traits.host_memory,
            ExternalKind::D3d11Resource => false,
        };
        if !has {
            return Err(device.unsupported(format!("memory and timelines shared as {kind}")));
        }
        Ok(Self(Arc::new(Inner { ring: Ring::new(&device)?, options, kind })))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.0.ring.device
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.0.options.timeout
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.device().physical.name
    }

    /// The number by which other APIs know the device.
    pub fn uuid(&self) -> [u8; 16] {
        self.device().physical.uuid
    }

    /// How memory is shared with the accelerator.
    pub fn shares(&self) -> ExternalKind {
        self.0.kind
    }

    /// What the validation layer has said so far; none where it does not watch.
    pub fn messages(&self) -> Option<Vec<String>> {
        self.device().instance.messages()
    }

    /// A buffer that can be registered with a worker.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for 0 bytes or no multiple of 4; [`Error::Unsupported`]; the driver's.
    pub fn buffer(&self, name: &str, bytes: u64) -> Result<Buffer> {
        Buffer::new(self, name, bytes, Place::Shared(self.0.kind))
    }

    /// A buffer on the device that only Vulkan uses.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn private_buffer(&self, name: &str, bytes: u64) -> Result<Buffer> {
        Buffer::new(self, name, bytes, Place::Device)
    }

    /// An image that can be registered with a worker, of one level and without layers.
    ///
    /// # Errors
    /// As [`Gpu::image_with`].
    pub fn image(&self, name: &str, format: Format, size: [u32; 2]) -> Result<Image> {
        self.image_with(name, format, size, ImageOptions::default())
    }

    /// The same with levels and layers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for one without pixels, of more levels than halve its size to one pixel, or that the device does not have or
    /// can't share; the driver's.
    pub fn image_with(
        &self,
        name: &str,
        format: Format,
        size: [u32; 2],
        options: ImageOptions,
    ) -> Result<Image> {
        Image::new(self, name, format, size, options)
    }

    /// The pattern that tests and examples draw, for images of a format.
    ///
    /// # Errors
    /// The driver's.
    pub fn pattern(&self, format: Format) -> Result<Pattern> {
        Pattern::new(self.device(), format)
    }

    /// A timeline at 0.
    ///
    /// # Errors
    /// The driver's.
    pub fn timeline(&self) -> Result<Timeline> {
        Timeline::new(self.device())
    }

    /// A timeline of the same device that another process [sent](Timeline::send); none at the end of the connection.
    ///
    /// # Errors
    /// [`Error::Host`] when the socket fails, and for what is no timeline of the device; the driver's.
    pub fn receive_timeline(&self, socket: &UnixStream) -> Result<Option<Timeline>> {
        let fd = receive_timeline(socket, self.uuid())?;
        fd.map(|fd| Timeline::import(self.device(), fd)).transpose()
    }

    /// A frame to record. It waits as long as too many are on their way.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Lost`]; the driver's.
    pub fn frame(&self) -> Result<Frame<'_>> {
        Ok(Frame::new(self, self.0.ring.record(self.deadline())?))
    }

    /// Waits for all that was submitted.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Lost`].
    pub fn finish(&self) -> Result<()> {
        self.0.ring.finish(self.deadline())
    }

    /// How it was opened.
    pub fn options(&self) -> GpuOptions {
        self.0.options
    }

    /// An image's pixels, row by row, once all that was submitted has run.
    ///
    /// # Errors
    /// [`Error::Deadline`]; the driver's.
    pub fn read_image(&self, image: &Image) -> Result<Vec<u8>> {
        let mut frame = self.frame()?;
        let read = frame.read_image(image)?;
        frame.submit()?;
        self.finish()?;
        read.bytes()
    }

    /// A buffer's bytes, once all that was submitted has run.
    ///
    /// # Errors
    /// [`Error::Deadline`]; the driver's.
    pub fn read_buffer(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let mut frame = self.frame()?;
        let read = frame.read_buffer(buffer)?;
        frame.submit()?;
        self.finish()?;
        read.bytes()
    }
}

impl Graphics for Gpu {
    type Timeline = Timeline;

    fn shared_timeline(&self) -> Result<(Timeline, ExternalSemaphore)> {
        let timeline = self.timeline()?;
        let shared = timeline.export()?;
        Ok((timeline, shared))
    }

    fn release(&self) -> Result<()> {
        self.0.ring.release(self.deadline())
    }

    fn reopen<A: Accelerator>(&self, accelerator: &A) -> Result<Self> {
        Self::beside(accelerator, self.options())
    }
}

impl<A: Accelerator> Interop<A> {
    /// Opens the Vulkan device that the worker's accelerator is, and links them.
    ///
    /// # Errors
    /// As [`Gpu::beside`] and [`Worker::link`].
    pub fn open(worker: &Worker<A>, options: GpuOptions) -> Result<Self> {
        Self::over(worker, Gpu::beside(&**worker.accelerator(), options)?)
    }
}
