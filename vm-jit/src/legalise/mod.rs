//! Rewrites kernels so that a target has every op of them: what its table marks as [expanded](Way::Expanded) becomes ops
//! that it has, and local arrays parts of shared ones on a processor. It is done once, before anything is learnt of the kernel: what is proved, planned and weighed is what is
//! written.
//!
//! * `sequence`: integers, the lesser and the greater.
//! * `small`: f16, bf16 and fp8.
//! * `function`, `angle`: mathematical functions in f64, with their coefficients in `poly`.
//! * `value`: what these are written with.

mod angle;
mod function;
pub(crate) mod poly;
mod sequence;
mod small;
#[cfg(test)]
mod tests;
mod value;

use crate::backend::Target;
use crate::contain::{self, Phase};
use crate::legal::{Expansion, Way, key, way};
use crate::reject::{Reject, RejectKind, Rejected};
use std::borrow::Cow;
use vm_ir::builder::{Builder, Rewrite, Val};
use vm_ir::limits::MAX_REWRITTEN_OPS;
use vm_ir::module::Op;
use vm_ir::op::Opcode;
use vm_ir::valid::validate_rewritten;
use vm_ir::{Kernel, Module, Scalar, ValidModule};

/// How often what came of an expansion may be expanded: `pow` of f16 is done in f32, that in f64, and conversions of
/// f64 to f16 in f32.
const MOST_PASSES: usize = 8;

/// The module with ops that the target has only.
///
/// # Errors
///
/// A kernel that grows too large.
pub(crate) fn legalise<'m>(
    module: &'m ValidModule,
    target: &Target,
) -> Result<Cow<'m, ValidModule>, Rejected> {
    let mut kernels = Vec::with_capacity(module.kernels().len());
    let mut changed = false;
    for kernel in contain::each(module, Phase::Legalise) {
        let reject = |kind| Rejected(vec![Reject::new(kernel, kernel.line().0, kind)]);
        let available = MAX_REWRITTEN_OPS as u64;
        let too_large = |_| reject(RejectKind::Size { what: "operations", needed: available + 1, available });
        let mut legal = Cow::Borrowed(kernel);
        if shares_locals(target) && !kernel.local().is_empty() {
            legal = Cow::Owned(kernel.share_locals(module.trust()).map_err(too_large)?);
            changed = true;
        }
        for _ in 0..MOST_PASSES {
            if first_expanded(&legal, target).is_none() {
                break;
            }
            legal = Cow::Owned(legal.rewrite(&mut Rules { target }).map_err(too_large)?);
            changed = true;
        }
        if let Some(op) = first_expanded(&legal, target) {
            debug_assert!(false, "{} is not legalised", op.code);
            let what = format!("there is no expansion of `{}`", op.code);
            return Err(Rejected(vec![Reject::new(kernel, op.line.0, RejectKind::Generator { what })]));
        }
        kernels.push(legal);
    }
    if !changed {
        return Ok(Cow::Borrowed(module));
    }
    let kernels = kernels.into_iter().map(Cow::into_owned).collect();
    match validate_rewritten(Module::new(kernels), module.trust()) {
        Ok(legal) => Ok(Cow::Owned(legal)),
        Err(errors) => {
            let rejects = errors.0.iter().map(|error| Reject {
                kernel: error.kernel.clone(),
                guest: error.guest,
                line: error.line,
                kind: RejectKind::Generator { what: error.kind.to_string() },
            });
            Err(Rejected(rejects.collect()))
        }
    }
}

/// Has the target no memory of a thread's own? There one thread of the machine runs those of a block.
fn shares_locals(target: &Target) -> bool {
    match target {
        #[cfg(feature = "cpu")]
        Target::Cpu(_) => true,
        _ => false,
    }
}

fn way_of(kernel: &Kernel, op: &Op, target: &Target) -> Way {
    let (from, to) = key(kernel, op);
    way(target, op.code, op.accuracy(), from, to)
}

/// An op that has still to be expanded.
fn first_expanded<'k>(kernel: &'k Kernel, target: &Target) -> Option<&'k Op> {
    let mut found = None;
    kernel.for_each_op(&mut |op| {
        if found.is_none() && matches!(way_of(kernel, op, target), Way::Expanded(_)) {
            found = Some(op);
        }
    });
    found
}

struct Rules<'t> {
    target: &'t Target,
}

impl Rewrite for Rules<'_> {
    fn rewrite<'b>(
        &mut self,
        _: Builder<'b>,
        kernel: &Kernel,
        op: &Op,
        operands: &[Val<'b>],
    ) -> Option<Val<'b>> {
        let Way::Expanded(expansion) = way_of(kernel, op, self.target) else { return None };
        let to = kernel.type_of(op.result()?).scalar();
        expand(expansion, op, to, operands)
    }
}

fn expand<'b>(expansion: Expansion, op: &Op, to: Scalar, operands: &[Val<'b>]) -> Option<Val<'b>> {
    let a = *operands.first()?;
    let b = operands.get(1).copied().unwrap_or(a);
    let c = operands.get(2).copied().unwrap_or(b);
    match expansion {
        Expansion::Sequence => sequence::of(op.code, a, b),
        Expansion::InF16 => Some(a.to(Scalar::F16).to(to)),
        Expansion::InF32 => small::widened(op, Scalar::F32, operands, to),
        Expansion::InF64 => match (op.code, a.ty().scalar()) {
            (_, from) if from.is_int() => small::widened(op, Scalar::F64, operands, to),
            (Opcode::Div | Opcode::Sqrt | Opcode::Rcp, _) => {
                let wide: Vec<Val<'b>> = operands.iter().map(|operand| operand.to(Scalar::F64)).collect();
                Some(a.builder().like(op, &wide, wide[0].ty()).to(to))
            }
            (code, _) => {
                let [a, b] = [a, b].map(|x| x.to(Scalar::F64));
                Some(function::of(code, a, b, true)?.to(to))
            }
        },
        Expansion::Sticky => Some(small::from_int(a, op.code == Opcode::SiToFp, to)),
        Expansion::Fma => Some(small::fused(op.code, a, b)),
        Expansion::JoinedFma => Some(small::fma(a, b, c)),
        Expansion::Bits => sequence::sign(op.code, a).or_else(|| Some(small::convert(a, to))),
        Expansion::Shuffles => sequence::reduce(op, a),
        Expansion::Function if a.ty().scalar() == Scalar::F32 => function::of_f32(op.code, a),
        Expansion::Function => function::of(op.code, a, b, false),
    }
}
