//! What is written to standard output.

use std::io::{self, Write as _};

/// It can't be written.
#[derive(Debug, thiserror::Error)]
#[error("can't write to standard output: {0}")]
pub(crate) struct Error(io::Error);

/// Writes a text and the end of its line. Who reads no more is told nothing.
///
/// # Errors
/// [`Error`].
pub(crate) fn say(text: &str) -> Result<(), Error> {
    match io::stdout().write_all(format!("{text}\n").as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error(error)),
        _ => Ok(()),
    }
}
