//! What LLVM has for AMD GPUs, by op and type. What is not in it is native.

use crate::legal::{Expansion, Way};
use vm_ir::Scalar;
use vm_ir::op::{Accuracy, Opcode, Shape};
use vm_ir::types::Class;

const BITS: Way = Way::Expanded(Expansion::Bits);
const IN_F32: Way = Way::Expanded(Expansion::InF32);
const IN_F64: Way = Way::Expanded(Expansion::InF64);
const SEQUENCE: Way = Way::Expanded(Expansion::Sequence);
const FUNCTION: Way = Way::Expanded(Expansion::Function);
const GUARDED: Way = Way::Lowered("the instruction, and a selection where LLVM leaves the result open");
const SHUFFLES: Way = Way::Lowered("five shuffles");
const BALLOT: Way = Way::Lowered("a ballot, cut to the warp");

/// How `op` on `ty` is written. For a conversion, `ty` is what it converts from and `to` what to.
pub(crate) fn way(op: Opcode, accuracy: Accuracy, ty: Scalar, to: Scalar) -> Way {
    use Opcode::*;
    use Scalar::{Bf16, F16, F32, F64};
    let half = |scalar| matches!(scalar, F16 | Bf16);
    let small = |scalar| half(scalar) || Class::F8.contains(scalar);
    match op {
        Exp2 if ty == F32 && accuracy == Accuracy::Fast => Way::Native,
        Exp | Exp2 | Log | Log2 | Sin | Cos | Tanh | Erf | Pow => match ty {
            F64 => FUNCTION,
            F32 if matches!(op, Tanh | Erf) => FUNCTION,
            F32 => IN_F64,
            _ => IN_F32,
        },
        Fma if half(ty) => Way::Expanded(Expansion::JoinedFma),
        Div | Sqrt | Rcp | Rsqrt if half(ty) => IN_F32,
        // LLVM makes these of a chip's approximations, which the emulator of the tests has not.
        Div | Sqrt | Rcp if ty == F32 => IN_F64,
        Round if ty == F16 => IN_F32,
        Rsqrt => SEQUENCE,
        Add | Sub | Mul | Min | Max | Minimum | Maximum | Floor | Ceil | Round | Fix | Lt | Le | Gt | Ge
        | Eq | Ne | WarpMin | WarpMax
            if small(ty)
                && (ty != F16 || matches!(op, Min | Max | Minimum | Maximum | WarpMin | WarpMax)) =>
        {
            IN_F32
        }
        // Which of two zeros an instruction gives is not said of every chip.
        Min | Max | Minimum | Maximum => SEQUENCE,
        WarpMin | WarpMax => Way::Expanded(Expansion::Shuffles),
        WarpAdd if ty == Bf16 => Way::Expanded(Expansion::Shuffles),
        DivS | DivU | RemS | RemU => GUARDED,
        FpConv if matches!((ty, to), (F16, F32 | F64) | (F32, F16 | F64) | (F64, F32)) => Way::Native,
        FpConv => BITS,
        SiToFp | UiToFp if half(to) => match ty {
            Scalar::I64 => Way::Expanded(Expansion::Sticky),
            Scalar::I32 => IN_F64,
            _ => IN_F32,
        },
        FpToSi | FpToUi if half(ty) => IN_F32,
        ClusterGather => Way::Rejected("unsupported-op"),
        _ => match op.shape() {
            Shape::Reduce(_) => SHUFFLES,
            Shape::Vote | Shape::Ballot => BALLOT,
            _ => Way::Native,
        },
    }
}
