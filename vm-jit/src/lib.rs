//! Compiles validated kernels. This crate knows no device and no driver.
//!
//! ```text
//! ValidModule ─▶ legal (what the target rejects) ─▶ legalise (ops that it has) ─▶ range (what is known) ─┐
//!                cache ◀── Artifact ◀── backend::* ◀── safety (what is polled and checked) ◀──────────────┘
//! ```
//!
//! * [`compile`] makes an [`Artifact`]: code, entry symbols, and where arguments go.
//! * [`legal`] says how a target does each op on each type, before anything is compiled.
//! * [`backend`] has one module for each target.
//! * [`cache`] keeps what was compiled, in memory and on disk, for many processes at once.
//!
//! After validation a compiler fails only with a declared [`Reject`]: it never panics.
//!
//! ```
//! use vm_ir::{Trust, text, validate};
//! use vm_jit::{Target, compile};
//!
//! let module = text::parse(
//!     "vir 1
//!      kernel @twice(@x: view<f32, [?], readwrite>) at 0x1000 block(256) {
//!        %i = global_id.x : i64
//!        %a = load @x[%i] : f32
//!        %b = add %a, %a : f32
//!        store @x[%i], %b
//!      }",
//! )?;
//! let module = validate(module, Trust::Guest)?;
//! let artifact = compile(&module, &"ptx:sm_90a".parse::<Target>()?)?;
//! assert_eq!(artifact.entries[0].params.bytes, 16);
//! assert!(artifact.text().unwrap().contains(".target sm_90a"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A guest's kernel
//!
//! It is made safe by checks in the code. An access to a view is done under a predicate that its indices are
//! in bounds, an index into a shared array is clamped, shared memory is zeroed, and loops count their iterations
//! and poll a cancel flag. [`range`] proves most of them away: indices from loops that run to an extent,
//! from an `if` that compares with one, from thread numbers; loops that are known to be short. What is left is in
//! one plan for each kernel, which the targets read.

// Some of what targets share is used by that of CPUs alone.
#![cfg_attr(not(feature = "cpu"), allow(dead_code))]

pub mod artifact;
pub mod backend;
pub mod cache;
mod contain;
#[cfg(test)]
mod growth;
pub mod legal;
mod legalise;
pub mod range;
mod reject;
mod safety;
mod targets;

pub use artifact::{Artifact, Entry, Format, Instruction, Note, Products};
pub use backend::{Target, UnknownTarget};
pub use reject::{Reject, RejectKind, Rejected};
pub use targets::{TargetInfo, targets};
pub use vm_abi::{Guard, ParamLayout, Slot, Swizzle, TensorMap, Tile};

use contain::Phase;
use vm_ir::ValidModule;

/// Compiles a module.
///
/// # Errors
///
/// Everything in it that the target rejects, as [`legal::rejects`] lists it; or that it became too large for a code generator
/// ([`RejectKind::Size`]), or that one gave up on it or panicked ([`RejectKind::Generator`]).
pub fn compile(module: &ValidModule, target: &Target) -> Result<Artifact, Rejected> {
    contain::contained(module, || {
        let judged = contain::each(module, Phase::Judge);
        let rejects: Vec<Reject> = judged.flat_map(|kernel| legal::kernel_rejects(kernel, target)).collect();
        if !rejects.is_empty() {
            return Err(Rejected(rejects));
        }
        let module = legalise::legalise(module, target)?;
        match target {
            Target::Ptx(options) => backend::ptx::write(&module, options, target.to_string()),
            Target::Amdgcn(options) => backend::amdgcn::write(&module, options, target.to_string()),
            #[cfg(feature = "cpu")]
            Target::Cpu(options) => backend::cpu::write(&module, options, target.to_string()),
            Target::Ir => Ok(backend::ir::write(&module, target.to_string())),
        }
    })
}
