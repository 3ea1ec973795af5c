//! From programs to kernels in the IR.

mod kernel;
mod math;
mod value;

pub(crate) use kernel::{RUN, THREADS, WARP, kernel};
pub(crate) use math::binary;
pub(crate) use value::{V, constant, zero};
