//! The program that a worker runs.

use std::ffi::OsString;
use std::path::PathBuf;

/// The program that a worker runs, and the words that make it one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgram {
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

impl Default for WorkerProgram {
    /// This program, by its hidden command.
    fn default() -> Self {
        Self { path: "/proc/self/exe".into(), arguments: vec!["accelerator-worker".into()] }
    }
}
