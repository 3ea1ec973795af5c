//! PTX, as CUDA's compilers write it, as kernels of the IR: for programs whose host has no CUDA driver, or is not to trust it with
//! what they compiled.
//!
//! ```text
//! fat binary ─▶ image ─▶ text ─▶ parse ─▶ inline ─▶ cfg ─▶ structure ─▶ translate ─▶ vm-ir (validated)
//! ```
//!
//! This crate knows no device, no driver and no operating system. Its input is hostile: every count has a [cap](limits), nothing
//! recurses further than the caps on nesting say, and what isn't supported is refused by name with its line.

mod ast;
mod cfg;
mod error;
pub mod image;
mod inline;
mod lex;
pub mod limits;
mod live;
mod module;
mod parse;
mod space;
mod structure;
mod translate;

pub use ast::Space;
pub use error::{Error, ErrorKind, Result};
pub use module::{Data, Module, Parameter, Signature, Variable, Word};
pub use translate::{Options, Translated, supported};
