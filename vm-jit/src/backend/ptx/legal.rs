//! What PTX has, by op, type and architecture. What is not in it is native; `neg` and `abs` of floats are one instruction on
//! the bits.

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
    /// The least architecture and PTX version for which the row holds.
    sm: u16,
    version: Version,
    way: Way,
}

const fn row(ops: &'static [Opcode], types: &'static [Scalar], sm: u16, version: (u8, u8), way: Way) -> Row {
    Row { ops, types, sm, version: Version::new(version.0, version.1), way }
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
    row(&[Add, Sub, Mul], &[Bf16], 90, (7, 8), NATIVE),
    row(&[Add, Sub, Mul], &[Bf16], 80, (7, 0), Way::Expanded(Expansion::Fma)),
    row(&[Add, Sub, Mul], &[Bf16], 70, (6, 0), IN_F32),
    row(&[Fma], &[Bf16], 80, (7, 0), NATIVE),
    row(&[Fma], &[Bf16], 70, (6, 0), Way::Expanded(Expansion::JoinedFma)),
    row(&[Min, Max, Minimum, Maximum], HALF, 80, (7, 0), NATIVE),
    row(&[Min, Max, Minimum, Maximum], HALF, 70, (6, 0), IN_F32),
    row(&[Minimum, Maximum], &[F32], 80, (7, 0), NATIVE),
    row(&[Minimum, Maximum], &[F32], 70, (6, 0), SEQUENCE),
    row(&[Min, Max, Minimum, Maximum], &[F64], 70, (6, 0), SEQUENCE),
    row(&[Floor, Ceil, Round, Fix], &[Bf16], 70, (6, 0), IN_F32),
    row(&[Div, Sqrt, Rcp, Rsqrt], HALF, 70, (6, 0), IN_F32),
    row(FUNCTIONS, HALF, 70, (6, 0), IN_F32),
    row(FUNCTIONS, &[F32], 70, (6, 0), FUNCTION),
    row(FUNCTIONS, &[F64], 70, (6, 0), Way::Expanded(Expansion::Function)),
    row(&[Rsqrt], &[F64], 70, (6, 0), SEQUENCE),
    row(&[AbsS, Ctz], &[I32, I64], 70, (6, 0), LOWERED),
    row(&[DivS, DivU, RemS, RemU], &[I32, I64], 70, (6, 0), GUARDED),
    row(&[Rotl], &[I64], 70, (6, 0), SEQUENCE),
    row(
        &[
            Add, Sub, Mul, Neg, AbsS, MinS, MaxS, MinU, MaxU, DivS, DivU, RemS, RemU, MulHiS, MulHiU, Not,
            Shl, ShrS, ShrU, Rotl, Clz, Ctz, Popcount, BitReverse, LtS, LeS, GtS, GeS,
        ],
        SMALL,
        70,
        (6, 0),
        IN_32_BITS,
    ),
    row(&[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16], 90, (7, 8), NATIVE),
    row(&[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16, F8E4M3, F8E5M2], 70, (6, 0), IN_F32),
    row(&[Select], &[Bool], 70, (6, 0), LOWERED),
    row(&[Shuffle, ShuffleXor, ShuffleUp, ShuffleDown], &[I64, F64], 70, (6, 0), HALVES),
    row(
        &[WarpAdd, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32],
        80,
        (7, 0),
        NATIVE,
    ),
    row(&[WarpAnd, WarpOr, WarpXor], &[Bool], 70, (6, 0), LOWERED),
    row(&[WarpAdd], &[Bf16], 90, (7, 8), SHUFFLES),
    row(&[WarpAdd], &[Bf16], 70, (6, 0), Way::Expanded(Expansion::Shuffles)),
    row(&[WarpMin, WarpMax], HALF, 80, (7, 0), SHUFFLES),
    row(&[WarpMin, WarpMax], HALF, 70, (6, 0), IN_F32),
    row(&[WarpMin, WarpMax], &[F64], 70, (6, 0), Way::Expanded(Expansion::Shuffles)),
    row(
        &[WarpAdd, WarpMin, WarpMax, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32, I64, F16, Bf16, F32, F64],
        70,
        (6, 0),
        SHUFFLES,
    ),
    row(
        &[LoadUniform, ClusterGather],
        &[I8, I16, I32, I64, F16, Bf16, F32, F64, F8E4M3, F8E5M2],
        70,
        (6, 0),
        LOWERED,
    ),
];

/// How `op` on `ty` is written. For a conversion, `ty` is what it converts from and `to` what to.
pub(super) fn way(arch: Arch, version: Version, op: Opcode, ty: Scalar, to: Scalar) -> Way {
    let has = |sm, major, minor| arch.sm() >= sm && version >= Version::new(major, minor);
    let or_bits = |native| if native { NATIVE } else { Way::Expanded(Expansion::Bits) };
    let f8 = |scalar| Class::F8.contains(scalar);
    let has_f8 = has(89, 8, 1) || has(90, 7, 8);
    match op {
        FpConv if f8(to) => or_bits(has_f8 && ty == F32),
        FpConv if f8(ty) && to == F16 => or_bits(has_f8 || ty == F8E5M2),
        FpConv if f8(ty) && to == F32 && (has_f8 || ty == F8E5M2) => Way::Expanded(Expansion::InF16),
        FpConv if f8(ty) => or_bits(false),
        FpConv if to == Bf16 => or_bits(ty == F32 && has(80, 7, 0)),
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
            .find(|row| {
                row.ops.contains(&op)
                    && row.types.contains(&ty)
                    && arch.sm() >= row.sm
                    && version >= row.version
            })
            .map_or(NATIVE, |row| row.way),
    }
}
