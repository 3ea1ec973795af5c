//! The caller's device, and its fences.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::{Accelerator, Error, ExternalSemaphore, Result, SemaphoreKind};
use windows::Win32::Graphics::Direct3D11::{ID3D11Device, ID3D11DeviceContext};

use super::resource::{Buffer, Sharing, Texture};
use super::sys;
use crate::format::{Format, ImageOptions};
use crate::interop::Graphics;

/// A Direct3D device of the caller's, with its immediate context. Clones are the same device.
#[derive(Clone)]
pub struct Gpu(pub(super) Arc<sys::Device>);

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name())
            .field("shares", &self.shares())
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// A device that is the same as an accelerator, by the number (LUID) of its adapter. Its context is protected for several threads
    /// from here on; `timeout` is how long anything may take that is waited for.
    ///
    /// # Errors
    /// [`Error::Host`] for one of another adapter; [`Error::Unsupported`] for one that was made for a single thread; the driver's.
    pub fn beside<A: Accelerator>(accelerator: &A, device: ID3D11Device, timeout: Duration) -> Result<Self> {
        let device = sys::Device::new(device, timeout)?;
        let shown = |luid: [u8; 8]| format!("{:#018x}", u64::from_le_bytes(luid));
        match accelerator.luid()? {
            Some(luid) if luid == device.luid => Ok(Self(Arc::new(device))),
            luid => Err(Error::Host {
                what: "choosing a Direct3D device",
                cause: format!(
                    "it is one of {} ({}), the accelerator is {} ({}); make it for the adapter of that LUID",
                    device.name,
                    shown(device.luid),
                    accelerator.info().name,
                    luid.map_or_else(|| "no adapter of Windows".to_owned(), shown)
                ),
            }),
        }
    }

    /// The adapter's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The number by which Windows knows the adapter.
    pub fn luid(&self) -> [u8; 8] {
        self.0.luid
    }

    /// The context by which the caller draws.
    pub fn context(&self) -> &ID3D11DeviceContext {
        &self.0.context
    }

    /// How textures take turns best: by fences where the device has them.
    pub fn shares(&self) -> Sharing {
        if self.0.has_fences() { Sharing::Fence } else { Sharing::Driver }
    }

    /// A buffer that can be registered with a worker. Direct3D's manual has only textures shared, so [`Sharing::Driver`] is what both it and
    /// CUDA's promise.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for 0 bytes or no multiple of 4; the driver's.
    pub fn buffer(&self, name: &str, bytes: u64, sharing: Sharing) -> Result<Buffer> {
        let fits = u32::try_from(bytes).ok().filter(|bytes| *bytes > 0 && bytes.is_multiple_of(4));
        let fits = fits.ok_or(Error::OutOfRange { offset: 0, bytes, size: u64::from(!3u32) })?;
        Buffer::of(self, name, self.0.buffer(fits, sharing.flags())?)
    }

    /// A texture that can be registered with a worker. One with levels or layers takes turns by the driver: others are not to be shared, says
    /// Direct3D's manual of most drivers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for one without pixels, or of more levels than halve its size to one pixel; the driver's.
    pub fn texture(
        &self,
        name: &str,
        format: Format,
        size: [u32; 2],
        options: ImageOptions,
        sharing: Sharing,
    ) -> Result<Texture> {
        let ImageOptions { levels, layers } = options;
        let [width, height] = size;
        let pixels = options.pixels(format, size).ok_or_else(|| {
            self.0
                .unsupported(format!("a texture of {width}x{height}, {levels} levels and {layers:?} layers"))
        })?;
        let made = self.0.texture(format, size, [levels, layers.unwrap_or(1)], sharing.flags())?;
        Texture::with(self, name, made, (format, pixels))
    }

    /// A fence at 0.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has none; the driver's.
    pub fn fence(&self) -> Result<Fence> {
        sys::Fence::new(&self.0).map(|fence| Fence(Arc::new(fence)))
    }
}

impl Graphics for Gpu {
    type Timeline = Fence;

    fn shared_timeline(&self) -> Result<(Fence, ExternalSemaphore)> {
        let fence = self.fence()?;
        let (fd, kind) = (Some(fence.0.export()?), SemaphoreKind::D3d11Fence);
        Ok((fence.clone(), ExternalSemaphore { fd, kind, host: Arc::new(fence) }))
    }

    fn release(&self) -> Result<()> {
        let fence = self.fence()?;
        fence.0.signal_on_device(1)?;
        match fence.0.wait(1, self.0.deadline())? {
            true => Ok(()),
            false => Err(Error::Deadline { what: "what Direct3D was given".into() }),
        }
    }

    fn reopen<A: Accelerator>(&self, _: &A) -> Result<Self> {
        let cause = format!("the Direct3D device of {} is the caller's to make anew", self.name());
        Err(Error::Lost { cause })
    }
}

/// A fence of a [`Gpu`]: a number that only grows. Clones are the same fence.
#[derive(Clone)]
pub struct Fence(pub(super) Arc<sys::Fence>);

impl Fence {
    /// How far it has come.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn value(&self) -> Result<u64> {
        self.0.value()
    }
}

impl vm_accel::Timeline for Fence {
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        self.0.wait(value, deadline)
    }

    fn signal(&self, value: u64) -> Result<()> {
        self.0.signal(value)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("value", &self.value()).finish()
    }
}
