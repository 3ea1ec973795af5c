//! Bits: logic, shifts, fields of bits, and bytes put in another order.

use super::Cx;
use super::table::{Modifiers, operands};
use super::value::{Fact, ir};
use crate::ast::{Class, Instr, Ty};
use crate::error::Result;
use vm_ir::Scalar;
use vm_ir::builder::Val;

const U32: Ty = Ty::new(Class::Unsigned, 32);

pub(super) fn logic(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let value = match instr.opcode() {
        "not" => !cx.values::<1>(instr, ty)?[0],
        "cnot" => {
            let [a] = cx.values(instr, ty)?;
            cx.fit(a.eq(0), a.ty())
        }
        code => {
            let [a, b] = cx.values(instr, ty)?;
            match code {
                "and" if cx.knows(a, Fact::LocalIndex) && cx.literal(instr.operands.get(2)) == Some(31) => {
                    cx.k.lane_id()
                }
                "and" => a & b,
                "or" => a | b,
                _ => a ^ b,
            }
        }
    };
    cx.result(instr, value, ty)
}

/// `a` shifted by `by`, an i32 without a sign; from the width on, what shifting further and further gives.
pub(super) fn shifted<'b>(
    cx: &Cx<'_, 'b>,
    code: &str,
    a: Val<'b>,
    by: Val<'b>,
    literal: Option<u64>,
    signed: bool,
) -> Val<'b> {
    let ty = a.ty();
    let bits = u64::from(ty.scalar().bits());
    let shift = |by: Val<'b>| match (code, signed) {
        ("shl", _) => a << by,
        (_, true) => a >> by,
        (_, false) => a.shr_u(by),
    };
    if let Some(literal) = literal {
        let literal = literal & u64::from(u32::MAX);
        return match signed {
            true => shift(cx.k.bits(ty, literal.min(bits - 1))),
            false if literal < bits => shift(cx.k.bits(ty, literal)),
            false => cx.k.bits(ty, 0),
        };
    }
    match signed {
        true => shift(cx.fit(by.min_u(bits as u32 - 1), ty)),
        false => by.lt_u(bits as u32).select(shift(cx.fit(by, ty)), cx.k.bits(ty, 0)),
    }
}

pub(super) fn shift(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [_, a, by] = operands(instr)?;
    let (a, literal) = (cx.get(a, ty)?, cx.literal(Some(by)));
    let by = cx.get(by, U32)?;
    let code = instr.opcode();
    if let (true, "shr", Some(count @ 5..=31)) = (cx.knows(a, Fact::LocalIndex), code, literal) {
        return cx.result(instr, cx.k.warp_id().shr_u(count as i32 - 5), ty);
    }
    let value = shifted(cx, code, a, by, literal, code == "shr" && ty.is_signed());
    cx.result(instr, value, ty)
}

pub(super) fn funnel(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let left = m.one_of(&["l", "r"]) == Some("l");
    let clamps = m.one_of(&["wrap", "clamp"]) == Some("clamp");
    let ty = m.ty()?;
    let [low, high, by] = cx.values(instr, ty)?;
    let by = if clamps { by.min_u(32) } else { by & 31 };
    let both = high.to_u(Scalar::I64) << 32i64 | low.to_u(Scalar::I64);
    let by = by.to_u(Scalar::I64);
    let value = if left { (both << by).shr_u(32i64) } else { both.shr_u(by) };
    cx.result(instr, value.to(Scalar::I32), ty)
}

pub(super) fn bits(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let amount = m.take("shiftamt");
    let wraps = matches!(instr.opcode(), "bmsk" | "szext") && m.take("wrap");
    m.take("clamp");
    // A position or a number of bits: modulo 32, or as it is, which `shifted` and `min_u` clamp.
    let bounded = |value| if wraps { value & 31 } else { value };
    let ty = m.ty()?;
    let whole = ir(ty)?;
    let width = ty.bits;
    match instr.opcode() {
        "brev" => cx.result(instr, cx.values::<1>(instr, ty)?[0].bit_reverse(), ty),
        "clz" => cx.result(instr, cx.values::<1>(instr, ty)?[0].clz().to(Scalar::I32), U32),
        "popc" => cx.result(instr, cx.values::<1>(instr, ty)?[0].popcount().to(Scalar::I32), U32),
        "bfind" => {
            let [a] = cx.values(instr, ty)?;
            let a = if ty.is_signed() { a.lt(0).select(!a, a) } else { a };
            let zeros = a.clz().to(Scalar::I32);
            let none = zeros.eq(width);
            let value = if amount { zeros } else { (width as i32 - 1) - zeros };
            cx.result(instr, none.select(cx.k.i32(-1), value), U32)
        }
        "bfe" => {
            let [_, a, at, count] = operands(instr)?;
            let a = cx.get(a, ty)?;
            let (at_literal, count_literal) = (cx.literal(Some(at)), cx.literal(Some(count)));
            let (at, count) = (cx.get(at, U32)? & 0xff, cx.get(count, U32)? & 0xff);
            let signed = ty.is_signed();
            let down = shifted(cx, "shr", a, at, at_literal.map(|v| v & 0xff), signed);
            let value = match signed {
                false => {
                    let ones = cx.k.bits(whole, u64::MAX);
                    let mask = !shifted(cx, "shl", ones, count, count_literal.map(|v| v & 0xff), false);
                    down & mask
                }
                true => {
                    // The sign is the field's highest bit, or the value's where the field reaches beyond it.
                    let room = count.min_u(width);
                    let up = width as i32 - room;
                    let up = cx.fit(up, whole);
                    let value = (down << up) >> up;
                    count.eq(0).select(cx.k.bits(whole, 0), value)
                }
            };
            cx.result(instr, value, ty)
        }
        "bfi" => {
            let [_, a, b, at, count] = operands(instr)?;
            let (a, b) = (cx.get(a, ty)?, cx.get(b, ty)?);
            let (at_literal, count_literal) = (cx.literal(Some(at)), cx.literal(Some(count)));
            let (at_literal, count_literal) = (at_literal.map(|v| v & 0xff), count_literal.map(|v| v & 0xff));
            let (at, count) = (cx.get(at, U32)? & 0xff, cx.get(count, U32)? & 0xff);
            let ones = cx.k.bits(whole, u64::MAX);
            let field = !shifted(cx, "shl", ones, count, count_literal, false);
            let mask = shifted(cx, "shl", field, at, at_literal, false);
            let a = shifted(cx, "shl", a, at, at_literal, false);
            cx.result(instr, (a & mask) | (b & !mask), ty)
        }
        "bmsk" => {
            let [at, count] = cx.values(instr, U32)?.map(bounded);
            let ones = cx.k.i32(-1);
            let field = !shifted(cx, "shl", ones, count, None, false);
            cx.result(instr, shifted(cx, "shl", field, at, None, false), U32)
        }
        _ => {
            let [a, count] = cx.values(instr, U32)?;
            let up = 32 - bounded(count).min_u(32);
            let value = shifted(cx, "shl", a, up, None, false);
            cx.result(instr, shifted(cx, "shr", value, up, None, ty.is_signed()), ty)
        }
    }
}

pub(super) fn prmt(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [low, high, selector] = cx.values(instr, ty)?;
    let both = high.to_u(Scalar::I64) << 32i64 | low.to_u(Scalar::I64);
    let literal = cx.literal(instr.operands.get(3));
    let mut value: Option<Val<'_>> = None;
    for at in 0..4u32 {
        let byte = match literal {
            Some(literal) => {
                let nibble = literal >> (4 * at) & 15;
                let byte = both.shr_u(((nibble & 7) * 8) as i64).to(Scalar::I32);
                if nibble & 8 == 0 { byte & 0xff } else { ((byte << 24) >> 31) & 0xff }
            }
            None => {
                let nibble = selector.shr_u(4 * at);
                let shift = ((nibble & 7) << 3).to_u(Scalar::I64);
                let byte = both.shr_u(shift).to(Scalar::I32);
                let sign = ((byte << 24) >> 31) & 0xff;
                (nibble & 8).ne(0).select(sign, byte & 0xff)
            }
        };
        let byte = if at == 0 { byte } else { byte << (8 * at) };
        value = Some(value.map_or(byte, |value| value | byte));
    }
    cx.result(instr, value.unwrap_or(low), ty)
}

pub(super) fn lop3<'b>(cx: &Cx<'_, 'b>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [_, a, b, c, table] = operands(instr)?;
    let Some(table) = cx.literal(Some(table)) else {
        return Err(cx.unsupported("a table that is no literal"));
    };
    let (a, b, c) = (cx.get(a, ty)?, cx.get(b, ty)?, cx.get(c, ty)?);
    let value = match table & 0xff {
        0x80 => a & b & c,
        0xfe => a | b | c,
        0x96 => a ^ b ^ c,
        0xea => (a & b) | c,
        0xf8 => a | (b & c),
        0xca => (a & b) | (!a & c),
        0xe8 => (a & b) | (c & (a | b)),
        0x78 => a ^ (b & c),
        0x6a => (a & b) ^ c,
        0xc0 => a & b,
        0xfc => a | b,
        0x3c => a ^ b,
        table => {
            // The terms of the table, or what is left of all where there are fewer of those.
            let inverse = table.count_ones() > 4;
            let mut value: Option<Val<'_>> = None;
            for row in (0..8u32).filter(|row| (table >> row & 1 == 1) != inverse) {
                let pick = |bit: u32, v: Val<'b>| if row >> bit & 1 == 1 { v } else { !v };
                let term = pick(2, a) & pick(1, b) & pick(0, c);
                value = Some(value.map_or(term, |value| value | term));
            }
            let value = value.unwrap_or_else(|| cx.k.i32(0));
            if inverse { !value } else { value }
        }
    };
    cx.result(instr, value, ty)
}

/// The place of a mask's bit that is the so many-th one that is set, counted from a place on.
pub(super) fn find_nth(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    m.ty()?;
    let [mask, base, offset] = cx.values(instr, U32)?;
    let k = cx.k;
    let (up, down) = (offset.gt(0), offset.lt(0));
    let ones = k.i32(-1);
    let here = k.i32(1) << base;
    let from = up.select(ones << base, down.select((k.i32(2) << base) - 1, here));
    let mask = mask & from;
    let nth = offset.eq(0).select(k.i32(1), down.select(-offset, offset));
    let found = k.range(k.i32(0), 32).fold(ones, |at, found| {
        let passed = mask & down.select(ones << at, (k.i32(2) << at) - 1);
        let is = (mask.shr_u(at) & 1).ne(0) & passed.popcount().eq(nth);
        is.select(at, found)
    });
    cx.result(instr, found, U32)
}
