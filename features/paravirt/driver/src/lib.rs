//! The guest's side of the paravirtual accelerator: a client that hands over batches of [`vm_paravirt`]'s operations, over a
//! [`Transport`].
//!
//! For bare guests and unikernels that is the [`Virtqueue`]: it finds the device's registers through its PCI config space and
//! drives its queue. It has no standard library and allocates nothing: all memory that the device reads and writes is the
//! caller's. For programs of Linux guests, the cargo feature `linux` has a stream over vsock, and a window of memory.
//!
//! ```no_run
//! # use core::time::Duration;
//! # use vm_paravirt_guest::{Error, Frame, Platform, QueueMemory, Transport as _, Virtqueue};
//! # fn example(platform: impl Platform, request: &'static mut [u8], reply: &'static mut [u8]) -> Result<(), Error> {
//! static QUEUE: QueueMemory = QueueMemory::new();
//! let mut accelerator = Virtqueue::open(platform, &QUEUE)?;
//! let mut frame = Frame::new(request, reply);
//! let mut batch = frame.batch()?;
//! batch.create_buffer(1, 4096)?;
//! batch.fence()?;
//! let batch = batch.finish();
//! let frame = accelerator.call(frame, batch)?;
//! frame.reply()?.check().map_err(|(operation, status)| Error::Status { operation, status })?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Transport::submit`] and [`Transport::completed`] keep many batches under way at once.

#![no_std]

mod error;
mod frame;
#[cfg(feature = "linux")]
pub mod linux;
mod pci;
mod platform;
mod queue;
mod sys;
mod transport;
mod virtqueue;

#[cfg(any(test, feature = "linux"))]
extern crate std;

pub use error::Error;
pub use frame::Frame;
pub use platform::{Message, Platform};
pub use queue::{OUTSTANDING, QueueMemory};
pub use transport::{Completed, Transport};
pub use virtqueue::Virtqueue;
pub use vm_paravirt as protocol;
