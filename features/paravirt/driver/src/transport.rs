//! How batches reach the device, and replies come back.

use core::time::Duration;

use vm_paravirt::Config;

use crate::error::Error;
use crate::frame::Frame;

/// A batch that the device has answered, with its number.
pub type Completed<M> = (u16, Frame<M>);

/// A way to an accelerator that the host shares: its virtqueue, or a stream. Dropping it releases all that it has on the
/// device.
pub trait Transport: Sized {
    /// What frames are made of.
    type Memory: AsRef<[u8]> + AsMut<[u8]>;

    /// The device's configuration.
    fn config(&self) -> &Config;

    /// Hands over the batch of `bytes` bytes in a frame; [`completed`](Self::completed) gives the frame back, with the
    /// number that this answers, which no other batch under way has.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::FrameLength`], and the transport's own; the frame comes back with it.
    fn submit(
        &mut self,
        frame: Frame<Self::Memory>,
        bytes: usize,
    ) -> Result<u16, (Error, Frame<Self::Memory>)> {
        let number = self.offer(frame, bytes)?;
        self.notify();
        Ok(number)
    }

    /// As [`submit`](Self::submit), but the device may be notified of it only with [`notify`](Self::notify): many batches can
    /// share one notification.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::FrameLength`], and the transport's own; the frame comes back with it.
    fn offer(
        &mut self,
        frame: Frame<Self::Memory>,
        bytes: usize,
    ) -> Result<u16, (Error, Frame<Self::Memory>)>;

    /// Tells the device that there are new batches, if it does not know.
    fn notify(&self);

    /// A batch that the device has answered, if there is one, with its number.
    ///
    /// # Errors
    /// [`Error::NeedsReset`] when no answer will come any more.
    fn completed(&mut self) -> Result<Option<Completed<Self::Memory>>, Error>;

    /// Waits for a batch that the device has answered.
    ///
    /// # Errors
    /// [`Error::NeedsReset`]; [`Error::Late`] when none comes within twice the host's limit on a launch and 30 s, or none
    /// is under way: everything on the device is gone then.
    fn wait(&mut self) -> Result<Completed<Self::Memory>, Error>;

    /// Hands over a batch and waits for its reply; for programs that have one batch under way at a time.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`wait`](Self::wait).
    fn call(&mut self, frame: Frame<Self::Memory>, bytes: usize) -> Result<Frame<Self::Memory>, Error> {
        self.submit(frame, bytes).map_err(|(error, _)| error)?;
        self.wait().map(|(_, frame)| frame)
    }

    /// Ends all use of the device, and returns the frames that were under way, one by one, to `frames`.
    ///
    /// # Errors
    /// When the device does not let go; it may then still write to the frames, which are kept from it.
    fn close(self, frames: impl FnMut(Frame<Self::Memory>)) -> Result<(), Error>;
}

/// How long an answer may take: twice the host's limit on a launch, and some for what surrounds it.
pub(crate) fn timeout(config: &Config) -> Duration {
    Duration::from_micros(config.deadline_us.saturating_mul(2).min(1 << 40)) + Duration::from_secs(30)
}
