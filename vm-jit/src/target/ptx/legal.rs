//! What PTX has, by op, type and architecture. The writer asks this table how to write an op, so the table
//! can't say one thing and the code do another.

use super::{Arch, Version};
use crate::legal::Support;
use vm_ir::Scalar;
use vm_ir::op::Opcode;
use vm_ir::types::Class;

/// How an op is written where PTX has no instruction that does just that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expansion {
    /// In f32, rounded once more.
    InF32,
    /// As one fused multiply-add.
    Fma,
    /// A fused multiply-add towards both sides, joined to the odd one, then rounded.
    RoundToOdd,
    /// The instruction, and a selection for the operands for which it says nothing.
    Guarded,
    /// Range reduction and a polynomial or a hardware function.
    Function,
    /// Range reduction and a polynomial.
    Polynomial,
    /// From other instructions.
    Sequence,
    /// On 32-bit registers.
    In32Bits,
    /// In two halves.
    Halves,
    /// Five shuffles.
    Shuffles,
    /// On the bits, as integers.
    Bits,
}

impl Expansion {
    const fn describe(self) -> &'static str {
        match self {
            Expansion::InF32 => "in f32, rounded once more",
            Expansion::Fma => "as one fused multiply-add",
            Expansion::RoundToOdd => {
                "two fused multiply-adds in f32, joined so that rounding once more is exact"
            }
            Expansion::Guarded => "the instruction, and a selection where PTX leaves the result open",
            Expansion::Function => "range reduction and a polynomial or a hardware function",
            Expansion::Polynomial => "range reduction and a polynomial",
            Expansion::Sequence => "from other instructions",
            Expansion::In32Bits => "in 32-bit registers",
            Expansion::Halves => "in two 32-bit halves",
            Expansion::Shuffles => "five shuffles",
            Expansion::Bits => "on the bits, as integers",
        }
    }
}

/// How an op on a type is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Native,
    Expanded(Expansion),
}

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
const SMALL: &[Scalar] = &[I8, I16];
const HALF: &[Scalar] = &[F16, Bf16];
const FUNCTIONS: &[Opcode] = &[Exp, Exp2, Log, Log2, Sin, Cos, Tanh, Erf, Pow];

/// The first row that fits holds; where none fits, PTX has the op.
const TABLE: &[Row] = &[
    row(&[Add, Sub, Mul], &[Bf16], 90, (7, 8), NATIVE),
    row(&[Add, Sub, Mul], &[Bf16], 80, (7, 0), Way::Expanded(Expansion::Fma)),
    row(&[Add, Sub, Mul], &[Bf16], 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(&[Fma], &[Bf16], 80, (7, 0), NATIVE),
    row(&[Fma], &[Bf16], 70, (6, 0), Way::Expanded(Expansion::RoundToOdd)),
    row(&[Min, Max, Minimum, Maximum], HALF, 80, (7, 0), NATIVE),
    row(&[Min, Max, Minimum, Maximum], HALF, 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(&[Minimum, Maximum], &[F32], 80, (7, 0), NATIVE),
    row(&[Minimum, Maximum], &[F32], 70, (6, 0), Way::Expanded(Expansion::Guarded)),
    row(&[Min, Max, Minimum, Maximum], &[F64], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(&[Floor, Ceil, Round, Fix], &[Bf16], 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(&[Div, Sqrt, Rcp, Rsqrt], HALF, 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(FUNCTIONS, HALF, 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(FUNCTIONS, &[F32], 70, (6, 0), Way::Expanded(Expansion::Function)),
    row(FUNCTIONS, &[F64], 70, (6, 0), Way::Expanded(Expansion::Polynomial)),
    row(&[Rsqrt], &[F64], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(&[Abs], &[F16, Bf16, F32, F64], 70, (6, 0), Way::Expanded(Expansion::Bits)),
    row(&[Neg], HALF, 70, (6, 0), Way::Expanded(Expansion::Bits)),
    row(&[AbsS], &[I32, I64], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(&[DivS, DivU, RemS, RemU], &[I32, I64], 70, (6, 0), Way::Expanded(Expansion::Guarded)),
    row(&[Ctz], &[I32, I64], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(&[Rotl], &[I64], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(
        &[
            Add, Sub, Mul, Neg, AbsS, MinS, MaxS, MinU, MaxU, DivS, DivU, RemS, RemU, MulHiS, MulHiU, Not,
            Shl, ShrS, ShrU, Rotl, Clz, Ctz, Popcount, BitReverse, LtS, LeS, GtS, GeS,
        ],
        SMALL,
        70,
        (6, 0),
        Way::Expanded(Expansion::In32Bits),
    ),
    row(&[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16], 90, (7, 8), NATIVE),
    row(&[Eq, Ne, Lt, Le, Gt, Ge], &[Bf16, F8E4M3, F8E5M2], 70, (6, 0), Way::Expanded(Expansion::InF32)),
    row(&[Select], &[Bool], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(
        &[Shuffle, ShuffleXor, ShuffleUp, ShuffleDown],
        &[I64, F64],
        70,
        (6, 0),
        Way::Expanded(Expansion::Halves),
    ),
    row(
        &[WarpAdd, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32],
        80,
        (7, 0),
        NATIVE,
    ),
    row(&[WarpAnd, WarpOr, WarpXor], &[Bool], 70, (6, 0), Way::Expanded(Expansion::Sequence)),
    row(
        &[WarpAdd, WarpMin, WarpMax, WarpMinS, WarpMaxS, WarpMinU, WarpMaxU, WarpAnd, WarpOr, WarpXor],
        &[I8, I16, I32, I64, F16, Bf16, F32, F64],
        70,
        (6, 0),
        Way::Expanded(Expansion::Shuffles),
    ),
    row(
        &[LoadUniform, ClusterGather],
        &[I8, I16, I32, I64, F16, Bf16, F32, F64, F8E4M3, F8E5M2],
        70,
        (6, 0),
        Way::Expanded(Expansion::Sequence),
    ),
];

/// How `op` on `ty` is written. For a conversion, `ty` is what it converts from and `to` what to.
pub(super) fn way(arch: Arch, version: Version, op: Opcode, ty: Scalar, to: Scalar) -> Way {
    let has = |sm, major, minor| arch.sm() >= sm && version >= Version::new(major, minor);
    let expand = |native, expansion| if native { Way::Native } else { Way::Expanded(expansion) };
    match op {
        FpConv if Class::F8.contains(to) => {
            let native = has(89, 8, 1) || has(90, 7, 8);
            if native && ty == F32 { Way::Native } else { expand(false, Expansion::Bits) }
        }
        FpConv if Class::F8.contains(ty) => {
            expand((has(89, 8, 1) || has(90, 7, 8)) && to == F16, Expansion::Bits)
        }
        FpConv if to == Bf16 => expand(ty == F32 && has(80, 7, 0), Expansion::Bits),
        FpConv if ty == Bf16 => expand(false, if to == F32 { Expansion::Bits } else { Expansion::InF32 }),
        SiToFp | UiToFp if to == Bf16 => expand(false, Expansion::InF32),
        FpToSi | FpToUi if ty == Bf16 => expand(false, Expansion::InF32),
        FpToSi | FpToUi if SMALL.contains(&to) => expand(false, Expansion::Guarded),
        FpToSi | FpToUi if to == I64 || ty == F64 => expand(false, Expansion::Guarded),
        _ => TABLE
            .iter()
            .find(|row| {
                row.ops.contains(&op)
                    && row.types.contains(&ty)
                    && arch.sm() >= row.sm
                    && version >= row.version
            })
            .map_or(Way::Native, |row| row.way),
    }
}

pub(super) fn support(arch: Arch, version: Version, op: Opcode, ty: Scalar, to: Scalar) -> Support {
    match way(arch, version, op, ty, to) {
        Way::Native => Support::Native,
        Way::Expanded(expansion) => Support::Expanded(expansion.describe()),
    }
}
