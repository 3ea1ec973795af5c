//! The CUDA driver's functions over the memory of the host. Two libraries have them: `libvm_cuda_cpu.so` (`features/cuda/driver-cpu`), with the feature `cpu`,
//! for programs that run on the processor what PTX they have, and `libvm_cuda_fake.so` (`features/testing/cuda-fake`), for tests of what hooks or forwards
//! the driver's API. Each [exports](driver) the driver with its own [`Settings`].
//!
//! Each function checks its arguments as strictly as the driver's documentation demands. Functions that are not implemented return
//! `CUDA_ERROR_NOT_SUPPORTED`. None panics into C.
//!
//! Device memory is at addresses of the process that have pages of a memory file while something is mapped there with access,
//! and are inaccessible otherwise. A copy or memset of what is not allocated is `CUDA_ERROR_INVALID_VALUE`. Kernels that touch that, and what
//! touches memory that the context may not access, fail with `CUDA_ERROR_ILLEGAL_ADDRESS`, which the context keeps. Kernels are those of PTX (`ptx`), and
//! for tests a few built-in ones (`builtin`).

mod array;
mod builtin;
mod capture;
mod conditional;
mod config;
mod context;
mod copy;
mod device;
mod entry;
mod error;
mod event;
mod exec;
mod ffi;
mod graph;
mod graph_memory;
mod host;
mod image;
mod ipc;
mod jit;
mod library;
mod link;
mod memory;
mod module;
mod named;
mod names;
mod occupancy;
mod pointer;
mod pool;
#[cfg_attr(not(feature = "cpu"), path = "no_ptx.rs")]
mod ptx;
mod state;
mod stream;
mod sys;
mod tables;
mod user_object;
mod virtual_memory;

pub use config::{Settings, Tests, configure, number};
