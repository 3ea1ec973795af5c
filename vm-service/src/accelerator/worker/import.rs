//! A buffer of the guest's own memory.

use vm_accel::{Accelerator, Buffer, Worker};
use vm_paravirt::Range;

use super::ram::{Ram, Unfit};
use crate::accelerator::sys::Registered;

/// Guest memory that the accelerator reads and writes in place.
pub(super) struct Import<A: Accelerator>(Registered<A>);

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
        let registered = Registered::new(window, worker).map_err(ImportError::Accelerator)?;
        Ok((Self(registered), offset))
    }

    /// The buffer; `None` only while it is being freed.
    pub(super) fn buffer(&self) -> Option<&Buffer<A>> {
        self.0.buffer()
    }
}
