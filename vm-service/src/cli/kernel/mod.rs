//! Kernels on the command line: the file that they are in, their arguments, and what runs them.
//!
//! ```text
//! file ─▶ Module ─▶ validate ─▶ argument (bind to parameters) ─▶ engine (interpreter, CPU, GPU) ─▶ outputs
//! ```

#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
mod accelerated;
pub(crate) mod args;
pub(crate) mod argument;
pub(crate) mod assembler;
pub(crate) mod cache;
pub(crate) mod engine;
pub(crate) mod file;
mod fill;
mod memory;
pub(crate) mod model;
pub(crate) mod npy;
pub(crate) mod tune;
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
pub(crate) mod vouch;
pub(crate) mod wait;
