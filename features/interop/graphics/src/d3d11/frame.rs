//! What Direct3D does between two turns of a worker.

use std::fmt;
use std::sync::PoisonError;

use vm_accel::{Accelerator, Registered, Result, Shareable};

use super::gpu::Gpu;
use crate::interop::Interop;

/// What the caller gives the immediate context in one turn. It borrows what it uses until it is submitted, so none of that can be mapped
/// for kernels before.
///
/// What the context was given stays given when this is dropped.
#[must_use = "the worker waits for what is submitted"]
pub struct Frame<'a, A: Accelerator> {
    interop: &'a Interop<A, Gpu>,
    /// What the context waits for already.
    ready: u64,
}

impl<A: Accelerator> fmt::Debug for Frame<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("ready", &self.ready).finish_non_exhaustive()
    }
}

impl<A: Accelerator> Interop<A, Gpu> {
    /// A turn of Direct3D's.
    pub fn frame(&self) -> Frame<'_, A> {
        Frame { interop: self, ready: 0 }
    }
}

impl<'a, A: Accelerator> Frame<'a, A> {
    /// A registered resource that takes turns by fences, for what the context is given from here on: the device begins it when the worker
    /// has given the resource back.
    ///
    /// # Errors
    /// [`Error::Lost`](vm_accel::Error::Lost); the driver's.
    pub fn acquire<R: Shareable>(&mut self, registered: &'a Registered<A, R>) -> Result<&'a R> {
        if registered.ready() > self.ready {
            self.interop.computed.0.wait_on_device(registered.ready())?;
            self.ready = registered.ready();
        }
        Ok(registered.resource())
    }

    /// Ends the turn. The result is the value of graphics' fence when the device has done what the context was given, for
    /// [`Registered::map`]. Nobody waits on the host.
    ///
    /// # Errors
    /// As [`Frame::acquire`].
    pub fn submit(self) -> Result<u64> {
        let mut submitted = self.interop.submitted.lock().unwrap_or_else(PoisonError::into_inner);
        let value = *submitted + 1;
        self.interop.graphics.0.signal_on_device(value)?;
        *submitted = value;
        Ok(value)
    }
}
