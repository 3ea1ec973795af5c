//! What the machine's own instructions do, by op and type.

use super::lanes::bytes_of_kernel;
use super::value::is_half;
use crate::legal::Support;
use vm_ir::op::{Opcode, Shape};
use vm_ir::types::Class;
use vm_ir::{Kernel, Scalar};

const BITS: Support = Support::Expanded("on the bits, as integers");
const IN_F32: Support = Support::Expanded("in f32, rounded once more");
const IN_F64: Support = Support::Expanded("in f64, rounded once more");
const SEQUENCE: Support = Support::Expanded("from other instructions");
const FUNCTION: Support = Support::Expanded("range reduction and a polynomial");
const MEMORY: Support = Support::Expanded("through memory, the threads of a warp in a loop");

pub(super) fn support(op: Opcode, ty: Scalar, to: Scalar) -> Support {
    use Opcode::*;
    let f8 = |s| Class::F8.contains(s);
    match op {
        Clock => Support::Rejected("unsupported-op"),
        Exp | Exp2 | Log | Log2 | Sin | Cos | Tanh | Erf | Pow => match ty {
            Scalar::F64 => FUNCTION,
            Scalar::F32 if matches!(op, Exp | Exp2) => FUNCTION,
            Scalar::F32 => IN_F64,
            _ => IN_F32,
        },
        Neg | Abs if is_half(ty) => BITS,
        Fma if is_half(ty) => Support::Expanded("in f64, joined so that rounding once more is exact"),
        Add | Sub | Mul | Div | Min | Max | Minimum | Maximum | Sqrt | Rsqrt | Rcp | Floor | Ceil | Round
        | Fix | Eq | Ne | Lt | Le | Gt | Ge
            if is_half(ty) || f8(ty) =>
        {
            IN_F32
        }
        Min | Max | Rsqrt | Rcp if ty.is_float() => SEQUENCE,
        DivS | DivU | RemS | RemU => {
            Support::Expanded("the instruction, and a selection where it would trap")
        }
        MulHiS | MulHiU if ty != Scalar::I64 => SEQUENCE,
        FpConv if is_half(ty) || is_half(to) || f8(ty) || f8(to) => BITS,
        SiToFp | UiToFp if is_half(to) => IN_F64,
        FpToSi | FpToUi if is_half(ty) => IN_F32,
        FpToSi | FpToUi => SEQUENCE,
        ClusterGather => Support::Expanded("through memory, the blocks of a cluster in a loop"),
        AtomicAdd if ty.is_float() => Support::Expanded("by comparing and exchanging"),
        AtomicMinS | AtomicMaxS | AtomicMinU | AtomicMaxU | AtomicAnd | AtomicOr | AtomicXor => {
            Support::Expanded("by comparing and exchanging")
        }
        _ => match op.shape() {
            Shape::Shuffle | Shape::Vote | Shape::Ballot | Shape::Reduce(_) => MEMORY,
            _ => Support::Native,
        },
    }
}

/// Machine instructions, roughly, that a kernel may come to.
pub(super) const MAX_SIZE: u64 = 4 << 20;
/// Bytes that the values of one block may take.
pub(super) const MAX_SCRATCH: u64 = 256 << 20;

/// Instructions that one element of an op comes to, roughly.
fn weight(op: Opcode, ty: Scalar) -> u64 {
    match support(op, ty, ty) {
        _ if matches!(op.shape(), Shape::Load | Shape::Store) => 6,
        Support::Native => 1,
        FUNCTION | IN_F64 if matches!(op, Opcode::Pow | Opcode::Erf) => 180,
        FUNCTION | IN_F64 => 90,
        IN_F32 => 60,
        _ => 12,
    }
}

/// An upper bound, roughly, of the instructions that a kernel comes to. Where threads go separate ways, a region is written
/// again for each level of nesting.
pub(super) fn size(kernel: &Kernel) -> u64 {
    fn walk(kernel: &Kernel, region: &vm_ir::module::Region, depth: u64) -> u64 {
        region
            .ops
            .iter()
            .map(|op| {
                let ty = op.operands.last().map(|v| kernel.type_of(*v));
                let ty = ty.or(op.result().map(|v| kernel.type_of(v)));
                let (lanes, scalar) = ty.map_or((1, Scalar::I32), |t| (u64::from(t.lanes()), t.scalar()));
                let inside: u64 = op.regions.iter().map(|r| walk(kernel, r, depth + 1)).sum();
                depth * lanes * weight(op.code, scalar) + inside
            })
            .sum()
    }
    // Single numbers of several threads may be run together.
    8 * walk(kernel, kernel.body(), 1)
}

/// Bytes for the values of a block, if all of them had to be kept.
pub(super) fn scratch(kernel: &Kernel) -> u64 {
    let mut waits = false;
    kernel.for_each_op(&mut |op| waits |= super::plan::level_of(op) != super::plan::Level::Thread);
    let shared = kernel.shared().iter().fold(0u64, |sum, array| sum.saturating_add(array.bytes()));
    let shared = shared.saturating_mul(u64::from(kernel.cluster()));
    if !waits {
        return shared;
    }
    shared.saturating_add(bytes_of_kernel(kernel))
}
