//! Kernels for a library whose callers own everything else: context, streams, memory.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_accel::image::Images;
use vm_accel::{Arguments, Artifact, Grid, Result, Tensor};

use crate::context::number;
use crate::queue::CudaKernel;
use crate::result::{Context, Function, Maps, Module};
use crate::sys::{BorrowedStream, driver};

pub use crate::result::{Allocation, Entered, Place};

/// The kernels of a context. Any thread loads them, and launches them on any stream of the context, at the same time as others. It has
/// no stream, no memory and no thread of its own, and waits for nothing but the loading of a kernel.
///
/// What is loaded stays until the context ends: only its owner knows when no launch runs any more.
pub struct CudaLauncher {
    /// No other of the process has it.
    number: u64,
    images: Mutex<Images<Module>>,
    maps: Mutex<Maps>,
    context: Arc<Context>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaLauncher {
    pub(crate) fn new(context: Context) -> Self {
        let (images, maps) = Default::default();
        Self { number: number(), images, maps, context: Arc::new(context) }
    }

    /// The calling thread's current context; none if it has none.
    ///
    /// # Errors
    /// [`Error::Unavailable`](vm_accel::Error::Unavailable) where there is no driver; the driver's.
    pub fn current() -> Result<Option<Place>> {
        driver()?.place()
    }

    /// The number of the current context's device, in CUDA's order.
    ///
    /// # Errors
    /// As [`current`](Self::current); the driver's where there is none.
    pub fn current_device() -> Result<u32> {
        driver()?.current_device()
    }

    /// Loads a kernel. Streams that are captured, by whichever thread, do not keep it from that, and are not spoilt.
    ///
    /// # Errors
    /// [`Error::Load`](vm_accel::Error::Load); the driver's.
    pub fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        let _entered = self.context.enter()?;
        let driver = self.context.driver();
        let mut images = lock(&self.images);
        let _relaxed = driver.relax_captures()?;
        let module = images.take(artifact, || Module::load(driver, artifact))?;
        let function = Function::find(driver, module, artifact)?;
        Ok(CudaKernel { function, context: self.number, artifact: artifact.clone() })
    }

    /// Makes its context the calling thread's current one, which was `before` until now, as [`current`](Self::current) tells.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn enter(&self, before: Option<Place>) -> Result<Entered<'static>> {
        self.context.enter_from(before.map_or(ptr::null_mut(), |place| place.context))
    }

    /// The tensor map of a view that a kernel copies by one.
    ///
    /// # Errors
    /// The view has no elements, and the kernel's module nothing in their place; the driver's.
    pub fn map(&self, _entered: &Entered<'_>, kernel: &CudaKernel, tensor: &Tensor) -> Result<[u64; 16]> {
        let tensor = kernel.function.there(tensor, &kernel.artifact)?;
        lock(&self.maps).of(self.context.driver(), &tensor)
    }

    /// Launches a kernel on a stream. The grid was checked against the device's limits.
    ///
    /// # Errors
    /// [`Error::WrongWorker`](vm_accel::Error::WrongWorker) for another's kernel, [`Error::Arguments`](vm_accel::Error::Arguments) for
    /// arguments of another kernel; the driver's.
    ///
    /// # Safety
    /// The calling thread has entered the context. Until the kernel has ended, the memory that its arguments name is there, and they have its
    /// tensor maps. The kernel can't be stopped, or its cancel flag was set in the arguments.
    #[allow(unsafe_code)]
    pub unsafe fn launch(
        &self,
        _entered: &Entered<'_>,
        kernel: &CudaKernel,
        grid: Grid,
        arguments: &Arguments,
        stream: &BorrowedStream,
    ) -> Result<()> {
        kernel.check(self.number, arguments)?;
        // SAFETY: the kernel is loaded in this context, where it stays; the caller promises the rest.
        unsafe { self.context.driver().launch(&kernel.function, grid, arguments, stream.handle()) }
    }

    /// What memory an address is in; none if the driver knows of none there, as of a host's that is not registered.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocation(&self, _entered: &Entered<'_>, address: u64) -> Result<Option<Allocation>> {
        self.context.driver().allocation(address, self.context.handle())
    }
}
