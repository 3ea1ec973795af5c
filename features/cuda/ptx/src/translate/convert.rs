//! `cvt`.

use super::Cx;
use super::float::Rounding;
use super::table::Modifiers;
use super::value::ir;
use crate::ast::{Class, Instr, Operand, Ty};
use crate::error::Result;
use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

/// The words for a pair of FP8 numbers.
const PAIRS: [(&str, Scalar); 2] = [("e4m3x2", Scalar::F8E4M3), ("e5m2x2", Scalar::F8E5M2)];

/// `cvt` from and to pairs of FP8 numbers, of which the first is the upper byte.
fn fp8<'b>(
    cx: &Cx<'_, 'b>,
    instr: &Instr,
    m: &mut Modifiers<'_>,
    (word, scalar): (&str, Scalar),
) -> Result<()> {
    m.take(word);
    let (nearest, relu, halves) = (m.rounding() == Rounding::Nearest, m.take("relu"), m.take("f16x2"));
    let clip = |value| if relu { cx.relu(value) } else { value };
    let first = instr.modifiers().find(|m| *m == word || *m == "f16x2");
    let (b16, b32) = (Ty::new(Class::Bits, 16), Ty::new(Class::Bits, 32));
    if halves && first != Some(word) {
        let [_, pair] = &instr.operands[..] else { return Err(cx.unsupported("so many operands")) };
        let pair = cx.get(pair, b16)?;
        let half = |byte: Val<'b>| {
            let half = byte.to(Scalar::I8).bitcast(scalar).to(Scalar::F32);
            clip(half).to(Scalar::F16).bitcast(Scalar::I16).to_u(Scalar::I32)
        };
        return cx.result(instr, half(pair.shr_u(8)) << 16 | half(pair), b32);
    }
    if !nearest || !m.take("satfinite") {
        return Err(cx.unsupported("a conversion to FP8 other than .rn.satfinite"));
    }
    let [high, low] = match (instr.operands.get(1..).unwrap_or_default(), halves) {
        ([pair], true) => {
            let pair = cx.get(pair, b32)?;
            [pair.shr_u(16), pair].map(|half| half.to(Scalar::I16).bitcast(Scalar::F16).to(Scalar::F32))
        }
        ([high, low], false) if m.ty()? == Ty::new(Class::Float, 32) => {
            let of = Ty::new(Class::Float, 32);
            [cx.get(high, of)?, cx.get(low, of)?]
        }
        _ => return Err(cx.unsupported("a conversion of such types")),
    };
    let byte = |value: Val<'b>| {
        let bits = clip(value).to(scalar).bitcast(Scalar::I8).to_u(Scalar::I16);
        value.ne(value).select(cx.constant(Type::I16, 0x7f), bits)
    };
    cx.result(instr, byte(high) << 8 | byte(low), b16)
}

pub(super) fn cvt(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    if let Some(pair) = PAIRS.into_iter().find(|(word, _)| instr.modifiers().any(|m| m == *word)) {
        return fp8(cx, instr, m, pair);
    }
    let to_integer = m.one_of(&["rni", "rzi", "rmi", "rpi"]);
    let rounding = m.rounding();
    m.take("pack");
    let (to, from) = (m.ty()?, m.ty()?);
    let (saturates, relu) = (m.take("sat"), m.take("relu"));
    // Two numbers to a pair, the first to the upper half.
    if to.lanes == 2 && from == Ty::new(Class::Float, 32) {
        let [_, high, low] = &instr.operands[..] else { return Err(cx.unsupported("so many operands")) };
        let half = Ty { lanes: 1, ..to };
        let part = |operand: &Operand| -> Result<Val<'_>> {
            let value = float_to_float(cx, cx.get(operand, from)?, from, half, rounding)?;
            let value = if relu { cx.relu(value) } else { value };
            Ok(value.bitcast(Scalar::I16).to_u(Scalar::I32))
        };
        let value = part(high)? << 16 | part(low)?;
        return cx.result(instr, value, Ty::new(Class::Bits, 32));
    }
    if to.lanes != 1 || from.lanes != 1 || to.class == Class::Predicate || from.class == Class::Predicate {
        return Err(cx.unsupported("a conversion of such types"));
    }
    let [_, operand] = &instr.operands[..] else { return Err(cx.unsupported("so many operands")) };
    let value = cx.get(operand, from)?;
    let scalar = ir(to)?.scalar();
    let value = match (from.is_float(), to.is_float()) {
        (false, false) if saturates => clamped(cx, value, from, to)?,
        (false, false) if from.is_signed() => value.to(scalar),
        (false, false) => cx.fit(value, scalar.into()),
        (false, true) => {
            let exact = from.bits <= 32;
            match rounding {
                Rounding::Nearest if from.is_signed() => value.to(scalar),
                Rounding::Nearest => value.to_u(scalar),
                _ if exact && to.bits < 64 => {
                    let wide = if from.is_signed() { value.to(Scalar::F64) } else { value.to_u(Scalar::F64) };
                    cx.round_to(scalar, wide, None, rounding)
                }
                _ => return Err(cx.unsupported("a rounding other than .rn")),
            }
        }
        (true, false) => {
            let rounded = integral(value, to_integer.unwrap_or("rzi"));
            let number = if to.is_signed() { rounded.to(scalar) } else { rounded.to_u(scalar) };
            // The IR converts NaN to 0. The PTX ISA wants the top bit alone for f64 and for integers of 64 bits.
            if from.bits == 64 || to.bits == 64 {
                value.ne(value).select(cx.k.bits(number.ty(), 1 << (to.bits - 1)), number)
            } else {
                number
            }
        }
        (true, true) => match to_integer {
            Some(how) => {
                let value = integral(value, how);
                float_to_float(cx, value, from, to, Rounding::Nearest)?
            }
            None => float_to_float(cx, value, from, to, rounding)?,
        },
    };
    let value = match () {
        () if saturates && to.is_float() => value.max(0.0).min(1.0),
        () if relu => cx.relu(value),
        () => value,
    };
    cx.result(instr, value, to)
}

/// The integer that a float is rounded to, as a float.
fn integral<'b>(value: Val<'b>, how: &str) -> Val<'b> {
    match how {
        "rni" => value.round(),
        "rmi" => value.floor(),
        "rpi" => value.ceil(),
        _ => value.fix(),
    }
}

fn float_to_float<'b>(
    cx: &Cx<'_, 'b>,
    value: Val<'b>,
    from: Ty,
    to: Ty,
    rounding: Rounding,
) -> Result<Val<'b>> {
    let scalar = ir(to)?.scalar();
    match rounding {
        _ if from == to => Ok(value),
        Rounding::Nearest => Ok(value.to(scalar)),
        _ if to.bits < from.bits => Ok(cx.round_to(scalar, value.to(Scalar::F64), None, rounding)),
        _ => Ok(value.to(scalar)),
    }
}

/// An integer as the nearest one that another type has.
fn clamped<'b>(cx: &Cx<'_, 'b>, value: Val<'b>, from: Ty, to: Ty) -> Result<Val<'b>> {
    let scalar = ir(to)?.scalar();
    if from.bits == 64 && !from.is_signed() {
        let most = if to.is_signed() { scalar.mask() >> 1 } else { scalar.mask() };
        return Ok(value.min_u(most).to_u(scalar));
    }
    let wide = if from.is_signed() { value.to(Scalar::I64) } else { value.to_u(Scalar::I64) };
    let (least, most) = match (to.is_signed(), to.bits) {
        (true, bits) => (i64::MIN >> (64 - bits), ((1u64 << (bits - 1)) - 1) as i64),
        (false, 64) => (0, i64::MAX),
        (false, bits) => (0, (1i64 << bits) - 1),
    };
    let clamped = wide.max(cx.k.i64(least)).min(cx.k.i64(most));
    Ok(clamped.to(scalar))
}
