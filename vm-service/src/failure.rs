//! Why a command did not succeed, and what its exit statuses mean.

use std::io;

/// Exit status: the command did what it was asked.
pub(crate) const EXIT_OK: u8 = 0;
/// Exit status: the command failed; what it had begun was undone, or the message says what was not.
pub(crate) const EXIT_FAILED: u8 = 1;
/// Exit status: the command line, the guest file or the kernel file is wrong; nothing was touched.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit status: a device can't be passed to a guest as things are; every reason was reported, nothing was touched.
pub(crate) const EXIT_BLOCKED: u8 = 3;

/// Why a command did not succeed: a message, and the exit status that goes with it.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What, where and what to do; empty when the output has said it.
    pub(crate) message: String,
    /// Exit status.
    pub(crate) exit: u8,
}

impl Failure {
    /// Of several, if any: what each says, and the exit status of the first.
    ///
    /// # Errors
    /// If there is any.
    pub(crate) fn all(failures: Vec<Self>) -> Result<(), Self> {
        let Some(exit) = failures.first().map(|failure| failure.exit) else { return Ok(()) };
        let messages: Vec<_> = failures.into_iter().map(|failure| failure.message).collect();
        Err(Self { message: messages.join("\nerror: "), exit })
    }

    /// A failure of the work itself.
    pub(crate) fn failed(error: impl std::fmt::Display) -> Self {
        Self { message: error.to_string(), exit: EXIT_FAILED }
    }

    /// The command line or the guest file is wrong.
    pub(crate) fn usage(error: impl std::fmt::Display) -> Self {
        Self { message: error.to_string(), exit: EXIT_USAGE }
    }

    /// A device can't be passed to a guest, and the output or `message` says why.
    pub(crate) fn blocked(message: String) -> Self {
        Self { message, exit: EXIT_BLOCKED }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // The reader of the output has had enough, as in `vm-service list | head -1`.
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { message: String::new(), exit: EXIT_OK };
        }
        Self::failed(format!("standard output can't be written: {error}; see where it goes"))
    }
}
