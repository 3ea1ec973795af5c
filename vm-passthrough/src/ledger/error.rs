//! Why the ledger can't be used.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::Owner;

/// Why the ledger can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// A file operation failed.
    #[error("the ledger can't be used: {operation} {} failed: {source}; {remedy}", path.display())]
    Io {
        /// What was done.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Another process works on the ledger.
    #[error(
        "the ledger {} has been in use by {} for {} s; wait for it, or look at what it does",
        path.display(), holder.as_ref().map_or("another process".into(), ToString::to_string), seconds(*.deadline)
    )]
    Busy {
        /// The lock file.
        path: PathBuf,
        /// Who holds it.
        holder: Option<Owner>,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// The directory or a file is not what this crate made: others could have written to it.
    #[error("{} {what}, so it can't be trusted; look at it and move it away", path.display())]
    Untrusted {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// A deadline as people say it.
pub(crate) fn seconds(deadline: Duration) -> String {
    format!("{:.1}", deadline.as_secs_f64()).trim_end_matches(".0").to_owned()
}
