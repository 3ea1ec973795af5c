//! Child processes that are confined: VMMs, and workers of accelerators. How they are started and ended, what they say, and the
//! packets by which others speak with them.

mod messages;
pub(crate) mod packets;
mod program;
pub(crate) mod starter;

pub(crate) use messages::{Messages, printable};
pub use program::ChildProgram;
pub(crate) use starter::{Process, end_of, socketpair};
