//! NVIDIA GPUs by the CUDA driver API, as an accelerator.
//!
//! Three layers: [`sys`] is the driver's functions as they are, found at run time; `result` owns the driver's objects
//! and turns its status into errors; [`CudaAccelerator`] and [`CudaQueue`] are what [`vm_accel`] asks for. Building
//! needs no CUDA; running needs the driver's `libcuda.so.1` (on Windows `nvcuda.dll`), and [`nvml`] its `libnvidia-ml.so.1`. Where one is
//! missing, the error says which package has it.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//! use vm_accel::{Worker, WorkerOptions};
//! use vm_cuda::CudaAccelerator;
//!
//! # fn main() -> Result<(), vm_accel::Error> {
//! let gpu = Arc::new(CudaAccelerator::new(0)?);
//! let worker = Worker::start(gpu, WorkerOptions::default())?;
//! let buffer = worker.allocate_zeroed(4096)?;
//! worker.write(&buffer, &[1.0f32; 1024])?;
//! drop(buffer);
//! worker.stop(Duration::from_secs(10))
//! # }
//! ```
//!
//! # Why only the types of `cudarc`
//! The driver's types and constants are cudarc's `sys`. Its functions are not used: they panic where the library or a
//! symbol is missing, and return the status as an enumeration, for which a code of a newer driver is undefined
//! behaviour. Here all symbols are looked up once, absence is an error, and the status is a number.
//!
//! # Why not nvml-wrapper
//! [`nvml`] was here before there was more to ask than a worker's health, and loads the library as [`sys`] loads the other: once for the
//! process and never unloaded, a missing function an error of the call alone, and errors that are [`vm_accel::Error`]. A second
//! binding beside it would load and initialise the same library again.
//!
//! # One context for a process
//! Each queue uses the device's primary context, with a stream of its own; [`CudaAccelerator::borrow`] takes somebody else's
//! context and stream instead, and leaves both as they were. A [`CudaLauncher`] is for libraries: it has kernels of a context
//! alone, and any thread launches them on any stream there. A fault on the device (an illegal address,
//! say) takes the context with all its queues: they fail with [`vm_accel::Error::Lost`], and only a new process can use
//! the device again. So each guest's GPU work belongs in a process of its own.

mod accelerator;
#[cfg(unix)]
pub mod assemble;
mod context;
#[cfg(test)]
mod fake;
mod image;
mod launcher;
pub mod nvml;
mod queue;
mod result;
pub mod sys;

pub use accelerator::{CudaAccelerator, device_count, devices};
pub use launcher::{Allocation, CudaLauncher, Entered, Place};
pub use queue::{CudaEvent, CudaGraph, CudaKernel, CudaQueue};
