//! A worker and graphics on the same device, in turns.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use vm_accel::{Accelerator, Error, Link, RefusedResource, Registered, Result, Shareable, Worker};

use crate::frame::Frame;
use crate::gpu::{Gpu, GpuOptions};
use crate::timeline::Timeline;

/// A [`Gpu`] beside a worker of the same device, with the two timelines by which they take turns.
pub struct Interop<A: Accelerator> {
    link: Link<A>,
    worker: Worker<A>,
    /// What graphics signals, and the last value that it was to reach.
    graphics: Timeline,
    submitted: Mutex<u64>,
    /// What the worker signals.
    computed: Timeline,
    gpu: Gpu,
}

impl<A: Accelerator> fmt::Debug for Interop<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interop")
            .field("gpu", &self.gpu)
            .field("worker", &self.worker)
            .finish_non_exhaustive()
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

    /// Links a worker and a device that was opened [beside](Gpu::beside) its accelerator.
    ///
    /// # Errors
    /// As [`Worker::link`].
    pub fn over(worker: &Worker<A>, gpu: Gpu) -> Result<Self> {
        let (graphics, computed) = (gpu.timeline()?, gpu.timeline()?);
        let link = worker.link(graphics.export()?, computed.export()?)?;
        Ok(Self { link, worker: worker.clone(), graphics, submitted: Mutex::new(0), computed, gpu })
    }

    /// The device that renders.
    pub fn gpu(&self) -> &Gpu {
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
    pub fn timelines(&self) -> (&Timeline, &Timeline) {
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
                self.gpu = Gpu::beside(&**self.worker.accelerator(), self.gpu.options())?;
            }
            released => released?,
        }
        *self = Self::over(&self.worker, self.gpu.clone())?;
        Ok(())
    }

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
