//! The boundary: what C calls, what the devices do, and the launches between them.
#![allow(unsafe_code)]

mod abi;
pub mod accelerator;
#[cfg(feature = "checks")]
pub mod by_name;
mod cpu;
mod device;
mod functions;
mod gate;
mod gpu;
mod run;

pub use abi::*;
pub use functions::*;

pub(crate) use cpu::Cpu;
pub(crate) use device::Device;
pub(crate) use gate::is_closed;
pub(crate) use gpu::{Gpu, lend};
