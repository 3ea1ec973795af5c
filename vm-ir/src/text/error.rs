//! What is wrong with a text.

use crate::op::Opcode;
use crate::op::nearest::any_of;

/// A text that is no module: what is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}:{column}{}: {kind}", kernel.as_ref().map_or_else(String::new, |name| format!(", kernel @{name}")))]
pub struct TextError {
    /// The line, from 1.
    pub line: u32,
    /// The column in bytes, from 1.
    pub column: u32,
    /// The kernel it is in, if its name was read.
    pub kernel: Option<String>,
    /// What is wrong.
    pub kind: TextErrorKind,
}

impl TextError {
    /// The error with the line of the text, and carets below what is wrong.
    pub fn render(&self, source: &str) -> String {
        super::excerpt::render_at(source, &self.to_string(), self.line, self.column)
    }
}

/// What is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextErrorKind {
    /// Something else belongs here.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// What belongs here.
        expected: String,
        /// What is here.
        found: String,
    },
    /// The character begins no token.
    #[error("no token begins with {0:?}")]
    Character(char),
    /// A name that is too long or not of letters, digits and `_`.
    #[error("{0:?} is no name: at most 64 letters, digits and _, not beginning with a digit")]
    Name(String),
    /// The text is of another version of the language.
    #[error("the text is of version {0}; this is version {ours}", ours = crate::Module::VERSION)]
    Version(String),
    /// There is no such op.
    #[error("there is no op {name:?}{}", meant(.0), name = .0)]
    UnknownOp(String),
    /// The op's name has the wrong words behind it.
    #[error("{op} takes {expected} here, found {found:?}")]
    Attribute {
        /// The op.
        op: &'static str,
        /// The words that it takes.
        expected: String,
        /// The word that is there.
        found: String,
    },
    /// There is no such type.
    #[error("there is no type {0:?}")]
    UnknownType(String),
    /// No value of this name is defined above.
    #[error("no value %{0} is defined above")]
    UnknownValue(String),
    /// No parameter or shared array has this name.
    #[error("there is no view or shared array @{0}")]
    UnknownPlace(String),
    /// The name is taken.
    #[error("{0} is already defined in this kernel; names are unique within a kernel")]
    Duplicate(String),
    /// The number does not fit.
    #[error("{text} is no {what}")]
    Number {
        /// The number.
        text: String,
        /// What it should be.
        what: String,
    },
    /// The operand may be of several types.
    #[error(
        "the type of {text} is open here, as {op} takes several; write `%name = const {text} : TYPE` before, and %name here"
    )]
    OpenLiteral {
        /// The literal.
        text: String,
        /// The op.
        op: &'static str,
    },
    /// The op defines another number of values.
    #[error("{op} defines {expected} values, not {found}")]
    Results {
        /// The op.
        op: &'static str,
        /// How many it defines.
        expected: usize,
        /// How many names stand before the `=`.
        found: usize,
    },
    /// Too many of something.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The cap.
        limit: usize,
    },
}

/// What to write for a name that is no op's.
fn meant(word: &str) -> String {
    match &Opcode::suggest(word)[..] {
        [] => String::new(),
        words => format!("; write {}", any_of(words)),
    }
}
