//! The terminal that a guest's serial console is on.

mod escape;
mod terminal;

pub use escape::{Escape, Input};
pub use terminal::RawTerminal;
