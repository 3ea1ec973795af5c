//! What can go wrong in a run.

use super::launch::LaunchError;
use crate::module::GuestAddr;
use crate::text::{Mark, render};
use std::fmt;

/// A run that did not end well: what happened, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError {
    /// The kernel's name.
    pub kernel: String,
    /// Where in the guest it came from.
    pub guest: GuestAddr,
    /// The op and its line; `None` before the first.
    pub op: Option<(&'static str, u32)>,
    /// What happened.
    pub kind: Box<RunErrorKind>,
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel @{} at {}", self.kernel, self.guest)?;
        match self.op {
            Some((op, 0)) => write!(f, ", {op}")?,
            Some((op, line)) => write!(f, ", line {line}, {op}")?,
            None => {}
        }
        write!(f, ": {}", self.kind)
    }
}

impl std::error::Error for RunError {}

impl RunError {
    /// The error with its line of the text that the module was read from, and carets below what is wrong.
    pub fn render(&self, source: &str) -> String {
        let (op, line) = self.op.unzip();
        render(source, &Mark { line: line.unwrap_or(0), op, message: &self.to_string(), ..Mark::default() })
    }
}

/// A thread, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Its block, counted through x, then y, then z.
    pub block: u64,
    /// Its number in the block.
    pub thread: u32,
}

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} of block {}", self.thread, self.block)
    }
}

/// What happened in a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunErrorKind {
    /// The launch does not fit the kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The kernel took more steps than it was given.
    #[error("out of fuel: more than {0} steps; does a loop end?")]
    Fuel(u64),
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// The values of one block need more memory than the limit.
    #[error("the values of a block need more than {0} bytes")]
    Memory(usize),
    /// Two threads touched one element at once, one of them writing.
    #[error("race on @{place}[{element}] between {first} and {second}; {remedy}")]
    Race {
        /// The view or the array.
        place: String,
        /// The element, counted row by row.
        element: u64,
        /// Who came first here.
        first: Thread,
        /// Who came second.
        second: Thread,
        /// What to do.
        remedy: String,
    },
    /// A trusted kernel reached beyond a place.
    #[error("{thread} reaches @{place} at {indices:?}, out of bounds")]
    OutOfBounds {
        /// The view or the array.
        place: String,
        /// The indices.
        indices: Vec<i64>,
        /// Who.
        thread: Thread,
    },
    /// A trusted kernel's access by bytes is at no multiple of its size.
    #[error("{thread} reaches {size} bytes of @{place} at [{index}], which is no multiple of {size}")]
    Misaligned {
        /// The view or the array.
        place: String,
        /// The index.
        index: i64,
        /// Bytes of the access.
        size: u32,
        /// Who.
        thread: Thread,
    },
    /// A trusted kernel read shared memory that nobody had written.
    #[error("{thread} reads @{place}[{element}], which nobody has written")]
    Uninitialised {
        /// The array.
        place: String,
        /// The element, counted row by row.
        element: u64,
        /// Who.
        thread: Thread,
    },
}
