//! The C side: NVML's exported names, the memory that their callers pass, the bridge's `libcuda.so.1`, and forks.
#![allow(unsafe_code)]

pub(crate) mod caller;
pub(crate) mod driver;
mod export;
pub(crate) mod fork;
