//! An `LD_PRELOAD` library that gives CUDA programs, as they are, memory that grows without a copy, a quota, and a log.
//!
//! ```text
//! program ──▶ sys::entry ──▶ hook ──▶ manager ──▶ driver (sys::real)
//!   by sys::find                      plan, tracker
//! ```

pub mod driver;
mod hook;
pub mod log;
pub mod manager;
#[cfg(test)]
mod model;
pub mod options;
pub mod plan;
mod sys;
pub mod tracker;
