//! Tests that the machine can't run.

use std::fmt;

/// The error of a test that can't be run here, with the reason.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Ends a test as skipped.
pub(crate) fn skip<T>(reason: impl Into<String>) -> anyhow::Result<T> {
    Err(Skip(reason.into()).into())
}
