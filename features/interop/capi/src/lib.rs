//! The library for C: `libvmkernels.so` and `libvmkernels.a`. `include/vmkernels.h` has the kernel library, `include/vmaccel.h` accelerators.
//!
//! Where the machine has a GPU, kernels run there, on the caller's context, stream and memory; else on the CPU. Nothing is kept but
//! kernels: no memory of the caller's, no stream, and on a GPU no thread.
//!
//! | part | does |
//! | --- | --- |
//! | `functions.txt` of `vm-kernels`, `accelerator.txt`, `build.rs` | what functions there are; the ABI is made of it |
//! | `accelerator` | what the functions of `vmaccel.h` do |
//! | `call` | what a call is found by |
//! | `engine` | the kernels of a device, compiled once, and what a call launches |
//! | `state` | which device a call goes to |
//! | `checks`, a feature | what tests check of every function, on any device |
//! | `sys` | the boundary: C on one side, results and no panics on the other; the devices; launches |

mod accelerator;
mod call;
#[cfg(feature = "checks")]
pub mod checks;
mod engine;
mod error;
mod state;
pub mod sys;
