//! What a command works with.

use std::io::Write;
use std::path::PathBuf;

use vm_passthrough::Host;

use crate::failure::Failure;
use crate::json::{Body, Document};

/// What a command works with.
pub(crate) struct Context<'a> {
    /// The host.
    pub(crate) host: Host,
    /// Whether the output is JSON.
    pub(crate) json: bool,
    /// Whether the host is a captured tree, in which nothing can be changed.
    pub(crate) captured: bool,
    /// Where compiled kernels are kept; `None` for memory.
    pub(crate) cache: Option<PathBuf>,
    /// Characters in a line of the output; `None` for any number, as where it is no terminal.
    pub(crate) width: Option<usize>,
    /// Standard output.
    pub(crate) out: &'a mut dyn Write,
}

impl Context<'_> {
    /// Refuses a command that changes the host when the host is a captured tree.
    ///
    /// # Errors
    /// [`Failure::usage`] then.
    pub(crate) fn require_live(&self, command: &str) -> Result<(), Failure> {
        self.require_machine(command, "changes the host")
    }

    /// Refuses a command when the host is a captured tree, as it does what takes a machine.
    ///
    /// # Errors
    /// [`Failure::usage`] then.
    pub(crate) fn require_machine(&self, command: &str, does: &str) -> Result<(), Failure> {
        if self.captured {
            return Err(Failure::usage(format_args!(
                "`{command}` {does}, and `--root` names a captured tree, which is only read; leave `--root` out"
            )));
        }
        Ok(())
    }

    /// Prints a JSON document when JSON was asked for, and `text` otherwise.
    ///
    /// # Errors
    /// When the output can't be written.
    pub(crate) fn print(
        &mut self,
        body: impl FnOnce() -> Body,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if self.json {
            let document = Document::new(body());
            let json = serde_json::to_string_pretty(&document).map_err(Failure::failed)?;
            writeln!(self.out, "{json}")?;
        } else {
            self.out.write_all(text().as_bytes())?;
        }
        Ok(self.out.flush()?)
    }
}
