//! Memory and semaphores that another API shares with a device: Vulkan, Direct3D, or another process by way of them.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vm_abi::Element;

use crate::error::{Error, Result};

/// By what the system knows memory and semaphores that are shared: a file descriptor.
#[cfg(unix)]
pub type OsHandle = std::os::fd::OwnedFd;

/// By what the system knows memory and semaphores that are shared.
#[cfg(windows)]
#[derive(Debug)]
pub enum OsHandle {
    /// An NT handle.
    Nt(std::os::windows::io::OwnedHandle),
    /// A handle of the graphics kernel's own (KMT), which is nobody's to close: it is good as long as what it names is there.
    Kmt(usize),
}

/// What a descriptor of shared memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum ExternalKind {
    /// The driver's own; only drivers of the same device know what is in it.
    OpaqueFd,
    /// A buffer of the Linux kernel's dma-buf.
    DmaBuf,
    /// Host memory: a memfd that is sealed against shrinking, whose bytes are those of the memory.
    HostFd,
    /// A resource of Direct3D 11, by a handle of its own.
    D3d11Resource,
}

/// Memory that another API allocated, or a part of it, to be imported by [`Queue::import_memory`](crate::Queue::import_memory).
#[derive(Debug)]
pub struct ExternalMemory {
    /// The memory. Whoever imports it takes it.
    pub fd: OsHandle,
    /// What the descriptor is.
    pub kind: ExternalKind,
    /// The bytes of the whole allocation.
    pub allocation: u64,
    /// The first byte that the device is to reach.
    pub offset: u64,
    /// How many bytes it is to reach, at least 1.
    pub bytes: u64,
    /// Whether the allocation is for one resource alone, as the API calls it.
    pub dedicated: bool,
}

impl ExternalMemory {
    /// That the part lies in the allocation, and is not empty.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        let Self { allocation: size, offset, bytes, .. } = *self;
        match offset.checked_add(bytes) {
            Some(end) if bytes > 0 && end <= size => Ok(()),
            _ => Err(Error::OutOfRange { offset, bytes, size }),
        }
    }

    /// The error of a device that takes no such descriptors.
    pub fn refused(&self, device: &str) -> Error {
        Error::Unsupported { what: format!("memory shared as {}", self.kind), device: device.to_owned() }
    }
}

/// The pixels of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// What each number of a pixel is to a kernel.
    pub element: Element,
    /// Numbers of a pixel: 1, 2 or 4.
    pub lanes: u32,
    /// Width and height of the first level.
    pub size: [u32; 2],
    /// How many layers there are; none if kernels index no layer.
    pub layers: Option<u32>,
    /// How many levels there are, each half as wide and as high as the one before.
    pub levels: u32,
    /// Bytes from one row to the next, of an image of one level and no layers whose rows lie one behind the other; none if the
    /// pixels lie as the device likes.
    pub pitch: Option<u64>,
}

impl Pixels {
    /// Width and height of a level, of which there are fewer than 32.
    pub fn size_of(&self, level: u32) -> [u32; 2] {
        self.size.map(|side| side.checked_shr(level).unwrap_or(0).max(1))
    }

    /// Extents of a level as a kernel sees it: layers if there are any, rows, pixels of a row, numbers of a pixel.
    pub fn extents(&self, level: u32) -> Vec<u64> {
        let [width, height] = self.size_of(level);
        self.layers.into_iter().chain([height, width, self.lanes]).map(u64::from).collect()
    }
}

/// How the memory of a resource of graphics is laid out: its bytes, or [`Pixels`].
pub trait Layout: Copy + fmt::Debug + Send + Sync + 'static {
    /// The pixels of an image.
    fn pixels(&self) -> Option<Pixels>;
}

impl Layout for u64 {
    fn pixels(&self) -> Option<Pixels> {
        None
    }
}

impl Layout for Pixels {
    fn pixels(&self) -> Option<Pixels> {
        Some(*self)
    }
}

/// The host's side of a timeline semaphore: a number that only grows. Every wait for a value ends when it is reached.
pub trait Timeline: Send + Sync + 'static {
    /// Waits until `value` is reached; false if that did not happen by the deadline.
    ///
    /// # Errors
    /// The API's, as when its device is lost.
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool>;

    /// Sets the number to `value`, unless it has got so far already.
    ///
    /// # Errors
    /// The API's, as when its device is lost.
    fn signal(&self, value: u64) -> Result<()>;
}

/// A timeline of the host's own, at 0, for devices that wait and signal by the host's side.
#[derive(Debug, Default)]
pub struct HostTimeline {
    value: Mutex<u64>,
    changed: Condvar,
}

impl HostTimeline {
    /// How far it has come.
    pub fn value(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timeline for HostTimeline {
    fn wait(&self, value: u64, deadline: Instant) -> Result<bool> {
        let mut now = self.lock();
        while *now < value {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            now = self.changed.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    fn signal(&self, value: u64) -> Result<()> {
        let mut now = self.lock();
        *now = (*now).max(value);
        self.changed.notify_all();
        Ok(())
    }
}

/// What the descriptor of a semaphore is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum SemaphoreKind {
    /// Vulkan's timeline semaphore.
    Timeline,
    /// A fence of Direct3D 11, which is a timeline too.
    D3d11Fence,
    /// The keyed mutex of a resource of Direct3D 11. Its values are keys: to wait for one is to acquire the mutex once it was released
    /// with that key, for as long as the queue's timeout says, and to signal one is to release it with that key.
    D3d11KeyedMutex,
}

/// A semaphore of another API, to be imported by [`Queue::import_semaphore`](crate::Queue::import_semaphore).
pub struct ExternalSemaphore {
    /// The driver's descriptor of it, where the API gives one; whoever imports it takes it. Without one a device waits and
    /// signals by the host's side, if it has a thread for that.
    pub fd: Option<OsHandle>,
    /// What the descriptor is.
    pub kind: SemaphoreKind,
    /// The host's side of the same semaphore.
    pub host: Arc<dyn Timeline>,
}

impl ExternalSemaphore {
    /// A timeline that the host alone has.
    pub fn of_host(host: Arc<dyn Timeline>) -> Self {
        Self { fd: None, kind: SemaphoreKind::Timeline, host }
    }
}

impl fmt::Debug for ExternalSemaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalSemaphore")
            .field("fd", &self.fd)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

macro_rules! imported {
    ($($(#[$meta:meta])* $name:ident, $what:literal;)*) => {$(
        $(#[$meta])*
        pub struct $name(Box<dyn Any + Send + Sync>);

        impl $name {
            /// What is `imported` for an implementation of [`Queue`](crate::Queue).
            pub fn new(imported: impl Any + Send + Sync) -> Self {
                Self(Box::new(imported))
            }

            /// What the implementation made of it.
            ///
            /// # Errors
            /// [`Error::WrongWorker`] for one of an accelerator of another kind.
            pub fn imported<T: Any>(&self) -> Result<&T> {
                self.0.downcast_ref().ok_or(Error::WrongWorker { what: $what })
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

imported! {
    /// A semaphore that a queue has imported. Dropping it ends the import, behind all commands with it.
    Semaphore, "semaphore";
    /// A resource of graphics that a device's driver has registered, to map and unmap it in turns with the API that made it. Dropping it
    /// unregisters it, when nothing of it is mapped.
    DriverResource, "resource";
}
