//! Frames: what graphics does in one submission.

use std::fmt;
use std::sync::{Arc, PoisonError};

use vm_accel::{Accelerator, Error, Registered, Result, Shareable};

use crate::buffer::Buffer;
use crate::gpu::Gpu;
use crate::image::Image;
use crate::interop::Interop;
use crate::pattern::Pattern;
use crate::sys::{Place, RawBuffer, RawImage, RawTimeline, Recorder};
use crate::timeline::Timeline;

/// Commands of one submission. It borrows what it uses until it is submitted, so none of that can be mapped for kernels before.
///
/// ```compile_fail,E0505
/// # use vm_accel::{Accelerator, Error, Link, Registered};
/// # use vm_graphics::{Gpu, Image};
/// # fn main() {}
/// fn early<A: Accelerator>(gpu: &Gpu, link: &Link<A>, image: Registered<A, Image>) -> Result<(), Error> {
///     let mut frame = gpu.frame()?;
///     let target = frame.acquire(&image);
///     frame.clear(target, [0.0; 4]);
///     let mapped = image.map(link, 1)?;
///     frame.submit()?;
///     # drop(mapped);
///     Ok(())
/// }
/// ```
///
/// Dropping it without that does nothing of it.
#[must_use = "a frame does nothing until it is submitted"]
pub struct Frame<'a> {
    recorder: Recorder<'a>,
    /// What was taken from the other side, to be given back.
    images: Vec<&'a RawImage>,
    buffers: Vec<&'a RawBuffer>,
    /// The value of the worker's timeline from which on all of it is graphics'.
    ready: u64,
    gpu: &'a Gpu,
}

/// What a frame copies to the host.
#[must_use = "the bytes are read once the frame has run"]
pub struct Readback {
    raw: Arc<RawBuffer>,
}

impl Readback {
    /// The bytes, once the frame has run.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`].
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.raw.bytes as usize];
        let memory = self.raw.memory.as_ref().ok_or(Error::NotHostVisible { kind: "no" })?;
        memory.read(&mut bytes)?;
        Ok(bytes)
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readback").field("bytes", &self.raw.bytes).finish()
    }
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("ready", &self.ready).finish_non_exhaustive()
    }
}

/// Bytes of a level's pixels, row by row.
fn level_bytes(image: &Image, level: u32) -> u64 {
    let pixels = image.layout().size_of(level).map(u64::from);
    pixels.iter().product::<u64>() * u64::from(image.format().bytes())
}

impl<'a> Frame<'a> {
    pub(crate) fn new(gpu: &'a Gpu, recorder: Recorder<'a>) -> Self {
        Self { recorder, images: Vec::new(), buffers: Vec::new(), ready: 0, gpu }
    }

    /// Brings a new image into the layout that it keeps.
    pub(crate) fn begin(&mut self, image: &Image) {
        self.recorder.keep(Arc::clone(&image.raw) as _);
        self.recorder.image_owner(&image.raw, None);
        // From here on each frame takes it and gives it back.
        self.recorder.image_owner(&image.raw, Some(false));
    }

    /// A registered resource, for this frame, which begins when the worker has given it back.
    pub fn acquire<A: Accelerator, R: Shareable>(&mut self, registered: &'a Registered<A, R>) -> &'a R {
        self.ready = self.ready.max(registered.ready());
        registered.resource()
    }

    /// The value of the worker's timeline at which it begins.
    pub(crate) fn ready(&self) -> u64 {
        self.ready
    }

    fn take_image(&mut self, image: &'a Image) {
        let raw = &image.raw;
        if !self.images.iter().any(|taken| std::ptr::eq(*taken, &**raw)) {
            self.recorder.keep(Arc::clone(raw) as _);
            self.recorder.image_owner(raw, Some(true));
            self.images.push(raw);
        }
        self.recorder.order();
    }

    fn take_buffer(&mut self, buffer: &'a Buffer) {
        match buffer.shared {
            true => self.take_shared(&buffer.raw),
            false => self.recorder.keep(Arc::clone(&buffer.raw) as _),
        }
        self.recorder.order();
    }

    fn take_shared(&mut self, raw: &'a Arc<RawBuffer>) {
        if !self.buffers.iter().any(|taken| std::ptr::eq(*taken, &**raw)) {
            self.recorder.keep(Arc::clone(raw) as _);
            self.recorder.buffer_owner(raw, true);
            self.buffers.push(raw);
        }
    }

    /// Sets all of an image, each level and layer, to one color.
    pub fn clear(&mut self, image: &'a Image, color: [f32; 4]) {
        self.take_image(image);
        self.recorder.clear(&image.raw, color);
    }

    /// Draws the pattern of the frame with a number, in the first level and layer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an image of another format.
    pub fn draw(&mut self, pattern: &'a Pattern, image: &'a Image, number: u32) -> Result<()> {
        if pattern.format != image.format() {
            return Err(self.gpu.device().unsupported(format!(
                "a pattern for {} in an image of {}",
                pattern.format,
                image.format()
            )));
        }
        self.take_image(image);
        self.recorder.keep(Arc::clone(&pattern.pipeline) as _);
        self.recorder.draw(&pattern.pipeline, &image.raw, number);
        Ok(())
    }

    /// Sets every number of a buffer.
    pub fn fill(&mut self, buffer: &'a Buffer, value: u32) {
        self.take_buffer(buffer);
        self.recorder.fill(&buffer.raw, value);
    }

    /// Copies bytes from one buffer to another.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where either has no such bytes, or there are none.
    pub fn copy(
        &mut self,
        (from, from_offset): (&'a Buffer, u64),
        (to, to_offset): (&'a Buffer, u64),
        bytes: u64,
    ) -> Result<()> {
        for (buffer, offset) in [(from, from_offset), (to, to_offset)] {
            let size = buffer.bytes();
            if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > size) {
                return Err(Error::OutOfRange { offset, bytes, size });
            }
        }
        self.take_buffer(from);
        self.take_buffer(to);
        self.recorder.copy(&from.raw, &to.raw, [from_offset, to_offset, bytes]);
        Ok(())
    }

    /// Copies the pixels of an image's first level and layer to the host, row by row.
    ///
    /// # Errors
    /// The driver's.
    pub fn read_image(&mut self, image: &'a Image) -> Result<Readback> {
        self.read_part(image, 0, 0)
    }

    /// Copies the pixels of a level of a layer to the host, row by row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a level or a layer that it has not; the driver's.
    pub fn read_part(&mut self, image: &'a Image, level: u32, layer: u32) -> Result<Readback> {
        let pixels = image.layout();
        for (at, count) in [(level, pixels.levels), (layer, pixels.layers.unwrap_or(1))] {
            if at >= count {
                return Err(Error::OutOfRange { offset: at.into(), bytes: 1, size: count.into() });
            }
        }
        let raw = self.host_buffer(level_bytes(image, level))?;
        self.take_image(image);
        self.recorder.image_to_buffer(&image.raw, &raw, [level, layer]);
        self.recorder.show_host();
        Ok(Readback { raw })
    }

    /// Copies a buffer to the host.
    ///
    /// # Errors
    /// The driver's.
    pub fn read_buffer(&mut self, buffer: &'a Buffer) -> Result<Readback> {
        let raw = self.host_buffer(buffer.bytes())?;
        self.take_buffer(buffer);
        self.recorder.copy(&buffer.raw, &raw, [0, 0, buffer.bytes()]);
        self.recorder.show_host();
        Ok(Readback { raw })
    }

    /// Copies pixels of the host's, row by row, into the first level and layer of an image.
    ///
    /// # Errors
    /// [`Error::Lengths`]; the driver's.
    pub fn write_image(&mut self, image: &'a Image, pixels: &[u8]) -> Result<()> {
        let staged = self.staged(level_bytes(image, 0), pixels)?;
        self.take_image(image);
        self.recorder.buffer_to_image(&staged, &image.raw);
        Ok(())
    }

    /// Copies bytes of the host's into a buffer.
    ///
    /// # Errors
    /// [`Error::Lengths`]; the driver's.
    pub fn write_buffer(&mut self, buffer: &'a Buffer, bytes: &[u8]) -> Result<()> {
        let staged = self.staged(buffer.bytes(), bytes)?;
        self.take_buffer(buffer);
        self.recorder.copy(&staged, &buffer.raw, [0, 0, buffer.bytes()]);
        Ok(())
    }

    fn staged(&mut self, wanted: u64, bytes: &[u8]) -> Result<Arc<RawBuffer>> {
        if bytes.len() as u64 != wanted {
            return Err(Error::Lengths { source_bytes: bytes.len() as u64, destination_bytes: wanted });
        }
        let staged = self.host_buffer(wanted)?;
        let memory = staged.memory.as_ref().ok_or(Error::NotHostVisible { kind: "no" })?;
        memory.write(bytes)?;
        Ok(staged)
    }

    /// A buffer that the host reaches, kept until the frame has run.
    fn host_buffer(&mut self, bytes: u64) -> Result<Arc<RawBuffer>> {
        let raw = Arc::new(RawBuffer::new(self.gpu.device(), bytes, Place::Host)?);
        self.recorder.keep(Arc::clone(&raw) as _);
        Ok(raw)
    }

    /// Submits what uses nothing that is registered.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] for what is registered and has been mapped: that is submitted by
    /// [`Interop::submit`](crate::Interop::submit); [`Error::Lost`]; the driver's.
    pub fn submit(self) -> Result<()> {
        if self.ready > 0 {
            return Err(Error::OutOfOrder);
        }
        self.submit_with(&[], &[])
    }

    /// Submits it to begin when each of `waits` has reached its value, and to signal each of `signals`: for turns with another
    /// process, which has what it uses. Values of a timeline only grow.
    ///
    /// # Errors
    /// As [`Frame::submit`].
    pub fn submit_between(self, waits: &[(&Timeline, u64)], signals: &[(&Timeline, u64)]) -> Result<()> {
        if self.ready > 0 {
            return Err(Error::OutOfOrder);
        }
        let raw = |all: &[(&Timeline, u64)]| -> Vec<_> {
            all.iter().map(|(timeline, value)| (Arc::clone(&timeline.0), *value)).collect()
        };
        self.submit_with(&raw(waits), &raw(signals))
    }

    pub(crate) fn submit_with(
        self,
        waits: &[(Arc<RawTimeline>, u64)],
        signals: &[(Arc<RawTimeline>, u64)],
    ) -> Result<()> {
        self.recorder.order();
        for image in &self.images {
            self.recorder.image_owner(image, Some(false));
        }
        for buffer in &self.buffers {
            self.recorder.buffer_owner(buffer, false);
        }
        self.recorder.submit(waits, signals)
    }
}

impl<A: Accelerator> Interop<A> {
    /// Submits a frame. It begins when the worker has given back what it uses, and the result is the value of graphics'
    /// timeline when it has run, for [`Registered::map`]. Nobody waits on the host.
    ///
    /// # Errors
    /// [`Error::Lost`]; the driver's.
    pub fn submit(&self, frame: Frame<'_>) -> Result<u64> {
        let mut submitted = self.submitted.lock().unwrap_or_else(PoisonError::into_inner);
        let value = *submitted + 1;
        let waits = match frame.ready() {
            0 => None,
            ready => Some((Arc::clone(&self.computed.0), ready)),
        };
        frame.submit_with(waits.as_slice(), &[(Arc::clone(&self.graphics.0), value)])?;
        *submitted = value;
        Ok(value)
    }
}
