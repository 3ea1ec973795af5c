//! What can be wrong with a graph.

use std::fmt;

use thiserror::Error;

/// Why a graph is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphError {
    /// Bytes are no graph in the binary form.
    #[error("these bytes are no graph: {0}")]
    Binary(String),
    /// A rule is broken.
    #[error("{place}: {what}")]
    Rule {
        /// Where.
        place: Place,
        /// What is wrong, and what there may be.
        what: String,
    },
}

/// Where a rule is broken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The graph as a whole.
    Graph,
    /// An input, by its number.
    Input(usize),
    /// An output, by its number.
    Output(usize),
    /// An operation: its number, and what it is.
    Node(usize, &'static str),
    /// A value that is given to be computed with, by its number.
    Argument(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Graph => f.write_str("the graph"),
            Self::Input(number) => write!(f, "input {number}"),
            Self::Output(number) => write!(f, "output {number}"),
            Self::Node(number, name) => write!(f, "operation {number} ({name})"),
            Self::Argument(number) => write!(f, "argument {number}"),
        }
    }
}

impl GraphError {
    pub(crate) fn rule(place: Place, what: impl Into<String>) -> GraphError {
        GraphError::Rule { place, what: what.into() }
    }
}
