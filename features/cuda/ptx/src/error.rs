//! What is wrong with a module, or beyond this front end.

use vm_ir::builder::BuildError;
use vm_ir::valid::ValidationErrors;

/// Why PTX was refused: the line of its text, the instruction there, and what is the matter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{kind}", at_line(*line), quoted(instruction))]
pub struct Error {
    /// The line of the text; 0 if the whole module is meant.
    pub line: u32,
    /// The instruction as it is written; empty where none is meant.
    pub instruction: String,
    /// What is wrong.
    pub kind: ErrorKind,
}

fn at_line(line: u32) -> String {
    if line == 0 { String::new() } else { format!("line {line}: ") }
}

fn quoted(instruction: &str) -> String {
    if instruction.is_empty() { String::new() } else { format!("`{instruction}`: ") }
}

/// What is wrong with PTX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Not the grammar of PTX.
    #[error("{0}")]
    Syntax(String),
    /// A cap is reached.
    #[error("the module has more than {limit} {what}")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much may be.
        limit: u64,
    },
    /// A name that nothing has.
    #[error("nothing is called {0}")]
    Unknown(String),
    /// An instruction or a directive that is not translated.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A loop with more than one entry.
    #[error("the control flow is irreducible: a loop is entered at lines {first} and {second}")]
    Irreducible {
        /// The line of an entry.
        first: u32,
        /// The line of another.
        second: u32,
    },
    /// A function that calls itself.
    #[error("{0} calls itself; recursion is not supported")]
    Recursion(String),
    /// The kernel can't be written in the IR.
    #[error("{0}")]
    Build(BuildError),
    /// The IR's validator refuses the kernel: mostly a barrier or an exchange within a warp that not all threads provably reach.
    #[error("{0}")]
    Invalid(ValidationErrors),
    /// A name that several modules define, or that none of them defines.
    #[error("{0}")]
    Link(String),
    /// What is no container of code.
    #[error("{0}")]
    Image(String),
}

/// What gives a value or an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of a line.
    pub(crate) fn at(line: u32, kind: ErrorKind) -> Error {
        Error { line, instruction: String::new(), kind }
    }

    pub(crate) fn syntax(line: u32, what: impl Into<String>) -> Error {
        Error::at(line, ErrorKind::Syntax(what.into()))
    }

    pub(crate) fn unsupported(line: u32, what: impl Into<String>) -> Error {
        Error::at(line, ErrorKind::Unsupported(what.into()))
    }

    pub(crate) fn large(line: u32, what: &'static str, limit: usize) -> Error {
        Error::at(line, ErrorKind::TooLarge { what, limit: limit as u64 })
    }

    /// Returns whether the error of a function concerns only the kernels that need it: the text is PTX, but this front end cannot translate it.
    pub(crate) fn is_of_function(&self) -> bool {
        matches!(self.kind, ErrorKind::Unsupported(_) | ErrorKind::TooLarge { .. })
    }

    /// With the instruction that it is about.
    pub(crate) fn of(mut self, line: u32, instruction: &str) -> Error {
        if self.instruction.is_empty() {
            self.instruction = instruction.split_whitespace().collect::<Vec<_>>().join(" ");
            self.instruction.truncate(self.instruction.floor_char_boundary(200));
            self.line = line;
        }
        self
    }
}
