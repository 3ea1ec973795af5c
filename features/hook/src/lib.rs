//! An `LD_PRELOAD` library that gives CUDA programs, as they are, memory that is resized without a copy.
pub mod driver;
pub mod manager;
#[cfg(test)]
mod model;
pub mod plan;
pub mod tracker;
