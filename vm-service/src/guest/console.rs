//! The terminal that a guest's serial console is on.

mod escape;
mod filter;
mod keyboard;
mod pty;
mod terminal;

pub use escape::{Escape, Input};
pub use filter::Filtered;
pub use keyboard::Keyboard;
pub use pty::{Link, Pty};
pub use terminal::RawTerminal;
