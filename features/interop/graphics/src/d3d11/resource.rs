//! Buffers and textures.

use std::fmt;
use std::sync::Arc;

use strum::IntoEnumIterator as _;
use vm_accel::sys::BorrowedResource;
use vm_accel::{Accelerator, ExternalKind, ExternalMemory, OsHandle, Pixels, Result, Shareable, Worker};
use windows::Win32::Graphics::Direct3D11::{
    D3D11_RESOURCE_MISC_SHARED, D3D11_RESOURCE_MISC_SHARED_KEYEDMUTEX, D3D11_RESOURCE_MISC_SHARED_NTHANDLE,
    D3D11_USAGE, D3D11_USAGE_DEFAULT, ID3D11Buffer, ID3D11Resource, ID3D11Texture2D,
};

use super::gpu::Gpu;
use super::mutex::{KeyedMutex, MutexTurns};
use super::sys;
use crate::format::{Format, ImageOptions};

/// How a resource takes turns with a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Its memory is shared, and the fences of an [`Interop`](crate::Interop) say whose turn it is.
    Fence,
    /// Its memory is shared, and its own keyed mutex says whose turn it is: [`Texture::turns`], [`Buffer::turns`].
    KeyedMutex,
    /// Its memory is not shared: the accelerator's driver [maps](vm_accel::Registered::map_by_driver) it.
    Driver,
}

impl Sharing {
    /// What a resource is made with.
    pub(super) fn flags(self) -> u32 {
        let flags = match self {
            Self::Fence => D3D11_RESOURCE_MISC_SHARED.0 | D3D11_RESOURCE_MISC_SHARED_NTHANDLE.0,
            Self::KeyedMutex => {
                D3D11_RESOURCE_MISC_SHARED_KEYEDMUTEX.0 | D3D11_RESOURCE_MISC_SHARED_NTHANDLE.0
            }
            Self::Driver => 0,
        };
        flags as u32
    }

    /// What a resource was made for with such flags.
    fn of(flags: u32) -> Self {
        let has = |flag: i32| flags & flag as u32 != 0;
        match (has(D3D11_RESOURCE_MISC_SHARED_KEYEDMUTEX.0), has(D3D11_RESOURCE_MISC_SHARED.0)) {
            (true, _) => Self::KeyedMutex,
            (_, true) => Self::Fence,
            _ => Self::Driver,
        }
    }
}

/// What buffers and textures are to a worker.
pub(super) struct Shared {
    resource: ID3D11Resource,
    name: String,
    sharing: Sharing,
    /// Whether its handles are NT's.
    nt: bool,
    bytes: u64,
    mutex: Option<Arc<KeyedMutex>>,
    device: Arc<sys::Device>,
}

impl Shared {
    fn new(gpu: &Gpu, name: &str, resource: ID3D11Resource, usage: D3D11_USAGE, flags: u32) -> Result<Self> {
        gpu.0.owns(&resource)?;
        if usage != D3D11_USAGE_DEFAULT {
            return Err(gpu.0.unsupported("turns at a resource of another usage than D3D11_USAGE_DEFAULT"));
        }
        let (sharing, device) = (Sharing::of(flags), Arc::clone(&gpu.0));
        let mutex = match sharing {
            Sharing::KeyedMutex => Some(Arc::new(KeyedMutex::of(&resource, gpu.0.timeout)?)),
            _ => None,
        };
        let nt = flags & D3D11_RESOURCE_MISC_SHARED_NTHANDLE.0 as u32 != 0;
        Ok(Self { resource, name: name.to_owned(), sharing, nt, bytes: 0, mutex, device })
    }

    fn handle(&self) -> Result<OsHandle> {
        if self.sharing == Sharing::Driver {
            return Err(self.device.unsupported(format!("sharing {}, which the driver maps,", self.name)));
        }
        sys::share(&self.resource, self.nt)
    }

    fn export(&self) -> Result<ExternalMemory> {
        let (kind, bytes) = (ExternalKind::D3d11Resource, self.bytes);
        Ok(ExternalMemory { fd: self.handle()?, kind, allocation: bytes, offset: 0, bytes, dedicated: true })
    }

    fn driver_maps(&self) -> Option<BorrowedResource> {
        (self.sharing == Sharing::Driver).then(|| sys::lend(&self.resource))
    }

    fn turns<A: Accelerator>(&self, worker: &Worker<A>) -> Result<MutexTurns<A>> {
        let lacks = || self.device.unsupported(format!("turns by a mutex at {}, which has none,", self.name));
        let mutex = self.mutex.as_ref().ok_or_else(lacks)?;
        MutexTurns::new(worker, mutex, self.handle()?)
    }
}

macro_rules! resource {
    ($name:ident, $object:ident, $layout:ty) => {
        impl $name {
            /// The resource itself, for graphics.
            pub fn object(&self) -> &$object {
                &self.object
            }

            /// How it takes turns.
            pub fn sharing(&self) -> Sharing {
                self.shared.sharing
            }

            /// The turns of a worker at it by its keyed mutex. One worker has them at a time.
            ///
            /// # Errors
            /// [`Error::Unsupported`] without such a mutex; as [`Worker::link`].
            pub fn turns<A: Accelerator>(&self, worker: &Worker<A>) -> Result<MutexTurns<A>> {
                self.shared.turns(worker)
            }
        }

        impl Shareable for $name {
            type Layout = $layout;

            fn name(&self) -> &str {
                &self.shared.name
            }

            fn layout(&self) -> $layout {
                self.layout
            }

            fn export(&self) -> Result<ExternalMemory> {
                self.shared.export()
            }

            fn driver_maps(&self) -> Option<BorrowedResource> {
                self.shared.driver_maps()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("name", &self.shared.name)
                    .field("layout", &self.layout)
                    .field("sharing", &self.shared.sharing)
                    .finish_non_exhaustive()
            }
        }
    };
}

/// A buffer.
pub struct Buffer {
    object: ID3D11Buffer,
    layout: u64,
    shared: Shared,
}

resource!(Buffer, ID3D11Buffer, u64);

impl Buffer {
    /// One that the caller made; what it was made with says how it takes turns.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for one of another device, or for the host to write; the driver's.
    pub fn of(gpu: &Gpu, name: &str, buffer: ID3D11Buffer) -> Result<Self> {
        let told = sys::about_buffer(&buffer);
        let resource = buffer.clone().into();
        let mut shared = Shared::new(gpu, name, resource, told.Usage, told.MiscFlags)?;
        shared.bytes = told.ByteWidth.into();
        Ok(Self { object: buffer, layout: shared.bytes, shared })
    }
}

/// A 2D texture.
pub struct Texture {
    object: ID3D11Texture2D,
    format: Format,
    layout: Pixels,
    shared: Shared,
}

resource!(Texture, ID3D11Texture2D, Pixels);

impl Texture {
    /// One that the caller made; what it was made with says how it takes turns, and one of several slices has layers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for one of another device, for the host to write, of several samples, or of a format that no [`Format`] is; the
    /// driver's.
    pub fn of(gpu: &Gpu, name: &str, texture: ID3D11Texture2D) -> Result<Self> {
        let told = sys::about_texture(&texture);
        let format = Format::iter().find(|format| sys::dxgi(*format) == told.Format);
        let layers = Some(told.ArraySize).filter(|slices| *slices > 1);
        let options = ImageOptions { levels: told.MipLevels, layers };
        let found = format.filter(|_| told.SampleDesc.Count == 1);
        let pixels = found.and_then(|format| options.pixels(format, [told.Width, told.Height]));
        let (format, pixels) = found.zip(pixels).ok_or_else(|| {
            let (format, samples) = (told.Format.0, told.SampleDesc.Count);
            gpu.0.unsupported(format!("turns at a texture of DXGI format {format} and {samples} samples"))
        })?;
        Self::with(gpu, name, texture, (format, pixels))
    }

    pub(super) fn with(
        gpu: &Gpu,
        name: &str,
        texture: ID3D11Texture2D,
        (format, pixels): (Format, Pixels),
    ) -> Result<Self> {
        let told = sys::about_texture(&texture);
        let resource = texture.clone().into();
        let mut shared = Shared::new(gpu, name, resource, told.Usage, told.MiscFlags)?;
        // Direct3D does not tell how many there are; these are those that its pixels take.
        let pixel = u64::from(pixels.element.bytes() * pixels.lanes) * u64::from(told.ArraySize);
        let level = |level| pixels.size_of(level).map(u64::from).iter().product::<u64>();
        shared.bytes = (0..pixels.levels).map(level).sum::<u64>() * pixel;
        Ok(Self { object: texture, format, layout: pixels, shared })
    }

    /// How its pixels are stored.
    pub fn format(&self) -> Format {
        self.format
    }
}
