//! A worker and graphics on the same device, in turns.

use std::fmt;
use std::sync::{Arc, Mutex};

use vm_accel::{
    Accelerator, Error, ExternalSemaphore, Link, RefusedResource, Registered, Result, Shareable, Worker,
};

#[cfg(windows)]
use crate::d3d11::Gpu;
#[cfg(unix)]
use crate::gpu::Gpu;

/// A device of graphics that takes turns with a worker: Vulkan's, or Direct3D's.
pub trait Graphics: Clone + fmt::Debug {
    /// Its timelines.
    type Timeline;

    /// A timeline at 0, and it for a worker to import.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it has none that can be shared; the driver's.
    fn shared_timeline(&self) -> Result<(Self::Timeline, ExternalSemaphore)>;

    /// Waits for all that was submitted, and lets go of what is kept for more of it.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Lost`].
    fn release(&self) -> Result<()>;

    /// The same device anew, after it was lost.
    ///
    /// # Errors
    /// The driver's; [`Error::Lost`] for one that is somebody else's to open.
    fn reopen<A: Accelerator>(&self, accelerator: &A) -> Result<Self>;
}

/// A device of graphics beside a worker of the same device, with the two timelines by which they take turns.
pub struct Interop<A: Accelerator, G: Graphics = Gpu> {
    link: Link<A>,
    worker: Worker<A>,
    /// What graphics signals, and the last value that it was to reach.
    pub(crate) graphics: G::Timeline,
    pub(crate) submitted: Mutex<u64>,
    /// What the worker signals.
    pub(crate) computed: G::Timeline,
    gpu: G,
}

impl<A: Accelerator, G: Graphics> fmt::Debug for Interop<A, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interop")
            .field("gpu", &self.gpu)
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

impl<A: Accelerator, G: Graphics> Interop<A, G> {
    /// Links a worker and a device that was opened [beside](Gpu::beside) its accelerator.
    ///
    /// # Errors
    /// As [`Graphics::shared_timeline`] and [`Worker::link`].
    pub fn over(worker: &Worker<A>, gpu: G) -> Result<Self> {
        let ((graphics, theirs), (computed, ours)) = (gpu.shared_timeline()?, gpu.shared_timeline()?);
        let link = worker.link(theirs, ours)?;
        Ok(Self { link, worker: worker.clone(), graphics, submitted: Mutex::new(0), computed, gpu })
    }

    /// The device that renders.
    pub fn gpu(&self) -> &G {
        &self.gpu
    }

    /// The worker.
    pub fn worker(&self) -> &Worker<A> {
        &self.worker
    }

    /// How they take turns, for [`Registered::map`].
    pub fn link(&self) -> &Link<A> {
        &self.link
    }

    /// The timeline that graphics signals, and the one that the worker does.
    pub fn timelines(&self) -> (&G::Timeline, &G::Timeline) {
        (&self.graphics, &self.computed)
    }

    /// Registers a buffer or an image with the worker.
    ///
    /// # Errors
    /// As [`Worker::register_resource`].
    pub fn register<R: Shareable>(&self, resource: R) -> Result<Registered<A, R>, Box<RefusedResource<R>>> {
        self.worker.register_resource(resource)
    }

    /// Lets go of all that both sides keep, in this order: what is registered, the worker's free memory, graphics' frames with what
    /// they use. Then both are ready to start anew, with timelines at 0; a side that is lost or has stopped is opened again, and
    /// kernels are to be loaded again on a new [`worker`](Self::worker). Nothing is left half done: who calls it again goes on.
    ///
    /// # Errors
    /// [`Error::Held`] as long as anything is registered, with its name and state; [`Error::Deadline`]; what a side that is lost fails
    /// with when it is opened again: a CUDA device is to be had in a new process only.
    pub fn reset(&mut self) -> Result<()> {
        let gone = |error: &Error| error.is_lost() || matches!(error, Error::Stopped);
        // What is unregistered only then is graphics' to let go.
        match self.worker.reset() {
            Err(error) if gone(&error) => {
                let ended = self.worker.stop(self.worker.options().queue.timeout);
                ended.or_else(|error| if error.is_lost() { Ok(()) } else { Err(error) })?;
                let (accelerator, options) = (Arc::clone(self.worker.accelerator()), self.worker.options());
                self.worker = Worker::start(accelerator, options.clone())?;
            }
            other => other?,
        }
        match self.gpu.release() {
            Err(error) if gone(&error) => {
                self.gpu = self.gpu.reopen(&**self.worker.accelerator())?;
            }
            released => released?,
        }
        *self = Self::over(&self.worker, self.gpu.clone())?;
        Ok(())
    }
}
