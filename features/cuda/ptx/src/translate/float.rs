//! Floats. The IR rounds to nearest; other directions are made of f64, in which sums and products of f32 have an exact error.
//! `.approx` gives what is precise in the IR, so that what a program builds upon it is as exact as it expects.

use super::Cx;
use super::table::{Modifiers, operands};
use crate::ast::{Class, Instr, Ty};
use crate::error::Result;
use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

/// Where a result that does not fit is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Modifiers<'_> {
    pub(super) fn rounding(&mut self) -> Rounding {
        match self.one_of(&["rn", "rz", "rm", "rp"]) {
            Some("rz") => Rounding::Zero,
            Some("rm") => Rounding::Down,
            Some("rp") => Rounding::Up,
            _ => Rounding::Nearest,
        }
    }
}

impl<'b> Cx<'_, 'b> {
    /// `.sat`, which makes 0 of NaN, and `.relu`.
    fn clamped(&self, value: Val<'b>, m: &mut Modifiers<'_>) -> Val<'b> {
        if m.take("sat") {
            return value.max(0.0).min(1.0);
        }
        if m.take("relu") { self.relu(value) } else { value }
    }

    /// `.relu`: 0 for a negative number; NaN becomes the canonical one.
    pub(super) fn relu(&self, value: Val<'b>) -> Val<'b> {
        let ty = value.ty();
        let nan = self.k.bits(ty, ty.scalar().mask() >> 1);
        value.gt(0.0).select(value, value.ne(value).select(nan, 0.0))
    }

    /// The number `value + error`, which are f64, in a smaller format; `error` is less than half of the last place of `value`.
    pub(super) fn round_to(
        &self,
        to: Scalar,
        value: Val<'b>,
        error: Option<Val<'b>>,
        rounding: Rounding,
    ) -> Val<'b> {
        let near = value.to(to);
        if rounding == Rounding::Nearest {
            return near;
        }
        let int = if to == Scalar::F32 { Scalar::I32 } else { Scalar::I16 };
        let back = near.to(Scalar::F64);
        let above = |zero_error: f64| {
            let above = back.gt(value);
            match error {
                Some(error) if zero_error < 0.0 => above | (back.eq(value) & error.lt(0.0)),
                _ => above,
            }
        };
        let below = || {
            let below = back.lt(value);
            match error {
                Some(error) => below | (back.eq(value) & error.gt(0.0)),
                None => below,
            }
        };
        let bits = near.bitcast(int);
        let sign = bits.lt(0);
        // The next number below or above, by its bits; those of zero begin at the least one.
        let least = self.k.constant(int.into(), 1);
        let lowest = least | self.k.bits(int.into(), 1 << (int.bits() - 1));
        let zero = near.eq(0.0);
        let down = zero.select(lowest, sign.select(bits + 1, bits - 1));
        let up = zero.select(least, sign.select(bits - 1, bits + 1));
        let toward = match rounding {
            Rounding::Down => above(-1.0).select(down, bits),
            Rounding::Up => below().select(up, bits),
            _ => {
                let inward = sign.select(below(), above(-1.0));
                // Never from zero: what rounds to it is smaller anyway.
                let inward = inward & !zero;
                inward.select(bits - 1, bits)
            }
        };
        toward.bitcast(to)
    }

    /// `a · b + c` of f32, rounded as asked.
    fn fused_f32(&self, a: Val<'b>, b: Val<'b>, c: Val<'b>, rounding: Rounding) -> Val<'b> {
        if rounding == Rounding::Nearest {
            return a.fma(b, c);
        }
        let (a, b, c) = (a.to(Scalar::F64), b.to(Scalar::F64), c.to(Scalar::F64));
        // The product is exact; the error of the sum is too (Knuth).
        let product = a * b;
        let sum = product + c;
        // Opposite addends cancel to +0 in f64; rounded down it is -0 (IEEE 754-2019, 6.3).
        let sum = match rounding {
            Rounding::Down => {
                let negative = (product.bitcast(Scalar::I64) | c.bitcast(Scalar::I64)).lt(0);
                (sum.eq(0.0) & negative).select(self.k.constant(Type::F64, -0.0), sum)
            }
            _ => sum,
        };
        let part = sum - product;
        let error = (product - (sum - part)) + (c - part);
        self.round_to(Scalar::F32, sum, Some(error), rounding)
    }
}

pub(super) fn add_sub_mul(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>, ty: Ty) -> Result<()> {
    let rounding = m.rounding();
    let [a, b] = cx.values(instr, ty)?;
    let value = match (instr.opcode(), rounding) {
        ("add", Rounding::Nearest) => a + b,
        ("sub", Rounding::Nearest) => a - b,
        (_, Rounding::Nearest) => a * b,
        (code, rounding) if ty == F32 => {
            let one = cx.k.f32(1.0);
            match code {
                "add" => cx.fused_f32(a, one, b, rounding),
                "sub" => cx.fused_f32(a, one, -b, rounding),
                _ => {
                    let product = a.to(Scalar::F64) * b.to(Scalar::F64);
                    cx.round_to(Scalar::F32, product, None, rounding)
                }
            }
        }
        _ => return Err(cx.unsupported("a rounding other than .rn")),
    };
    let value = cx.clamped(value, m);
    cx.result(instr, value, ty)
}

const F32: Ty = Ty::new(Class::Float, 32);

pub(super) fn fma(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    fused(cx, instr, m, ty)
}

pub(super) fn fused(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>, ty: Ty) -> Result<()> {
    let rounding = m.rounding();
    let [a, b, c] = cx.values(instr, ty)?;
    let value = match rounding {
        Rounding::Nearest => a.fma(b, c),
        rounding if ty == F32 => cx.fused_f32(a, b, c, rounding),
        _ => return Err(cx.unsupported("a rounding other than .rn")),
    };
    let value = cx.clamped(value, m);
    cx.result(instr, value, ty)
}

pub(super) fn simple(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>, ty: Ty) -> Result<()> {
    let nan = m.take("NaN");
    let of_sign = m.take("xorsign");
    let of_magnitude = m.take("abs");
    if of_sign || of_magnitude {
        return Err(cx.unsupported(".xorsign.abs"));
    }
    let value = match instr.opcode() {
        "abs" => cx.values::<1>(instr, ty)?[0].abs(),
        "neg" => -cx.values::<1>(instr, ty)?[0],
        code => {
            let given: Vec<Val<'_>> =
                instr.operands.iter().skip(1).map(|operand| cx.get(operand, ty)).collect::<Result<_>>()?;
            let [first, rest @ ..] = &given[..] else { return Err(cx.unsupported("so few operands")) };
            rest.iter().fold(*first, |a, b| match (code, nan) {
                ("min", false) => a.min(*b),
                ("min", true) => a.minimum(*b),
                (_, false) => a.max(*b),
                (_, true) => a.maximum(*b),
            })
        }
    };
    cx.result(instr, value, ty)
}

pub(super) fn function(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let ty = m.ty()?;
    m.one_of(&["approx", "rn"]);
    let [a] = cx.values(instr, ty)?;
    let value = match instr.opcode() {
        "rcp" => a.rcp(),
        "sqrt" => a.sqrt(),
        "rsqrt" => a.rsqrt(),
        "sin" => a.sin(),
        "cos" => a.cos(),
        "lg2" => a.log2(),
        "ex2" => a.exp2(),
        _ => a.tanh(),
    };
    cx.result(instr, value, ty)
}

pub(super) fn test(cx: &Cx<'_, '_>, instr: &Instr, m: &mut Modifiers<'_>) -> Result<()> {
    let how = if instr.opcode() == "testp" { m.first().unwrap_or("") } else { "" };
    let ty = m.ty()?;
    let bits_ty = Ty::new(Class::Bits, ty.bits);
    let sign = 1u64 << (ty.bits - 1);
    let (infinity, least) = match ty.bits {
        32 => (0x7f80_0000, 0x0080_0000),
        _ => (0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000),
    };
    if instr.opcode() == "copysign" {
        let [a, b] = cx.values(instr, bits_ty)?;
        let mask = cx.k.bits(a.ty(), sign);
        return cx.result(instr, (a & mask) | (b & !mask), bits_ty);
    }
    let [_, operand] = operands(instr)?;
    let bits = cx.get(operand, bits_ty)?;
    let magnitude = bits & cx.k.bits(bits.ty(), !sign);
    let (infinity, least) = (cx.k.bits(bits.ty(), infinity), cx.k.bits(bits.ty(), least));
    let value = match how {
        "finite" => magnitude.lt_u(infinity),
        "infinite" => magnitude.eq(infinity),
        "number" => magnitude.le_u(infinity),
        "notanumber" => magnitude.gt_u(infinity),
        "normal" => magnitude.lt_u(infinity) & magnitude.ge_u(least),
        "subnormal" => magnitude.ne(0) & magnitude.lt_u(least),
        _ => return Err(cx.unsupported(format!("testp.{how}"))),
    };
    cx.result(instr, value, Ty::new(Class::Predicate, 1))
}
