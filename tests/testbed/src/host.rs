//! This machine's side: builds what goes into L1, boots it once per scenario and variant, and judges.

mod image;
mod machine;
mod programs;
mod runner;

pub use programs::{Programs, Purpose, workspace};
pub use runner::{Options, Outcome, Run, Verdict, run_all};
