//! A CUDA driver over host memory, for tests of programs that hook or forward the driver's API on machines without a GPU; with the feature
//! `cpu` (`features/cuda-cpu`), for programs that run on the processor what PTX they have.
//!
//! The library `libvm_cuda_fake.so` exports the driver's functions. A test links it as `libcuda.so.1` in a directory of
//! `LD_LIBRARY_PATH`. What it does is what the driver's documentation says, as strictly as it says it; what it has no use
//! for it answers with `CUDA_ERROR_NOT_SUPPORTED`. It never panics into C.
//!
//! | variable | says |
//! | --- | --- |
//! | `VM_CUDA_FAKE_DEVICES` | how many devices there are: 1 |
//! | `VM_CUDA_FAKE_MEMORY` | bytes of memory of each: 1 GiB |
//! | `VM_CUDA_FAKE_VERSION` | what `cuDriverGetVersion` says: 13000. `cuGetProcAddress` hides what is newer; `dlsym` does not, as the symbols are there |
//! | `VM_CUDA_FAKE_ATTRIBUTES` | what devices say of attributes that are 0 else |
//! | `VM_CUDA_FAKE_DELAY_US` | how long each operation of a stream waits before it runs, so that races show |
//! | `VM_CUDA_FAKE_FAIL` | calls that fail: `cuMemMap:3=2,cuMemCreate:1=2`, where the third `cuMemMap` returns 2; all versions of a function count as one |
//! | `VM_CUDA_FAKE_KERNELS` | a file of kernels, which do nothing: every image is of these then (`named`) |
//! | `VM_CUDA_FAKE_SECONDS` | with the feature `cpu`, how long a kernel may run: 60 |
//! | `VM_CUDA_FAKE_TRACE` | a file that each call appends a line to: `cuMemFree_v2 dptr=0x7f0000200000 -> 0` |
//!
//! Device memory is at addresses of the process that have pages of a memory file while something is mapped there with access,
//! and are inaccessible otherwise. A copy or memset of what is not allocated is `CUDA_ERROR_INVALID_VALUE`. Kernels that touch that, and what
//! touches memory that the context may not access, fail with `CUDA_ERROR_ILLEGAL_ADDRESS`, which the context keeps. Kernels are a few built-in ones (`builtin`), and
//! those of PTX (`ptx`).

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
