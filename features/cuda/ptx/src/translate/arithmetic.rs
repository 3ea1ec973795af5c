//! Moves, integers, bits, comparisons and choice.

use super::Cx;
use super::float;
use super::table::{Modifiers, operands};
use super::value::{Fact, ir};
use crate::ast::{Class, Instr, Operand, Ty, int};
use crate::error::Result;
use vm_ir::Scalar;
use vm_ir::builder::Val;

const U32: Ty = Ty::new(Class::Unsigned, 32);
const PREDICATE: Ty = Ty::new(Class::Predicate, 1);

pub(super) fn mov<'b>(cx: &Cx<'_, 'b>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [to, from] = operands(instr)?;
    match (to, from) {
        (Operand::Vector(lanes), from) => {
            let part = Ty::new(Class::Bits, ty.bits / lanes.len().max(1) as u32);
            let value = cx.get(from, ty)?;
            let ty = ir(part)?;
            let whole = value.ty();
            for (at, lane) in lanes.iter().enumerate() {
                let shift = at as u64 * u64::from(part.bits);
                let bits = cx.fit(value.shr_u(cx.k.bits(whole, shift)), ty);
                cx.set(lane, bits, false)?;
            }
            Ok(())
        }
        (to, Operand::Vector(lanes)) => {
            let part = Ty::new(Class::Bits, ty.bits / lanes.len().max(1) as u32);
            let whole = ir(ty)?;
            let mut value: Option<Val<'b>> = None;
            for (at, lane) in lanes.iter().enumerate() {
                let bits = cx.fit(cx.get(lane, part)?, whole);
                let bits =
                    if at == 0 { bits } else { bits << cx.k.bits(whole, at as u64 * u64::from(part.bits)) };
                value = Some(value.map_or(bits, |value| value | bits));
            }
            cx.set(to, value.unwrap_or_else(|| cx.k.bits(whole, 0)), false)
        }
        (to, from) => {
            let value = cx.get(from, ty)?;
            cx.set(to, value, false)
        }
    }
}

/// A parameter of a call: a move between a register and the parts of the parameter, with the type of the access.
pub(super) fn argument<'b>(cx: &Cx<'_, 'b>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let loads = m.one_of(&["load", "store"]) == Some("load");
    let ty = m.ty()?;
    let [to, from] = operands(instr)?;
    let bits = Ty::new(Class::Bits, ty.bits * u32::from(ty.lanes));
    let whole = ir(bits)?;
    let mut at = 0;
    if !loads {
        let value = cx.fit(cx.get(from, ty)?, whole);
        for part in cx.list(to) {
            let Operand::Register(register) = part else { continue };
            let shifted = if at == 0 { value } else { value.shr_u(cx.k.bits(whole, at)) };
            cx.put(*register, shifted)?;
            at += u64::from(cx.types[*register as usize].bits);
        }
        return Ok(());
    }
    let mut value: Option<Val<'b>> = None;
    for part in cx.list(from) {
        let Operand::Register(register) = part else { continue };
        let part = cx.fit(cx.register(*register)?, whole);
        let part = if at == 0 { part } else { part << cx.k.bits(whole, at) };
        value = Some(value.map_or(part, |value| value | part));
        at += u64::from(cx.types[*register as usize].bits);
    }
    cx.set(to, value.unwrap_or_else(|| cx.k.bits(whole, 0)), ty.is_signed())
}

/// The carry flag of an instruction: the register that it reads, and the one that it writes.
#[derive(Default)]
struct Carry<'i> {
    input: Option<&'i Operand>,
    output: Option<&'i Operand>,
}

/// Takes the carry flag from the operands; returns the first result and the sources.
fn split_carry<'i, const N: usize>(
    cx: &Cx<'_, '_>,
    instr: &'i Instr,
    m: &mut Modifiers<'_>,
) -> Result<(&'i Operand, &'i [Operand; N], Carry<'i>)> {
    m.take("cc");
    let wrong = || cx.unsupported("such a number of operands");
    let [result, sources @ ..] = &instr.operands[..] else { return Err(wrong()) };
    let mut carry = Carry::default();
    let result = match result {
        Operand::Pair(pair) if instr.writes_carry() => {
            carry.output = Some(&pair[1]);
            &pair[0]
        }
        result => result,
    };
    let sources = match sources.split_last() {
        Some((input, sources)) if instr.reads_carry() => {
            carry.input = Some(input);
            sources
        }
        _ => sources,
    };
    Ok((result, sources.try_into().map_err(|_| wrong())?, carry))
}

impl<'b> Cx<'_, 'b> {
    /// `a + b`, plus the carry flag if the instruction reads it. The flag becomes the carry out of the top bit.
    fn sum(&self, a: Val<'b>, b: Val<'b>, carry: &Carry<'_>) -> Result<Val<'b>> {
        let sum = a + b;
        let input = carry.input.map(|input| self.get(input, PREDICATE)).transpose()?;
        let input = input.map(|input| self.fit(input, a.ty()));
        let total = input.map_or(sum, |input| sum + input);
        if let Some(output) = carry.output {
            let out = sum.lt_u(a);
            self.set(output, input.map_or(out, |_| out | total.lt_u(sum)), false)?;
        }
        Ok(total)
    }

    /// `a - b`, minus 1 if the instruction reads the carry flag and finds it clear. Hardware computes `a + !b + 1`, which carries if
    /// `a >= b`, so a borrow clears the flag. nvcc's 128-bit division depends on this: it reads the flag of `sub.cc` with `addc`.
    fn difference(&self, a: Val<'b>, b: Val<'b>, carry: &Carry<'_>) -> Result<Val<'b>> {
        let difference = a - b;
        let borrow = carry.input.map(|input| self.get(input, PREDICATE)).transpose()?;
        let borrow = borrow.map(|no_borrow| self.fit(!no_borrow, a.ty()));
        let total = borrow.map_or(difference, |borrow| difference - borrow);
        if let Some(output) = carry.output {
            let none = a.ge_u(b);
            self.set(output, borrow.map_or(none, |borrow| none & difference.ge_u(borrow)), false)?;
        }
        Ok(total)
    }

    /// An integer in more bits.
    fn extended(&self, value: Val<'b>, to: Scalar, signed: bool) -> Val<'b> {
        match (self.known(value), signed) {
            (Some(bits), true) => {
                self.constant(to.into(), vm_ir::format::signed(value.ty().scalar(), bits) as u64)
            }
            (_, true) => value.to(to),
            (_, false) => self.fit(value, to.into()),
        }
    }
}

impl<'b> Cx<'_, 'b> {
    /// The operands behind the result, as values of a type.
    pub(super) fn values<const N: usize>(&self, instr: &Instr, ty: Ty) -> Result<[Val<'b>; N]> {
        let given = instr.operands.get(1..).unwrap_or_default();
        if given.len() != N {
            return Err(crate::error::Error::syntax(
                0,
                format!("it has {} operands, not {}", N + 1, given.len() + 1),
            ));
        }
        let mut values = [self.k.bool(false); N];
        for (value, operand) in values.iter_mut().zip(given) {
            *value = self.get(operand, ty)?;
        }
        Ok(values)
    }

    /// Puts a result of a type into the first operand.
    pub(super) fn result(&self, instr: &Instr, value: Val<'b>, ty: Ty) -> Result<()> {
        match instr.operands.first() {
            Some(operand) => self.set(operand, value, ty.is_signed()),
            None => Err(self.unsupported("an instruction without operands")),
        }
    }

    /// The part of a product that is asked for, and its type.
    fn product(&self, a: &Operand, b: &Operand, ty: Ty, part: &str) -> Result<(Val<'b>, Ty)> {
        if part == "wide" {
            let wide = Ty { bits: ty.bits * 2, ..ty };
            let to = int(wide.bits).ok_or_else(|| self.unsupported("a product of 128 bits"))?;
            let extend = |value: Val<'b>| self.extended(value, to, ty.is_signed());
            return Ok((extend(self.get(a, ty)?) * extend(self.get(b, ty)?), wide));
        }
        let (a, b) = (self.get(a, ty)?, self.get(b, ty)?);
        Ok((
            match (part, ty.is_signed()) {
                ("hi", true) => a.mulhi(b),
                ("hi", false) => a.mulhi_u(b),
                _ => a * b,
            },
            ty,
        ))
    }
}

pub(super) fn add_sub_mul(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let part = m.one_of(&["lo", "hi", "wide"]);
    let ty = m.ty()?;
    if ty.is_float() {
        return float::add_sub_mul(cx, instr, m, ty);
    }
    if instr.opcode() == "mul" {
        let [_, a, b] = operands(instr)?;
        let (value, ty) = cx.product(a, b, ty, part.unwrap_or("lo"))?;
        return cx.result(instr, value, ty);
    }
    let (result, sources, carry) = split_carry::<2>(cx, instr, m)?;
    let set = |value| cx.set(result, value, ty.is_signed());
    let [a, b] = [cx.get(&sources[0], ty)?, cx.get(&sources[1], ty)?];
    let saturates = m.take("sat");
    if carry.output.is_none() && !saturates {
        if let (Some(Fact::Parameter(at)), Some(by), "add") =
            (cx.fact(a), cx.literal(Some(&sources[1])), instr.opcode())
        {
            return set(cx.parameter_address(at.wrapping_add(by)));
        }
        if let (Some(a), Some(b)) = (cx.known(a), cx.known(b)) {
            let sum = if instr.opcode() == "add" { a.wrapping_add(b) } else { a.wrapping_sub(b) };
            return set(cx.constant(ir(ty)?, sum));
        }
    }
    if saturates {
        let (wide_a, wide_b) = (a.to(Scalar::I64), b.to(Scalar::I64));
        let wide = if instr.opcode() == "add" { wide_a + wide_b } else { wide_a - wide_b };
        return set(wide.max(i64::from(i32::MIN)).min(i64::from(i32::MAX)).to(Scalar::I32));
    }
    set(match instr.opcode() {
        "add" => cx.sum(a, b, &carry)?,
        _ => cx.difference(a, b, &carry)?,
    })
}

pub(super) fn with_carry(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let (result, [a, b], carry) = split_carry(cx, instr, m)?;
    let (a, b) = (cx.get(a, ty)?, cx.get(b, ty)?);
    let value = match instr.opcode() {
        "addc" => cx.sum(a, b, &carry)?,
        _ => cx.difference(a, b, &carry)?,
    };
    cx.set(result, value, ty.is_signed())
}

pub(super) fn mad(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let part = m.one_of(&["lo", "hi", "wide"]);
    let ty = m.ty()?;
    if ty.is_float() {
        return float::fused(cx, instr, m, ty);
    }
    let (result, [a, b, c], carry) = split_carry(cx, instr, m)?;
    let (product, ty) = cx.product(a, b, ty, part.unwrap_or("lo"))?;
    let c = cx.get(c, ty)?;
    if m.take("sat") {
        return Err(cx.unsupported(".sat of mad"));
    }
    let value = cx.sum(product, c, &carry)?;
    cx.set(result, value, ty.is_signed())
}

pub(super) fn mul24(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let high = m.one_of(&["lo", "hi"]) == Some("hi");
    let ty = m.ty()?;
    let low24 = |operand: &Operand| -> Result<_> {
        let wide = cx.get(operand, ty)?.to_u(Scalar::I64) << 40i64;
        Ok(if ty.is_signed() { wide >> 40i64 } else { wide.shr_u(40i64) })
    };
    let (a, b, c) = match &instr.operands[..] {
        [_, a, b] => (a, b, None),
        [_, a, b, c] => (a, b, Some(c)),
        _ => return Err(cx.unsupported("so many operands")),
    };
    let product = low24(a)? * low24(b)?;
    let product = if high { product >> 16i64 } else { product }.to(Scalar::I32);
    let value = match c {
        Some(c) => product + cx.get(c, ty)?,
        None => product,
    };
    cx.result(instr, value, ty)
}

pub(super) fn div_rem(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    if ty.is_float() {
        m.one_of(&["rn", "full", "approx"]);
        let [a, b] = cx.values(instr, ty)?;
        return cx.result(instr, a / b, ty);
    }
    let [a, b] = cx.values(instr, ty)?;
    let value = match (instr.opcode(), ty.is_signed()) {
        ("div", true) => a / b,
        ("div", false) => a.div_u(b),
        (_, true) => a % b,
        (_, false) => a.rem_u(b),
    };
    cx.result(instr, value, ty)
}

pub(super) fn simple(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    if ty.is_float() {
        return float::simple(cx, instr, m, ty);
    }
    let relu = m.take("relu");
    let value = match instr.opcode() {
        "abs" => cx.values::<1>(instr, ty)?[0].abs_s(),
        "neg" => -cx.values::<1>(instr, ty)?[0],
        code => {
            let [a, b] = cx.values(instr, ty)?;
            match (code, ty.is_signed()) {
                ("min", true) => a.min(b),
                ("min", false) => a.min_u(b),
                (_, true) => a.max(b),
                (_, false) => a.max_u(b),
            }
        }
    };
    let value = if relu { value.max(0) } else { value };
    cx.result(instr, value, ty)
}

pub(super) fn sad(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [a, b, c] = cx.values(instr, ty)?;
    let less = if ty.is_signed() { a.lt(b) } else { a.lt_u(b) };
    cx.result(instr, c + less.select(b - a, a - b), ty)
}

pub(super) fn dot_product(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    // `dp4a` has four products of bytes, `dp2a` two of the halves of `a` and two bytes of `b`: the lower ones or the upper ones.
    let (products, width, is_upper) = match instr.opcode() {
        "dp4a" => (4, 8, false),
        _ => (2, 16, m.one_of(&["lo", "hi"]) == Some("hi")),
    };
    let (first, second) = (m.ty()?, m.ty()?);
    let [a, b, c] = cx.values(instr, U32)?;
    fn field(value: Val<'_>, at: i32, width: i32, signed: bool) -> Val<'_> {
        let top = value << (32 - width - at);
        if signed { top >> (32 - width) } else { top.shr_u((32 - width) as u32) }
    }
    let mut sum = c;
    for at in 0..products {
        let byte = 8 * at + if is_upper { 16 } else { 0 };
        sum = sum + field(a, width * at, width, first.is_signed()) * field(b, byte, 8, second.is_signed());
    }
    cx.result(instr, sum, U32)
}

/// Compares two values.
fn compared<'b>(cx: &Cx<'_, 'b>, how: &str, a: Val<'b>, b: Val<'b>, ty: Ty) -> Result<Val<'b>> {
    let signed = ty.is_signed();
    if ty.is_float() {
        let unordered = a.ne(a) | b.ne(b);
        return Ok(match how {
            "eq" => a.eq(b),
            "ne" => a.ne(b) & !unordered,
            "lt" => a.lt(b),
            "le" => a.le(b),
            "gt" => a.gt(b),
            "ge" => a.ge(b),
            "equ" => a.eq(b) | unordered,
            "neu" => a.ne(b),
            "ltu" => !a.ge(b),
            "leu" => !a.gt(b),
            "gtu" => !a.le(b),
            "geu" => !a.lt(b),
            "num" => !unordered,
            "nan" => unordered,
            _ => return Err(cx.unsupported(format!("the comparison .{how}"))),
        });
    }
    Ok(match (how, signed) {
        ("eq", _) => a.eq(b),
        ("ne", _) => a.ne(b),
        ("lt", true) => a.lt(b),
        ("le", true) => a.le(b),
        ("gt", true) => a.gt(b),
        ("ge", true) => a.ge(b),
        ("lt" | "lo", _) => a.lt_u(b),
        ("le" | "ls", _) => a.le_u(b),
        ("gt" | "hi", _) => a.gt_u(b),
        ("ge" | "hs", _) => a.ge_u(b),
        _ => return Err(cx.unsupported(format!("the comparison .{how}"))),
    })
}

/// A comparison of the thread's number with a multiple of a warp's size is one of the warp's, and alike in it.
fn by_warp<'b>(cx: &Cx<'_, 'b>, how: &str, a: Val<'b>, literal: Option<u64>) -> Option<Val<'b>> {
    let bound = literal.filter(|_| cx.knows(a, Fact::LocalIndex))? as i32;
    let (bound, below) = match how {
        "lt" | "lo" => (bound, true),
        "le" | "ls" => (bound.checked_add(1)?, true),
        "ge" | "hs" => (bound, false),
        "gt" | "hi" => (bound.checked_add(1)?, false),
        _ => return None,
    };
    if bound < 0 || bound % 32 != 0 {
        return None;
    }
    let warp = cx.k.warp_id();
    Some(if below { warp.lt(bound / 32) } else { warp.ge(bound / 32) })
}

pub(super) fn compare<'b>(cx: &Cx<'_, 'b>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let Some(how) = m.first() else { return Err(cx.unsupported("a comparison without a kind")) };
    let combine = m.one_of(&["and", "or", "xor"]);
    let to = if instr.opcode() == "set" { Some(m.ty()?) } else { None };
    let ty = m.ty()?;
    let [result, a, b, rest @ ..] = &instr.operands[..] else {
        return Err(cx.unsupported("so few operands"));
    };
    let (a, literal) = (cx.get(a, ty)?, cx.literal(Some(b)));
    let b = cx.get(b, ty)?;
    let value = match by_warp(cx, how, a, literal) {
        Some(value) if !ty.is_float() => value,
        _ => compared(cx, how, a, b, ty)?,
    };
    let third = match (combine, rest) {
        (Some(combine), [third]) => Some((combine, cx.get(third, Ty::new(Class::Predicate, 1))?)),
        (None, []) => None,
        _ => return Err(cx.unsupported("so many operands")),
    };
    let apply = |value: Val<'b>, negated: bool| {
        let value: Val<'_> = if negated { !value } else { value };
        match third {
            Some(("and", c)) => value & c,
            Some(("or", c)) => value | c,
            Some((_, c)) => value ^ c,
            None => value,
        }
    };
    match (result, to) {
        (Operand::Pair(pair), None) if ty.lanes == 1 => {
            cx.set(&pair[0], apply(value, false), false)?;
            cx.set(&pair[1], apply(value, true), false)
        }
        // Of pairs of floats: a predicate for each.
        (Operand::Pair(pair), None) => {
            cx.set(&pair[0], apply(value.lane(0), false), false)?;
            cx.set(&pair[1], apply(value.lane(1), false), false)
        }
        (result, None) if ty.lanes == 1 => cx.set(result, apply(value, false), false),
        (_, None) => Err(cx.unsupported("a comparison of pairs into one predicate")),
        (result, Some(to)) if ty.lanes == 1 && to.lanes == 1 => {
            let value = apply(value, false);
            let to_type = ir(to)?;
            let yes = if to.is_float() { cx.k.constant(to_type, 1.0) } else { cx.k.bits(to_type, u64::MAX) };
            cx.set(result, value.select(yes, cx.k.bits(to_type, 0)), false)
        }
        (result, Some(to)) if ty.lanes == 2 => {
            // Ones or all bits in each half.
            let yes = if to.is_float() {
                vm_ir::format::from_f64(ty.scalar().unwrap_or(Scalar::F16), 1.0)
            } else {
                0xffff
            };
            let half = |lane: u8| value.lane(lane).select(cx.k.i32(yes as i32), cx.k.i32(0));
            cx.set(result, half(0) | half(1) << 16, false)
        }
        _ => Err(cx.unsupported("such a result of set")),
    }
}

pub(super) fn choose(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    let [_, a, b, c] = operands(instr)?;
    let (first, second) = (cx.get(a, ty)?, cx.get(b, ty)?);
    let condition = match instr.opcode() {
        "selp" => cx.get(c, Ty::new(Class::Predicate, 1))?,
        _ => {
            let by = m.ty()?;
            let c = cx.get(c, by)?;
            if by.is_float() { c.ge(0.0) } else { c.ge(0) }
        }
    };
    cx.result(instr, condition.select(first, second), ty)
}
