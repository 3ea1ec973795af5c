//! The programs of child processes.

use std::ffi::OsString;
use std::path::PathBuf;

/// The program of a child process, and the words that make it one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildProgram {
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

impl ChildProgram {
    /// What serves a shared accelerator, where `path` is `vm-service`: by its hidden command.
    pub fn worker(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), arguments: vec!["accelerator-worker".into()] }
    }

    /// What runs a guest, likewise.
    pub(crate) fn vmm(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), arguments: vec!["guest-vmm".into()] }
    }
}
