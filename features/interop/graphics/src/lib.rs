//! Buffers and images that Vulkan and an accelerator's worker use in turns: no copy and no wait by the host.
//!
//! [`Interop`] is both sides of one device. Graphics records a [`Frame`] with what is
//! [`Registered`](vm_accel::Registered), and submits it; the worker maps that for kernels, launches them, and unmaps it; the
//! next frame sees what they wrote. Each step is queued at once and begins when the step before it has ended, by timeline
//! semaphores on the device.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//! use vm_accel::{Accelerator, Artifact, Error, Worker, WorkerOptions, arguments};
//! use vm_graphics::{Format, GpuOptions, Interop};
//!
//! fn one_frame<A: Accelerator>(accelerator: Arc<A>, kernel: &Artifact) -> Result<Vec<u8>, Error> {
//!     let worker = Worker::start(accelerator, WorkerOptions::default())?;
//!     let kernel = &worker.load(kernel)?;
//!     let interop = Interop::open(&worker, GpuOptions::default())?;
//!     let pattern = interop.gpu().pattern(Format::Rgba8Unorm)?;
//!     let image = interop.register(interop.gpu().image("frame", Format::Rgba8Unorm, [640, 480])?)?;
//!     let mut frame = interop.gpu().frame()?;
//!     let target = frame.acquire(&image);
//!     frame.draw(&pattern, target, 1)?;
//!     let rendered = interop.submit(frame)?;
//!     let mapped = image.map(interop.link(), rendered)?;
//!     worker.launch(kernel, [10, 480], &arguments![mapped.surface(0)?])?;
//!     let image = mapped.unmap()?.unregister()?;
//!     interop.gpu().read_image(&image)
//! }
//! ```
//!
//! Building needs no Vulkan; running needs its loader, `libvulkan.so.1`, and a driver. Where one is missing, the error says which
//! package has it. On Windows it is Direct3D 11 instead: `d3d11`, whose images and buffers are the caller's device's.

#[cfg(unix)]
mod buffer;
#[cfg(windows)]
pub mod d3d11;
mod format;
#[cfg(unix)]
mod frame;
#[cfg(unix)]
mod gpu;
#[cfg(unix)]
mod image;
mod interop;
#[cfg(unix)]
mod parcel;
#[cfg(unix)]
mod pattern;
#[cfg(unix)]
mod sys;
#[cfg(unix)]
mod timeline;

pub use format::{Format, ImageOptions};
pub use interop::{Graphics, Interop};
#[cfg(unix)]
pub use {
    buffer::Buffer,
    frame::{Frame, Readback},
    gpu::{Gpu, GpuOptions},
    image::Image,
    parcel::Foreign,
    pattern::Pattern,
    timeline::Timeline,
};
