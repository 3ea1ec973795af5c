//! Direct3D 11 and a worker on the same device, in turns, on Windows.
//!
//! **No line of this has ever run**: it is only compiled and linted for Windows, and what CUDA's driver is asked is tested on a driver that
//! notes it.
//!
//! The device and its immediate context are the caller's. A [`Texture`] or [`Buffer`] takes turns in one of three ways,
//! [`Sharing`]: by fences, as Vulkan's do by timelines; by its own keyed mutex; or by the accelerator's driver, which needs neither.
//!
//! ```no_run
//! use std::time::Duration;
//! use vm_accel::{Accelerator, Error, Kernel, Worker, arguments};
//! use vm_graphics::d3d11::{Gpu, Sharing};
//! use vm_graphics::{Format, ImageOptions, Interop};
//! use windows::Win32::Graphics::Direct3D11::ID3D11Device;
//!
//! fn turns<A: Accelerator>(device: ID3D11Device, worker: &Worker<A>, kernel: &Kernel<A>) -> Result<(), Error> {
//!     let gpu = Gpu::beside(&**worker.accelerator(), device, Duration::from_secs(10))?;
//!     let (format, size, one) = (Format::Rgba8Unorm, [640, 480], ImageOptions::default());
//!
//!     let interop = Interop::over(worker, gpu.clone())?;
//!     let target = interop.register(gpu.texture("target", format, size, one, Sharing::Fence)?)?;
//!     let mut frame = interop.frame();
//!     let _texture = frame.acquire(&target)?;
//!     // Draw into _texture.object() by gpu.context().
//!     let drawn = frame.submit()?;
//!     let mapped = target.map(interop.link(), drawn)?;
//!     worker.launch(kernel, [10, 480], &arguments![mapped.surface(0)?])?;
//!     drop(mapped.unmap()?.unregister()?);
//!
//!     let guarded = gpu.texture("guarded", format, size, one, Sharing::KeyedMutex)?;
//!     let turns = guarded.turns(worker)?;
//!     let guarded = worker.register_resource(guarded)?;
//!     let held = turns.acquire(&guarded)?;
//!     // Draw.
//!     held.release()?;
//!     let mapped = turns.map(guarded)?;
//!     worker.launch(kernel, [10, 480], &arguments![mapped.surface(0)?])?;
//!     drop(mapped.unmap()?.unregister()?);
//!
//!     let handed = worker.register_resource(gpu.texture("handed", format, size, one, Sharing::Driver)?)?;
//!     // Draw.
//!     let mapped = handed.map_by_driver()?;
//!     worker.launch(kernel, [10, 480], &arguments![mapped.surface(0)?])?;
//!     drop(mapped.unmap()?.unregister()?);
//!     Ok(())
//! }
//! ```

mod frame;
mod gpu;
mod mutex;
mod resource;
mod sys;

pub use frame::Frame;
pub use gpu::{Fence, Gpu};
pub use mutex::{Held, MutexTurns};
pub use resource::{Buffer, Sharing, Texture};
