//! What the queues of a context share: memory, loaded images, tensor maps.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_accel::image::Images;
use vm_accel::{Arguments, Artifact, Error, MemoryKind, QueueOptions, Result};

use crate::queue::CudaKernel;
use crate::result::{Context, Device, Entered, Function, Maps, Module, OUT_OF_MEMORY, Pool, Stream, Surface};
use crate::sys::{Driver, Status};

/// What a queue must know of its device.
#[derive(Clone, Debug)]
pub(crate) struct Traits {
    pub(crate) name: String,
    pub(crate) unified: bool,
    pub(crate) host_registration: bool,
}

/// Bytes of unified memory that this process has allocated and not freed. A device whose unified memory is more than
/// its free memory can stop answering, to everybody.
static UNIFIED: AtomicU64 = AtomicU64::new(0);

/// The number of the next that has kernels loaded.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A number that no other of the process has, for what has kernels loaded.
pub(crate) fn number() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// One allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) kind: MemoryKind,
    pub(crate) host: u64,
    pub(crate) bytes: u64,
}

/// What the queues of a context share. It ends with the last of them.
pub(crate) struct Shared {
    /// No other of the process has it.
    pub(crate) number: u64,
    pub(crate) driver: &'static Driver,
    pub(crate) device: Device,
    pub(crate) traits: Traits,
    pub(crate) options: QueueOptions,
    /// What was allocated and not freed, by address.
    pub(crate) live: RefCell<HashMap<u64, Live>>,
    /// What of it is another API's: to drop it is to let go of it.
    pub(crate) imports: RefCell<HashMap<u64, Box<dyn Any>>>,
    /// The levels of images that were imported, by their handles.
    pub(crate) surfaces: RefCell<HashMap<u64, Surface>>,
    images: RefCell<Images<Module>>,
    maps: RefCell<Maps>,
    /// Set when the device did not finish in time: what it may still use is left to the end of the process.
    pub(crate) stuck: Cell<bool>,
    /// Made for the first allocation.
    pool: OnceCell<Pool>,
    pub(crate) context: Arc<Context>,
}

impl Shared {
    pub(crate) fn new(device: Device, traits: Traits, context: Context, options: &QueueOptions) -> Self {
        Self {
            number: number(),
            driver: context.driver(),
            device,
            traits,
            options: *options,
            live: RefCell::default(),
            imports: RefCell::default(),
            surfaces: RefCell::default(),
            images: RefCell::default(),
            maps: RefCell::default(),
            stuck: Cell::new(false),
            pool: OnceCell::new(),
            context: Arc::new(context),
        }
    }

    pub(crate) fn enter(&self) -> Result<Entered<'static>> {
        self.context.enter()
    }

    pub(crate) fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.traits.name.clone() }
    }

    pub(crate) fn pool(&self) -> Result<&Pool> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let pool = Pool::new(&self.context, self.device, self.options.keep_bytes)?;
        Ok(self.pool.get_or_init(|| pool))
    }

    /// Bytes that the pool holds, used or not.
    pub(crate) fn reserved(&self) -> Result<u64> {
        self.pool.get().map_or(Ok(0), Pool::reserved)
    }

    pub(crate) fn out_of(&self, kind: MemoryKind, bytes: u64, call: &'static str, status: Status) -> Error {
        if status != OUT_OF_MEMORY {
            return self.driver.error(call, status);
        }
        let (free, total) = self.driver.memory().unwrap_or((0, 0));
        Error::OutOfMemory { kind: kind.name(), bytes, free, total }
    }

    /// A kernel's arguments with its tensor maps; none for a kernel without. What does not belong together is refused.
    pub(crate) fn with_maps(&self, kernel: &CudaKernel, arguments: &Arguments) -> Result<Option<Arguments>> {
        kernel.check(self.number, arguments)?;
        arguments.with_maps(&kernel.artifact, |tensor| {
            let _entered = self.enter()?;
            let tensor = kernel.function.there(tensor, &kernel.artifact)?;
            self.maps.borrow_mut().of(self.driver, &tensor)
        })
    }

    /// The kernel of an artifact, whose image is loaded for the first of its kernels.
    pub(crate) fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        let _entered = self.enter()?;
        let mut images = self.images.borrow_mut();
        let module = images.take(artifact, || Module::load(self.driver, artifact))?;
        let function = Function::find(self.driver, module, artifact);
        drop(images);
        match function {
            Ok(function) => Ok(CudaKernel { function, context: self.number, artifact: artifact.clone() }),
            Err(error) => {
                if let Err(error) = self.give(artifact) {
                    tracing::debug!(%error, "a module was not unloaded");
                }
                Err(error)
            }
        }
    }

    /// Gives up a kernel that no command uses, and unloads its image with the last of its kernels.
    #[allow(unsafe_code)]
    pub(crate) fn give(&self, artifact: &Artifact) -> Result<()> {
        let module = self.images.borrow_mut().give(artifact);
        // SAFETY: all of its kernels were given up; whoever gives one up promises that no command uses it.
        module.map_or(Ok(()), |module| unsafe { module.unload(self.driver) })
    }

    /// Frees one allocation.
    ///
    /// # Safety
    /// It is among the live, and taken out of them if this succeeds. Commands that use it come before this one in the stream; if it is
    /// not the device's own, they have run.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn release(&self, address: u64, live: Live, stream: &Stream) -> Result<()> {
        let _entered = self.enter()?;
        match live.kind {
            // SAFETY: the queue's pool gave it; the caller promises the rest.
            MemoryKind::Device => unsafe { self.driver.free_async(address, stream) },
            // SAFETY: the driver gave it as pinned memory; the caller promises the rest.
            MemoryKind::Pinned => unsafe { self.driver.free_pinned(live.host) },
            MemoryKind::Unified => {
                // SAFETY: the driver gave it as unified memory; the caller promises the rest.
                unsafe { self.driver.free_unified(address) }?;
                UNIFIED.fetch_sub(live.bytes, Ordering::Relaxed);
                Ok(())
            }
            // SAFETY: it was registered here; the caller promises the rest.
            MemoryKind::Registered => unsafe { self.driver.unregister(live.host) },
            // Those are among the surfaces.
            MemoryKind::Surface => Err(Error::WrongWorker { what: "surface" }),
            MemoryKind::External => {
                drop(self.imports.borrow_mut().remove(&address));
                Ok(())
            }
        }
    }

    /// Allocates unified memory, if all of the process's fits into what is free on the device.
    pub(crate) fn allocate_unified(&self, bytes: u64) -> Result<u64> {
        let (free, total) = self.driver.memory()?;
        let fits = |used: u64| used.checked_add(bytes).filter(|all| *all <= free);
        UNIFIED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|_| Error::OutOfMemory {
            kind: MemoryKind::Unified.name(),
            bytes,
            free,
            total,
        })?;
        self.driver.allocate_unified(bytes).map_err(|status| {
            UNIFIED.fetch_sub(bytes, Ordering::Relaxed);
            self.out_of(MemoryKind::Unified, bytes, "cuMemAllocManaged", status)
        })
    }

    /// Frees and unloads all, by the last of the streams, which has ended what it was given.
    #[allow(unsafe_code)]
    pub(crate) fn end(&self, stream: &Stream) {
        for (address, live) in std::mem::take(&mut *self.live.borrow_mut()) {
            // SAFETY: it is no longer among the live; all commands have run, and there will be no more.
            if let Err(error) = unsafe { self.release(address, live, stream) } {
                tracing::debug!(%error, "memory was not freed");
            }
        }
        self.surfaces.borrow_mut().clear();
        let _entered = self.enter();
        for module in self.images.borrow_mut().drain() {
            // SAFETY: nobody launches its kernels any more; all commands have run.
            if let Err(error) = unsafe { module.unload(self.driver) } {
                tracing::debug!(%error, "a module was not unloaded");
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.stuck.get() {
            // Ending these would wait for the device, without a deadline.
            std::mem::forget(self.pool.take());
            std::mem::forget(std::mem::take(&mut *self.imports.borrow_mut()));
            std::mem::forget(std::mem::take(&mut *self.surfaces.borrow_mut()));
            std::mem::forget(Arc::clone(&self.context));
        }
    }
}
