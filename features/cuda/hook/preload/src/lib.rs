//! The `LD_PRELOAD` library of the memory hook: stands between a CUDA program and its driver.
//!
//! ```text
//! program ──▶ sys::entry ──▶ hook ──▶ vm_hook::manager ──▶ sys::real (the driver)
//!   by sys::find     gate
//! vmhook  ──▶ control    ──▶ pause, sharing, stacks
//! ```

mod control;
mod gate;
mod hook;
mod pause;
mod sharing;
mod stacks;
mod sys;
