//! The kernel library for C: `libvmkernels.so` and `libvmkernels.a`, with one header, `include/vmkernels.h`.
//!
//! Where the machine has a GPU, kernels run there, on the caller's context, stream and memory; else on the CPU. Nothing is kept but
//! kernels: no memory of the caller's, no stream, and on a GPU no thread.
//!
//! | part | does |
//! | --- | --- |
//! | `functions.txt`, `build.rs` | what functions there are; the ABI is made of it |
//! | `functions` | which function of `vm-kernels` each is |
//! | `call` | a call's arguments, and the checks that need no device |
//! | `engine` | the kernels of a device, compiled once, and what a call launches |
//! | `state` | which device a call goes to |
//! | `checks`, a feature | what tests check of every function, on any device |
//! | `sys` | the boundary: C on one side, results and no panics on the other; the devices; launches |

mod call;
#[cfg(feature = "checks")]
pub mod checks;
mod engine;
mod error;
mod functions;
mod state;
pub mod sys;
