//! The `LD_PRELOAD` library of the memory hook: stands between a CUDA program and its driver.
//!
//! ```text
//! program ──▶ sys::entry ──▶ hook ──▶ vm_hook::manager ──▶ sys::real (the driver)
//!   by sys::find
//! ```

mod hook;
mod sys;
