//! The accelerator as a guest's program uses it.

use vm_paravirt::Config;

use crate::error::Error;
use crate::frame::Frame;
use crate::platform::Platform;
use crate::queue::QueueMemory;
use crate::transport::{Completed, Transport};
use crate::virtqueue::Virtqueue;

/// An accelerator that the host shares. Dropping it releases all that it has on the device.
#[derive(Debug)]
pub struct Accelerator<T: Transport> {
    transport: T,
}

impl<P: Platform> Accelerator<Virtqueue<P>> {
    /// Opens the device behind a PCI function, with memory for its queue that nothing else uses.
    ///
    /// # Errors
    /// When the function is another device, has another version of the protocol, or does not follow virtio.
    pub fn open(platform: P, memory: &'static QueueMemory) -> Result<Self, Error> {
        Virtqueue::open(platform, memory).map(Self::over)
    }

    /// The machine.
    pub fn platform(&self) -> &P {
        self.transport.platform()
    }

    /// Whether buffers over the guest's memory are used in place.
    pub fn imports(&self) -> bool {
        self.transport.imports()
    }

    /// Whether the device has given up and must be reset, by dropping this and opening it again.
    pub fn needs_reset(&self) -> bool {
        self.transport.needs_reset()
    }
}

impl<T: Transport> Accelerator<T> {
    /// The accelerator that a transport leads to.
    pub fn over(transport: T) -> Self {
        Self { transport }
    }

    /// The way to the device.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// The device's configuration.
    pub fn config(&self) -> &Config {
        self.transport.config()
    }

    /// Hands over the batch of `bytes` bytes in a frame; [`completed`](Self::completed) gives the frame back.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::FrameLength`], and the transport's own; the frame comes back with it.
    pub fn submit(
        &mut self,
        frame: Frame<T::Memory>,
        bytes: usize,
    ) -> Result<u16, (Error, Frame<T::Memory>)> {
        let number = self.offer(frame, bytes)?;
        self.notify();
        Ok(number)
    }

    /// As [`submit`](Self::submit), but the device is told of it only with [`notify`](Self::notify): many batches can
    /// share one notification.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn offer(&mut self, frame: Frame<T::Memory>, bytes: usize) -> Result<u16, (Error, Frame<T::Memory>)> {
        self.transport.offer(frame, bytes)
    }

    /// Tells the device that there are new batches, if it wants to know.
    pub fn notify(&self) {
        self.transport.notify();
    }

    /// A batch that the device has answered, with the number that [`submit`](Self::submit) gave it.
    ///
    /// # Errors
    /// [`Error::NeedsReset`] when no answer will come any more.
    pub fn completed(&mut self) -> Result<Option<Completed<T::Memory>>, Error> {
        self.transport.completed()
    }

    /// Waits for a batch that the device has answered.
    ///
    /// # Errors
    /// [`Error::NeedsReset`]; [`Error::Late`] when none comes within twice the host's limit on a launch and 30 s, or
    /// none is under way: everything on the device is gone then.
    pub fn wait(&mut self) -> Result<Completed<T::Memory>, Error> {
        self.transport.wait()
    }

    /// Hands over a batch and waits for its reply; for programs that have one batch under way at a time.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`wait`](Self::wait).
    pub fn call(&mut self, frame: Frame<T::Memory>, bytes: usize) -> Result<Frame<T::Memory>, Error> {
        self.submit(frame, bytes).map_err(|(error, _)| error)?;
        self.wait().map(|(_, frame)| frame)
    }

    /// Releases all that it has on the device, and gives back the frames that were under way, one by one, to `frames`.
    ///
    /// # Errors
    /// When the device does not let go; it may then still write to the frames, which are kept from it.
    pub fn close(self, frames: impl FnMut(Frame<T::Memory>)) -> Result<(), Error> {
        self.transport.close(frames)
    }
}
