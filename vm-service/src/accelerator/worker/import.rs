//! A buffer of the guest's own memory.

use vm_accel::{Accelerator, Buffer, Worker};
use vm_paravirt::Range;

use super::ram::{Ram, Unfit};
use crate::accelerator::sys::Window;

/// Guest memory that the accelerator reads and writes in place.
pub(super) struct Import<A: Accelerator> {
    /// Taken when it is freed.
    inner: Option<(Buffer<A>, Window)>,
    worker: Worker<A>,
}

/// Why guest memory was not imported.
#[derive(Debug)]
pub(super) enum ImportError {
    Unfit(Unfit),
    Accelerator(vm_accel::Error),
}

impl<A: Accelerator> Import<A> {
    /// Imports ranges. Answers also where in the buffer they begin: its pages are whole.
    pub(super) fn new(
        worker: &Worker<A>,
        ram: &Ram,
        ranges: impl Iterator<Item = Range>,
    ) -> Result<(Self, u64), ImportError> {
        let (window, offset) = ram.window(ranges).map_err(ImportError::Unfit)?;
        let buffer = window.register(worker).map_err(ImportError::Accelerator)?;
        Ok((Self { inner: Some((buffer, window)), worker: worker.clone() }, offset))
    }

    /// The buffer; `None` only while it is being freed.
    pub(super) fn buffer(&self) -> Option<&Buffer<A>> {
        self.inner.as_ref().map(|(buffer, _)| buffer)
    }
}

impl<A: Accelerator> Drop for Import<A> {
    fn drop(&mut self) {
        let Some((buffer, window)) = self.inner.take() else { return };
        // Memory that the accelerator may still use stays mapped until the process ends.
        if let Err(error) = self.worker.free(buffer) {
            tracing::warn!(%error, "the guest's memory was not given back by the accelerator");
            window.leak();
        }
    }
}
