//! What an accelerator is to the rest of the house, in three layers.
//!
//! - [`Accelerator`] and [`Queue`] are what an implementation provides: a device, and a context with one stream that
//!   one thread owns. They give [`Memory`] that can't be copied and take it back by value.
//! - [`Worker`] is one thread that owns one queue. Any thread may call it. Commands run in the order in which they
//!   came, so allocation, copies, launches and frees are ordered without a word from the caller.
//! - The memory pool lives in the worker: a freed [`Buffer`]'s memory may be used again at once, to any thread,
//!   because what the new owner does comes later in the same order.
//!
//! # Why buffers can't be misused
//! A [`Buffer`] is freed by dropping it, so it can be freed once, and not used afterwards. One of another worker is refused with
//! [`Error::WrongWorker`].
//!
//! A buffer that was given away can't be used, nor freed twice:
//!
//! ```compile_fail,E0382
//! # use std::{sync::Arc, time::Duration};
//! # use vm_accel::{fake::FakeAccelerator, Error, Worker, WorkerOptions};
//! # fn main() -> Result<(), Error> {
//! # let worker = Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
//! let buffer = worker.allocate(256)?;
//! worker.free(buffer)?;
//! worker.free(buffer)?;
//! # Ok(())
//! # }
//! ```
//!
//! A view does not outlive its buffer:
//!
//! ```compile_fail,E0505
//! # use std::{sync::Arc, time::Duration};
//! # use vm_accel::{fake::FakeAccelerator, Error, Worker, WorkerOptions};
//! # fn main() -> Result<(), Error> {
//! # let worker = Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default())?;
//! let buffer = worker.allocate(256)?;
//! let view = buffer.view(0, 128)?;
//! drop(buffer);
//! worker.fill(view, 0)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Where it is trusted
//! What can't be checked is promised at `unsafe` functions: [`Artifact::new`] (the code keeps to its views),
//! [`Memory::from_raw`] (an implementation's allocation is its own), [`Queue::register`], [`Worker::register`] and
//! [`Session::register`] (host memory stays mapped), [`sys::BorrowedMemory::new`] and [`sys::BorrowedResource::new`] (its owner
//! keeps it), [`Queue::stream`],
//! [`Queue::launch`] and [`Queue::replay`] (nothing is freed that commands use).
//!
//! # What this crate does not know
//! CUDA, PCI, or any other interface; how code is compiled; configuration, JSON, the command line.

mod accelerator;
mod artifact;
mod checksum;
#[cfg(all(feature = "conformance", not(loom)))]
pub mod conformance;
pub mod crc32;
mod device;
mod equal;
mod error;
mod executor;
mod extents;
mod external;
#[cfg(all(feature = "fake", not(loom)))]
pub mod fake;
#[cfg(all(feature = "fake", not(loom)))]
pub mod faulty;
pub mod image;
mod launch;
mod memory;
mod pool;
#[cfg(any(feature = "conformance", feature = "fake"))]
pub mod programs;
pub mod sys;
mod tensor;
mod worker;

pub use accelerator::{Accelerator, GraphNode, Queue};
pub use artifact::{Artifact, Extent, Parameter, ParameterKind, Signature};
pub use checksum::{Checksum, ChecksumStatistics, Direction};
pub use device::{DeviceInfo, MemoryInfo, QueueOptions, deadline};
pub use error::{Error, Result};
pub use executor::job::Job;
pub use extents::Extents;
pub use external::{
    DriverResource, ExternalKind, ExternalMemory, ExternalSemaphore, HostTimeline, Layout, OsHandle, Pixels,
    Semaphore, SemaphoreKind, Timeline,
};
pub use launch::{Arguments, Grid, Launch, Limits, Other, QueueArgument, Scalar};
pub use memory::{Memory, MemoryKind, Region};
pub use pool::{PoolOptions, PoolStatistics};
pub use tensor::Tensor;
pub use vm_abi::{
    Element, Guard, MAX_EXTENT, MAX_PARAMETER_BYTES, MAX_RANK, NOTHING, NOTHING_BYTES, PARAMETER_BYTES,
    ParamLayout, Slot, Swizzle, TensorMap, Tile,
};
pub use worker::{
    Argument, Batch, Buffer, ElementType, Event, Graph, Kernel, Link, Mapped, RefusedResource, Registered,
    Scope, ScopedStream, Session, Shaped, Shareable, TypedBuffer, View, Worker, WorkerOptions,
};
