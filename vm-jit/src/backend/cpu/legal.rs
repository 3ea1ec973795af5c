//! What the machine's own instructions do, by op and type.

use super::isa::Isa;
use super::lanes::bytes_of_kernel;
use super::wide;
use crate::legal::{Expansion, Way};
use vm_ir::op::{Opcode, Shape};
use vm_ir::types::Class;
use vm_ir::{Kernel, Scalar};

const BITS: Way = Way::Expanded(Expansion::Bits);
const IN_F32: Way = Way::Expanded(Expansion::InF32);
const IN_F64: Way = Way::Expanded(Expansion::InF64);
const EXPONENTIAL: Way = Way::Lowered("range reduction and a polynomial");
const SEQUENCE: Way = Way::Lowered("from other instructions");
const MEMORY: Way = Way::Lowered("through memory, the threads of a warp in a loop");
const EXCHANGE: Way = Way::Lowered("by comparing and exchanging");

fn is_half(scalar: Scalar) -> bool {
    matches!(scalar, Scalar::F16 | Scalar::Bf16)
}

pub(crate) fn way(isa: Isa, op: Opcode, ty: Scalar, to: Scalar) -> Way {
    use Opcode::*;
    let small = |s| is_half(s) || Class::F8.contains(s);
    match op {
        Clock => Way::Rejected("unsupported-op"),
        Exp | Exp2 | Log | Log2 | Sin | Cos | Tanh | Erf | Pow => match ty {
            Scalar::F64 if op == Exp => EXPONENTIAL,
            Scalar::F64 => Way::Expanded(Expansion::Function),
            Scalar::F32 if matches!(op, Exp | Exp2) => EXPONENTIAL,
            Scalar::F32 if matches!(op, Tanh | Erf) && wide::has(isa) => EXPONENTIAL,
            Scalar::F32 if matches!(op, Tanh | Erf) => Way::Expanded(Expansion::Function),
            Scalar::F32 => IN_F64,
            _ => IN_F32,
        },
        Neg | Abs if is_half(ty) => BITS,
        Fma if is_half(ty) => Way::Expanded(Expansion::JoinedFma),
        Add | Sub | Mul | Div | Min | Max | Minimum | Maximum | Sqrt | Rsqrt | Rcp | Floor | Ceil | Round
        | Fix | Eq | Ne | Lt | Le | Gt | Ge | WarpMin | WarpMax
            if small(ty) =>
        {
            IN_F32
        }
        WarpAdd if is_half(ty) => Way::Expanded(Expansion::Shuffles),
        Min | Max | Rsqrt | Rcp if ty.is_float() => SEQUENCE,
        DivS | DivU | RemS | RemU => Way::Lowered("the instruction, and a selection where it would trap"),
        MulHiS | MulHiU if ty != Scalar::I64 => SEQUENCE,
        FpConv if wide::has(isa) && wide::conversion(ty, to).is_some() => SEQUENCE,
        FpConv if small(ty) || small(to) => BITS,
        SiToFp | UiToFp if is_half(to) => match ty {
            Scalar::I64 => Way::Expanded(Expansion::Sticky),
            Scalar::I32 => IN_F64,
            _ => IN_F32,
        },
        FpToSi | FpToUi if is_half(ty) => IN_F32,
        FpToSi | FpToUi => SEQUENCE,
        ClusterGather => Way::Lowered("through memory, the blocks of a cluster in a loop"),
        AtomicAdd if ty.is_float() => EXCHANGE,
        AtomicMinS | AtomicMaxS | AtomicMinU | AtomicMaxU | AtomicAnd | AtomicOr | AtomicXor => EXCHANGE,
        _ => match op.shape() {
            Shape::Shuffle | Shape::Vote | Shape::Ballot | Shape::Reduce(_) => MEMORY,
            _ => Way::Native,
        },
    }
}

/// Bytes that the values of one block may take.
pub(super) const MAX_SCRATCH: u64 = 256 << 20;

/// Bytes for the values of a block, if all of them had to be kept.
pub(super) fn scratch(kernel: &Kernel) -> u64 {
    let mut waits = false;
    if kernel.tile().is_some() {
        return 0;
    }
    kernel.for_each_op(&mut |op| waits |= super::plan::level_of(op) != super::plan::Level::Thread);
    let shared = kernel.shared().iter().fold(0u64, |sum, array| sum.saturating_add(array.bytes()));
    let local = kernel.local_bytes().saturating_mul(u64::from(kernel.threads()));
    let shared = shared.saturating_add(local).saturating_mul(u64::from(kernel.cluster()));
    if !waits {
        return shared;
    }
    shared.saturating_add(bytes_of_kernel(kernel))
}
