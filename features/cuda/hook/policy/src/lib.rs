//! Memory of CUDA programs that grows without a copy, a quota of it, and a log: what is decided and tracked, over any [driver](driver::Driver).
//!
//! ```text
//! manager ──▶ plan, tracker
//!         ──▶ driver
//! client ──▶ control (what is asked from outside)
//! ```

pub mod client;
pub mod control;
pub mod driver;
pub mod host;
pub mod log;
pub mod manager;
#[cfg(test)]
mod model;
pub mod options;
pub mod plan;
pub mod sys;
pub mod tracker;
