//! NPUs, and whatever else is in the Linux kernel's accel subsystem (`SYS/class/accel`) or behind an execution provider of ONNX Runtime.
//!
//! [`devices`] finds those of the subsystem and says what they are: maker, driver, PCI address, device node. It needs only sysfs.
//! NPUs take whole networks, not kernels of threads: they run graphs of `vm-graph`, which an execution provider of ONNX Runtime
//! compiles (QNN, OpenVINO, Vitis AI, CANN, Core ML, NNAPI). The libraries are loaded when a program runs; building needs none.
//!
//! ```text
//! Runtime ─▶ NpuDevice ─▶ NpuAccelerator ─▶ NpuContext ─▶ NpuExecutable ─▶ submit ─▶ Fence
//! ```
//!
//! What a provider can't take is an error, and never runs on the processor instead unless [`ContextOptions::fallback`] says so.
//!
//! ```
//! use std::time::Duration;
//! use vm_graph::{Builder, Element};
//! use vm_npu::{ContextOptions, NpuAccelerator};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut graph = Builder::new("twice");
//! let x = graph.input("x", Element::F32, &[4, 16])?;
//! let y = graph.add(x, x)?;
//! graph.output("y", y)?;
//! let graph = graph.finish()?;
//!
//! let npu = match NpuAccelerator::new(0) {
//!     Ok(npu) => npu,
//!     Err(error) => {
//!         println!("skipped: {error}");
//!         return Ok(());
//!     }
//! };
//! let context = npu.context(&ContextOptions::default())?;
//! let model = context.compile(&graph)?;
//! let mut arrays = context.buffers(&model)?;
//! arrays.inputs[0].bytes_mut()[..4].copy_from_slice(&1.5f32.to_le_bytes());
//! let fence = context.submit(&model, arrays, Duration::from_secs(10))?;
//! let arrays = fence.wait()?;
//! // An NPU may compute in f16.
//! let y = f32::from_le_bytes(*arrays.outputs[0].bytes().first_chunk().ok_or("it has no elements")?);
//! assert!((y - 3.0).abs() < 0.01, "{y}");
//! # Ok(())
//! # }
//! ```

mod accelerator;
mod buffer;
mod class;
mod context;
mod device;
mod error;
mod executable;
mod owner;
mod provider;
mod runtime;
mod sys;
mod watch;

pub use accelerator::NpuAccelerator;
pub use buffer::Buffer;
pub use class::devices;
pub use context::{ContextOptions, Fence, Inference, NpuContext, NpuExecutable};
pub use device::{NpuDevice, NpuKind, Roots};
pub use error::NpuError;
pub use provider::{Performance, Priority, Provider};
pub use runtime::{FOLDER_VARIABLE, Libraries, Runtime};
