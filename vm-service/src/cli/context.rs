//! What a command works with.

use std::io::Write;
use std::path::PathBuf;

use vm_passthrough::Host;
use vm_passthrough::sim::SimHost;

use crate::api::{Body, Document};
use crate::failure::Failure;
use crate::text::table::printable;

/// What a command works with.
pub(crate) struct Context<'a> {
    /// The host.
    pub(crate) host: Host,
    /// The simulated host that it is, if it is one, which every document and the first line of every text says.
    pub(crate) sim: Option<SimHost>,
    /// Whether the first line was printed.
    pub(crate) is_labelled: bool,
    /// `vm-service`, whose hidden commands child processes run.
    pub(crate) program: PathBuf,
    /// Whether the output is JSON.
    pub(crate) json: bool,
    /// Where compiled kernels are kept; `None` for memory.
    pub(crate) cache: Option<PathBuf>,
    /// The directory of log files; `None` for none.
    pub(crate) logs: Option<PathBuf>,
    /// Characters in a line of the output; `None` for any number, as where it is no terminal.
    pub(crate) width: Option<usize>,
    /// Standard output.
    pub(crate) out: &'a mut dyn Write,
}

impl Context<'_> {
    /// Whether the host is a simulated one.
    pub(crate) fn is_simulated(&self) -> bool {
        self.sim.is_some()
    }

    /// The document of this, labelled where it is of something simulated.
    pub(crate) fn document(&self, body: Body) -> Document {
        let document = Document::new(body);
        Document { simulated: document.simulated || self.is_simulated(), ..document }
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
            let document = self.document(body());
            let json = serde_json::to_string_pretty(&document).map_err(Failure::failed)?;
            writeln!(self.out, "{json}")?;
        } else {
            let text = text();
            if let Some(sim) = self.sim.as_ref().filter(|_| !self.is_labelled && !text.is_empty()) {
                writeln!(self.out, "simulated host: {}", printable(&sim.root().display().to_string()))?;
                self.is_labelled = true;
            }
            self.out.write_all(text.as_bytes())?;
        }
        Ok(self.out.flush()?)
    }

    /// As [`print`](Self::print), one of many documents: each on a line of its own.
    ///
    /// # Errors
    /// When the output can't be written.
    pub(crate) fn print_line(
        &mut self,
        body: impl FnOnce() -> Body,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if !self.json {
            return self.print(body, text);
        }
        let document = self.document(body());
        let json = serde_json::to_string(&document).map_err(Failure::failed)?;
        writeln!(self.out, "{json}")?;
        Ok(self.out.flush()?)
    }
}
