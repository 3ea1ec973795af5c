//! LLVM IR for AMD GPUs: CDNA (gfx90a, gfx942, gfx950) and RDNA (gfx1100, gfx1201). `llc` and `ld.lld` of LLVM 22, or
//! ROCm's comgr, make a code object of it.
//!
//! * [`chip`](Chip): the chips.
//! * `legal`: the table of what LLVM has for them.
//! * `writer`: a kernel, its parameters and its ops in order; `control` its regions, and where a guest's is polled.
//! * `tile`: tile kernels.
//! * `value`: ops on values; `memory`: views, shared arrays and atomics; `warp`: ops between threads.
//!
//! # How values are written
//!
//! A lane is an integer of its type's width, an `i1` for a bool: what takes a float has a `bitcast` before it, so that the
//! bits of a NaN are kept wherever nothing computes with it.
//!
//! # Warps
//!
//! A warp has 32 threads, and a wave of CDNA 64: two warps share it, each of which is a half. What threads of a warp
//! exchange is addressed in the half, and a ballot is cut to it.

mod chip;
mod control;
mod legal;
mod memory;
mod tile;
mod value;
mod warp;
mod writer;

pub use chip::{Chip, UnknownChip};
pub(crate) use legal::way;

use crate::artifact::{self, Artifact, Format};
use crate::contain::{self, Phase};
use crate::legal::Way;
use crate::reject::{RejectKind, Rejected};
use crate::safety::{Parameters, SafetyPlan, cost::Costs};
use std::fmt;
use vm_ir::op::{Accuracy, Opcode, Scope};
use vm_ir::{Kernel, Scalar, ValidModule};

/// Options that change the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// What it is for.
    pub chip: Chip,
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chip)
    }
}

/// What a kernel becomes, for its safety plan. LLVM unrolls loops itself.
pub(crate) const fn safety(options: &Options) -> Parameters {
    Parameters {
        costs: Costs::Amdgcn(options.chip),
        unrolling: None,
        interval: 1 << 20,
        in_loops: 1 << 20,
        straight: None,
        cancels_clusters: true,
    }
}

/// How often a thread tries an atomic op at most, while the others of its wave are at the same address. What the memory may not have
/// becomes a loop in LLVM that compares and swaps: in the host's, which any view may be, what PCI Express has not; on older chips
/// that is so of any memory; sums of f64 RDNA has nowhere.
pub(crate) fn tries(chip: Chip, op: Opcode, ty: Scalar, scope: Scope, shared: bool) -> u64 {
    let is_rdna = matches!(chip, Chip::Gfx1100 | Chip::Gfx1201);
    let is_old = matches!(chip, Chip::Gfx90a | Chip::Gfx1100);
    let loops = match op {
        Opcode::AtomicAdd if ty == Scalar::F64 && is_rdna => true,
        Opcode::AtomicAdd if !ty.is_float() => false,
        Opcode::AtomicAdd
        | Opcode::AtomicMinS
        | Opcode::AtomicMaxS
        | Opcode::AtomicMinU
        | Opcode::AtomicMaxU
        | Opcode::AtomicAnd
        | Opcode::AtomicOr
        | Opcode::AtomicXor => !shared && (is_old || scope == Scope::System),
        _ => false,
    };
    if loops { chip.wave().into() } else { 1 }
}

/// Has LLVM the op on the type?
pub(crate) fn is_native(op: Opcode, ty: Scalar, to: Scalar) -> bool {
    matches!(way(op, Accuracy::Precise, ty, to), Way::Native)
}

/// What the head of a kernel asks for and the target does not have.
pub(crate) fn head_rejects(options: &Options, kernel: &Kernel) -> Vec<RejectKind> {
    let mut found = Vec::new();
    let (target, available) = (options.chip.to_string(), options.chip.shared_bytes());
    let needed = kernel.shared().iter().fold(0u64, |sum, array| sum.saturating_add(array.bytes()));
    if needed > available {
        found.push(RejectKind::SharedMemory { target: target.clone(), needed, available });
    }
    found.extend(super::local_reject(kernel, &target));
    for param in kernel.surfaces() {
        found.push(RejectKind::Surface { target: target.clone(), surface: param.name.to_string() });
    }
    if kernel.cluster() > 1 && kernel.tile().is_none() {
        found.push(RejectKind::Cluster { target, blocks: kernel.cluster() });
    }
    let (needed, available) = (artifact::layout(kernel, &[], true).bytes, vm_abi::PARAMETER_BYTES);
    if needed > available {
        found.push(RejectKind::Parameters { needed, available });
    }
    found
}

/// What of a tile kernel the target does not have, with the lines.
pub(crate) fn tile_rejects(options: &Options, kernel: &Kernel) -> Vec<(u32, RejectKind)> {
    kernel.tile().map_or_else(Vec::new, |tile| tile::rejects(options.chip, kernel, tile))
}

/// Writes a module that the target does not reject.
///
/// # Errors
/// Kernels that come to too many instructions.
pub(crate) fn write(module: &ValidModule, options: &Options, target: String) -> Result<Artifact, Rejected> {
    let mut plans = Vec::new();
    for kernel in contain::each(module, Phase::Write) {
        let plan = SafetyPlan::of(kernel, module.trust(), &safety(options));
        plans.push(plan.map_err(|reject| Rejected(vec![reject]))?);
    }
    let (text, entries) = writer::module(module, options, plans)?;
    Ok(Artifact { target, format: Format::LlvmIr, code: text.into_bytes(), entries })
}
