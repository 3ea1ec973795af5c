//! For programs of a Linux guest, whose Linux kernel has no driver for the device: batches go over vsock, and data lies in
//! a window of memory that the program, the host and the accelerator share.
//!
//! ```no_run
//! use vm_paravirt_guest::Transport as _;
//! use vm_paravirt_guest::linux::Device;
//!
//! let device = Device::find()?;
//! let memory = device.window()?.take(4096)?;
//! let mut accelerator = device.connect()?;
//! memory.write(0, &1.0f32.to_le_bytes())?;
//! let mut frame = accelerator.frame();
//! let mut batch = frame.batch()?;
//! batch.import_buffer(1, &[memory.range(0, 4)?])?;
//! batch.fence()?;
//! let bytes = batch.finish();
//! frame = accelerator.call(frame, bytes)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! On an NPU a [`Model`] does all that for one graph.

mod device;
mod model;
mod stream;
mod sys;
mod window;

pub use device::Device;
pub use model::{Array, Model, ModelError};
pub use stream::Stream;
pub use window::{Part, Window};

use crate::Error;

/// An error of the Linux kernel, at `what`.
fn system(what: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::System { what, errno: error.raw_os_error().unwrap_or(0) }
}
