//! PTX, as CUDA's compilers write it, as kernels of the IR: for programs whose host has no CUDA driver, or is not to trust it with
//! what they compiled.
//!
//! ```text
//! fat binary ─▶ image ─▶ text ─▶ parse ─▶ inline ─▶ cfg ─▶ structure ─▶ translate ─▶ vm-ir (validated)
//! ```
//!
//! ```
//! use vm_ptx::{Module, Options};
//!
//! let module = Module::parse(
//!     ".version 8.0 .target sm_75 .address_size 64
//!      .visible .entry fill(.param .u64 out, .param .f32 value) {
//!          .reg .b32 %r<2>; .reg .b64 %rd<4>; .reg .f32 %f<2>;
//!          ld.param.u64 %rd1, [out];
//!          ld.param.f32 %f1, [value];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %rd2, %r1, 4;
//!          add.s64 %rd3, %rd1, %rd2;
//!          st.global.f32 [%rd3], %f1;
//!          ret;
//!      }",
//! )?;
//! let kernel = module.translate("fill", &Options { block: [64, 1, 1], dynamic_shared: 0, data: 0 })?;
//! assert_eq!(kernel.signature.arguments(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 128, 63]), [0x10000, 0x3f80_0000]);
//! # Ok::<(), vm_ptx::Error>(())
//! ```
//!
//! [`supported`] has the table of instructions; `docs/ptx.md` says what becomes of memory, parameters, barriers and floats. A kernel
//! is tried in up to four ways, each of which the IR's validator judges: as it is; with what a block reads alike from shared memory
//! passed on by one thread; with threads that return early coming along to barriers; and with votes on what to do together.
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
mod link;
mod live;
mod lockstep;
mod module;
mod parse;
pub mod print;
mod space;
mod structure;
mod translate;

pub use ast::Space;
pub use error::{Error, ErrorKind, Result};
pub use link::{Input, link};
pub use module::{Data, Module, Parameter, Signature, Variable, Word};
pub use translate::{Options, Translated, supported};
