//! Runs the kernels of `vm-ir`, compiled by `vm-jit`, on the accelerators of `vm-accel`.
//!
//! ```text
//! IRBlock ─▶ validate ─▶ vm-jit ─▶ (assembler) ─▶ CompiledKernel ─▶ Worker: load, launch, read back
//!                          └────── cache ──────┘
//! ```
//!
//! * [`JitCompiler`] compiles for one accelerator, whichever it is; `CudaJITCompiler`, `RocmJITCompiler`, `CpuJITCompiler` and
//!   `GuestJITCompiler` are its names for four.
//! * `AnyAccelerator` is one that is named when the program runs: `auto`, `cpu`, `cuda:0`, `guest`, a PCI address.
//! * [`CompiledKernel`] has the [`Artifact`](vm_accel::Artifact) that a [`Worker`] loads.
//! * [`Tuner`] chooses the fastest variant of a family of kernels on the device, and remembers it.
//! * The accelerators, and all of `vm-accel` that a launch needs, are here by their own names. Each comes with the cargo
//!   feature of its name; `npu` runs graphs of `vm-graph` instead of kernels (`compile_graph`).
//!
//! A device that runs kernels is shared. What keeps anybody from passing it to a guest meanwhile is a lease of
//! `vm-passthrough`, which has all of this crate as its module `accelerator`.
//!
//! A kernel from the Rust builder, run on the first NVIDIA GPU:
#![cfg_attr(feature = "cuda", doc = "```")]
#![cfg_attr(not(feature = "cuda"), doc = "```ignore")]
//! use std::sync::Arc;
//! use vm_runtime::{CudaAccelerator, CudaJITCompiler, GuestAddr, IRBlock};
//! # use std::time::Duration;
//! # use vm_ir::{Scalar, op::Axis, view::Access};
//! # use vm_runtime::{Worker, WorkerOptions, arguments};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # if let Err(error) = CudaAccelerator::new(0) {
//! #     println!("skipped: {error}");
//! #     return Ok(());
//! # }
//! let accelerator = Arc::new(CudaAccelerator::new(0)?);
//! # let device = accelerator.clone();
//! let mut compiler = CudaJITCompiler::new(accelerator);
//! let block = IRBlock::new(GuestAddr(0x1000));
//! # let k = block.builder();
//! # k.name("twice").block_size([256, 1, 1]);
//! # let x = k.view("x", Scalar::F32, 1, Access::ReadWrite);
//! # let i = k.global_id(Axis::X);
//! # k.if_(i.lt(x.extent(0)), || x.at([i]).store(x.at([i]).load() * 2.0));
//! let kernel = compiler.compile(&block)?;
//!
//! // Load, launch, read back.
//! # let accelerator = device;
//! let worker = Worker::start(accelerator, WorkerOptions::default())?;
//! let kernel = worker.load(kernel.artifact())?;
//! let x = worker.allocate(4 * 1000)?;
//! worker.write(&x, &[1.5f32; 1000])?;
//! worker.launch(&kernel, 4, &arguments![&x])?;
//! let mut result = [0.0f32; 1000];
//! worker.read(&x, &mut result)?;
//! # assert_eq!(result, [3.0; 1000]);
//! # worker.stop(Duration::from_secs(10))?;
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "rocm")]
mod amd;
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
mod any;
mod artifact;
mod compiler;
#[cfg(feature = "cpu")]
mod cpu;
mod crc32;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "guest")]
mod guest;
#[cfg(feature = "npu")]
mod models;
mod tune;

#[cfg(feature = "rocm")]
pub use amd::{RocmAccelerator, RocmAssembler, RocmJITCompiler, rocm};
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
pub use any::{AnyAccelerator, AnyEvent, AnyGraph, AnyKernel, AnyQueue, OpenError};
pub use compiler::{
    Assemble, AssembleError, CompileError, CompiledKernel, JitCompiler, JitTarget, assembled,
};
#[cfg(feature = "cpu")]
pub use cpu::{CpuAccelerator, CpuJITCompiler};
#[cfg(feature = "cuda")]
pub use cuda::{
    CudaAccelerator, CudaAssembler, CudaJITCompiler, CudaUsage, assemble, cuda_devices, cuda_usage, nvml,
};
#[cfg(feature = "guest")]
pub use guest::{GuestAccelerator, GuestJITCompiler};
#[cfg(feature = "npu")]
pub use models::{NpuAccelerator, compile_graph, npu};
pub use tune::{
    Cancel, Candidate, Figure, Outcome, TuneError, TuneEvent, TuneOptions, TuneProgress, Tuned, Tuner,
    resources,
};
pub use vm_accel::{
    Accelerator, Argument, Buffer, Checksum, ChecksumStatistics, DeviceInfo, Element, ElementType, Error,
    Event, Extents, Graph, Grid, Job, Kernel, Launch, Limits, MemoryInfo, MemoryKind, PoolOptions, Queue,
    QueueOptions, Scalar, Session, TypedBuffer, View, Worker, WorkerOptions, arguments,
};
pub use vm_ir::{GuestAddr, IRBlock};
pub use vm_kernels as kernels;

/// What other programs own, and promise to keep.
pub mod sys {
    pub use vm_accel::sys::BorrowedMemory;
    #[cfg(feature = "cuda")]
    pub use vm_cuda::sys::{BorrowedContext, BorrowedStream};
}

#[cfg(test)]
mod tests;
