//! The text form, `.vir`: [`parse`] reads it, [`print()`] writes it. `docs/ir.md` has the grammar.
//!
//! Printing is canonical: equal modules give equal text, and parsing that text gives an equal module.
//! Parsing checks the form only; whether the module makes sense is the [validator](crate::valid)'s matter.
//! The parser takes time linear in the text, and no text makes it recurse deeper than
//! [`MAX_DEPTH`](crate::limits::MAX_DEPTH) regions.

mod body;
mod error;
mod excerpt;
mod lexer;
mod literal;
mod parser;
mod printer;
mod tile;

pub use error::{TextError, TextErrorKind};
pub use excerpt::{Mark, render};
pub use parser::parse;
pub use printer::{print, print_kernel};
