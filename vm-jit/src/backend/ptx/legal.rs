//! What PTX has, by op, type and architecture. What is not in it is native; `neg` and `abs` of floats are one instruction on
//! the bits.

use super::arch::Feature;
use super::{Arch, Version};
use crate::legal::{Expansion, Way};
use vm_ir::Scalar;
use vm_ir::op::Opcode;
use vm_ir::types::Class;

/// What the writer does itself.
const IN_32_BITS: Way = Way::Lowered("in 32-bit registers");
const GUARDED: Way = Way::Lowered("the instruction, and a selection where PTX leaves the result open");
const HALVES: Way = Way::Lowered("in two 32-bit halves");
const SHUFFLES: Way = Way::Lowered("five shuffles");
const FUNCTION: Way = Way::Lowered("range reduction and a polynomial or a hardware function");
const LOWERED: Way = Way::Lowered("from other instructions");

struct Row {
    ops: &'static [Opcode],
    types: &'static [Scalar],
    /// Without it the row does not hold.
    needs: Option<Feature>,
    way: Way,
}

/// A row for targets that have a feature.
const fn with(feature: Feature, ops: &'static [Opcode], types: &'static [Scalar], way: Way) -> Row {
    Row { ops, types, needs: Some(feature), way }
}

/// A row for all targets.
const fn row(ops: &'static [Opcode], types: &'static [Scalar], way: Way) -> Row {
    Row { ops, types, needs: None, way }
}

use Opcode::*;
use Scalar::*;
const NATIVE: Way = Way::Native;
const SEQUENCE: Way = Way::Expanded(Expansion::Sequence);
const IN_F32: Way = Way::Expanded(Expansion::InF32);
const SMALL: &[Scalar] = &[I8, I16];
const HALF: &[Scalar] = &[F16, Bf16];
const FUNCTIONS: &[Opcode] = &[Exp, Exp2, Log, Log2, Sin, Cos, Tanh, Erf, Pow];

/// The first row that fits holds; where none fits, PTX has the op.
const TABLE: &[Row] = &[
    with(Feature::ArithmeticBf16, &[Add, Sub, Mul], &[Bf16], NATIVE),
    with(Feature::FmaBf16, &[Add, Sub, Mul], &[Bf16], Way::Expanded(Expansion::Fma)),
    row(&[Add, Sub, Mul], &[Bf16], IN_F32),
    with(Feature::FmaBf16, &[Fma], &[Bf16], NATIVE),
    row(&[Fma], &[Bf16], Way::Expanded(Expansion::JoinedFma)),
    with(Feature::MinMaxHalf, &[Min, Max, Minimum, Maximum], HALF, NATIVE),
    row(&[Min, Max, Minimum, Maximum], HALF, IN_F32),
    with(Feature::MinMaxNaN, &[Minimum, Maximum], &[F32], NATIVE),
    row(&[Minimum, Maximum], &[F32], SEQUENCE),
    row(&[Min, Max, Minimum, Maximum], &[F64], SEQUENCE),
    row(&[Floor, Ceil, Round, Fix], &[Bf16], IN_F32),
    row(&[Div, Sqrt, Rcp, Rsqrt], HALF, IN_F32),
    row(FUNCTIONS, HALF, IN_F32),
    row(FUNCTIONS, &[F32], FUNCTION),
    row(FUNCTIONS, &[F64], Way::Expanded(Expansion::Function)),
    row(&[Rsqrt], &[F64], SEQUENCE),
    row(&[AbsS, Ctz], &[I32, I64], LOWERED),
    row(&[DivS, DivU, RemS, RemU], &[I32, I64], GUARDED),
    row(&[Rotl], &[I64], SEQUENCE),
    row(
        &[
            Add, Sub, Mul, Neg, AbsS, MinS, MaxS, MinU, MaxU, DivS, DivU, RemS, RemU, MulHiS, MulHiU, Not,
            Shl, ShrS, ShrU, Rotl, Clz, Ctz, Popcount, BitReverse, LtS, LeS, GtS, GeS,
        ],
        SMALL,
        IN_32_BITS,
    ),
    with(Feature::ArithmeticBf16, &[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16], NATIVE),
    row(&[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16, F8E4M3, F8E5M2], IN_F32),
    row(&[Select], &[Bool], LOWERED),
    row(&[Shuffle, ShuffleXor, ShuffleUp, ShuffleDown], &[I64, F64], HALVES),
    with(
        Feature::Redux,
        &[WarpAdd, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32],
        NATIVE,
    ),
    row(&[WarpAnd, WarpOr, WarpXor], &[Bool], LOWERED),
    with(Feature::ArithmeticBf16, &[WarpAdd], &[Bf16], SHUFFLES),
    row(&[WarpAdd], &[Bf16], Way::Expanded(Expansion::Shuffles)),
    with(Feature::MinMaxHalf, &[WarpMin, WarpMax], HALF, SHUFFLES),
    row(&[WarpMin, WarpMax], HALF, IN_F32),
    row(&[WarpMin, WarpMax], &[F64], Way::Expanded(Expansion::Shuffles)),
    row(
        &[WarpAdd, WarpMin, WarpMax, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32, I64, F16, Bf16, F32, F64],
        SHUFFLES,
    ),
    row(&[LoadUniform, ClusterGather], &[I8, I16, I32, I64, F16, Bf16, F32, F64, F8E4M3, F8E5M2], LOWERED),
];

/// How `op` on `ty` is written. For a conversion, `ty` is what it converts from and `to` what to.
pub(super) fn way(arch: Arch, version: Version, op: Opcode, ty: Scalar, to: Scalar) -> Way {
    let has = |feature| arch.has(feature, version);
    let or_bits = |native| if native { NATIVE } else { Way::Expanded(Expansion::Bits) };
    let f8 = |scalar| Class::F8.contains(scalar);
    let has_f8 = has(Feature::CvtF8);
    match op {
        FpConv if f8(to) => or_bits(has_f8 && ty == F32),
        FpConv if f8(ty) && to == F16 => or_bits(has_f8 || ty == F8E5M2),
        FpConv if f8(ty) && to == F32 && (has_f8 || ty == F8E5M2) => Way::Expanded(Expansion::InF16),
        FpConv if f8(ty) => or_bits(false),
        FpConv if to == Bf16 => or_bits(ty == F32 && has(Feature::CvtBf16)),
        FpConv if ty == Bf16 => or_bits(false),
        SiToFp | UiToFp if to == Bf16 => match ty {
            I64 => Way::Expanded(Expansion::Sticky),
            I32 => Way::Expanded(Expansion::InF64),
            _ => IN_F32,
        },
        FpToSi | FpToUi if ty == Bf16 => IN_F32,
        FpToSi | FpToUi if SMALL.contains(&to) || to == I64 || ty == F64 => GUARDED,
        _ => TABLE
            .iter()
            .find(|row| row.ops.contains(&op) && row.types.contains(&ty) && row.needs.is_none_or(has))
            .map_or(NATIVE, |row| row.way),
    }
}
