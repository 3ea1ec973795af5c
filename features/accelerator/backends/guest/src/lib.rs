//! The accelerator that the host shares with a Linux guest, as an [`Accelerator`](vm_accel::Accelerator) of the guest's programs:
//! workers, sessions, and what is written over them run in the guest as they do on the host.
//!
//! ```no_run
//! use std::sync::Arc;
//! use vm_accel::{Worker, WorkerOptions};
//! use vm_guest::GuestAccelerator;
//!
//! # fn main() -> vm_accel::Result<()> {
//! let accelerator = Arc::new(GuestAccelerator::new()?);
//! let worker = Worker::start(accelerator, WorkerOptions::default())?;
//! let x = worker.upload(&[1.0f32, 2.0])?;
//! # Ok(())
//! # }
//! ```
//!
//! # How it works
//! - A kernel is its module in the IR's binary form: the host validates, compiles and guards it. `vm-runtime` compiles for it so.
//! - All queues of a [`GuestAccelerator`] share one connection, which carries their operations in one order. What is given while
//!   the host has not answered the batch before is gathered, and goes as one batch with the answer; so small launches cost what their
//!   encoding does. Nothing but a wait asks for a fence.
//! - Memory of the device is a buffer of the host's. Its addresses are none that anybody reaches: they have the buffer's number
//!   above 40 bits of offset. Pinned memory is a part of the window, and has its address in this process.
//! - What fails on the host, as a launch that takes too long, the next wait says, in the words of the device's error log, to
//!   each queue that has given operations since the wait before. The operations behind one that is refused may not be begun.
//!
//! # What it has not
//! Unified and registered memory, and cancel flags: the host stops what takes longer than the guest's `deadline`. Events tell the
//! time at which this process hears of them.

mod accelerator;
mod address;
mod connection;
mod error;
mod kernel;
mod queue;
mod sys;

pub use accelerator::GuestAccelerator;
pub use kernel::GuestKernel;
pub use queue::{GuestEvent, GuestGraph, GuestQueue};
