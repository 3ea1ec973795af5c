//! `exp` of f32 and f64 and `exp2` of f32, on numbers and on vectors: what softmax and its like take their time for. They are
//! written where they are used, but those of several f32 vectors on machines that have longer ones (`wide`). The fast class is
//! the precise one.

use super::writer::Writer;
use crate::legalise::poly::{EXP, EXP_F32, EXP2_F32, LN_2};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{BlockArg, InstBuilder, Value as Ssa, types};

/// What is raised to a power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    E,
    /// Of f32 alone.
    Two,
}

pub(super) const LN_2_F32: [u32; 2] = [0x3f31_7218, 0xb102_e308];
/// What is added to it is rounded to an integer, which is then in the low bits: 1.5 · 2^23 and 1.5 · 2^52.
pub(super) const MAGIC_F32: f64 = 12_582_912.0;
const MAGIC: f64 = 6_755_399_441_055_744.0;

impl Writer<'_, '_> {
    pub(super) fn f64_bits(&mut self, like: Ssa, bits: u64) -> Ssa {
        let ty = self.type_of(like);
        self.float(ty, f64::from_bits(bits))
    }

    /// A polynomial, lowest power first.
    pub(super) fn polynomial(&mut self, coefficients: &[u64], x: Ssa) -> Ssa {
        let mut sum = None;
        for bits in coefficients.iter().rev() {
            let c = self.f64_bits(x, *bits);
            sum = Some(match sum {
                None => c,
                Some(sum) => self.b.ins().fma(sum, x, c),
            });
        }
        sum.unwrap_or(x)
    }

    fn polynomial_f32(&mut self, coefficients: &[u32], x: Ssa) -> Ssa {
        let ty = self.type_of(x);
        let mut sum = None;
        for bits in coefficients.iter().rev() {
            let c = self.float(ty, f64::from(f32::from_bits(*bits)));
            sum = Some(match sum {
                None => c,
                Some(sum) => self.b.ins().fma(sum, x, c),
            });
        }
        sum.unwrap_or(x)
    }

    fn is_f32(&self, x: Ssa) -> bool {
        self.type_of(x).lane_type() == types::F32
    }

    /// Not above `high`, not below `low`; a NaN stays one.
    fn clamp(&mut self, x: Ssa, low: f64, high: f64) -> Ssa {
        let ty = self.type_of(x);
        let (low, high) = (self.float(ty, low), self.float(ty, high));
        let above = self.b.ins().fcmp(FloatCC::LessThan, high, x);
        let x = self.choose(above, high, x);
        let below = self.b.ins().fcmp(FloatCC::LessThan, x, low);
        self.choose(below, low, x)
    }

    /// `value · 2^exponent`, rounded once.
    fn scale(&mut self, value: Ssa, exponent: Ssa) -> Ssa {
        let ty = self.type_of(value);
        let ints = self.type_of(exponent);
        let (bias, mantissa) = if self.is_f32(value) { (127, 23) } else { (1023, 52) };
        let first = self.b.ins().sshr_imm_s(exponent, 1);
        let second = self.b.ins().isub(exponent, first);
        let bias = self.int(ints, bias);
        let mut value = value;
        for part in [first, second] {
            let biased = self.b.ins().iadd(part, bias);
            let bits = self.b.ins().ishl_imm_s(biased, mantissa);
            let power = self.cast(ty, bits);
            value = self.b.ins().fmul(value, power);
        }
        value
    }

    /// A base to the power of each of these numbers or vectors, of one type.
    ///
    /// Where all elements are moderate, the power of two goes into the exponent's bits; else it is multiplied in, behind a
    /// branch that is seldom taken.
    pub(super) fn exponentials(&mut self, base: Base, all: &[Ssa]) -> Vec<Ssa> {
        if all.len() > 1
            && let Some(results) = self.wide_function(base.into(), all)
        {
            return results;
        }
        let ty = self.type_of(all[0]);
        let end = self.b.create_block();
        let results: Vec<Ssa> = all.iter().map(|_| self.b.append_block_param(end, ty)).collect();
        let (low, high, moderate) = match (base, ty.lane_type()) {
            (Base::Two, _) => (-151.0, 129.0, 125.0),
            (Base::E, types::F32) => (-104.0, 89.0, 86.0),
            (Base::E, _) => (-746.0, 710.0, 707.0),
        };
        let Some(inside) = self.all_below(all, moderate) else { return results };
        let [usual, other] = [0; 2].map(|_| self.b.create_block());
        self.b.ins().brif(inside, usual, &[], other, &[]);
        self.b.seal_block(usual);
        self.b.seal_block(other);
        self.b.switch_to_block(usual);
        let mantissa = if ty.lane_type() == types::F32 { 23 } else { 52 };
        let mut powers: Vec<BlockArg> = Vec::with_capacity(all.len());
        for a in all {
            let (power, exponent, _) = self.parts(base, *a);
            let ints = self.type_of(exponent);
            let bits = self.cast(ints, power);
            // What lies above the exponent is shifted out.
            let up = self.b.ins().ishl_imm_s(exponent, mantissa);
            let bits = self.b.ins().iadd(bits, up);
            powers.push(self.cast(ty, bits).into());
        }
        self.b.ins().jump(end, &powers);
        self.b.set_cold_block(other);
        self.b.switch_to_block(other);
        let mut powers: Vec<BlockArg> = Vec::with_capacity(all.len());
        for a in all {
            let nothing = self.vanishes(*a, low);
            let clamped = self.clamp(*a, low, high);
            let (power, exponent, magic) = self.parts(base, clamped);
            let power = self.choose(nothing.0, nothing.1, power);
            let exponent = self.b.ins().isub(exponent, magic);
            powers.push(self.scale(power, exponent).into());
        }
        self.b.ins().jump(end, &powers);
        self.b.seal_block(end);
        self.b.switch_to_block(end);
        results
    }

    /// Are the magnitudes of all of these numbers, or of all lanes, at most `bound`? `None` of none. Magnitudes are compared
    /// as integers, which NaN is the greatest of.
    fn all_below(&mut self, all: &[Ssa], bound: f64) -> Option<Ssa> {
        let ty = self.type_of(*all.first()?);
        let ints = ty.as_int();
        let (rest, bound) = match ty.lane_type() {
            types::F32 => (i64::from(i32::MAX), i64::from((bound as f32).to_bits())),
            _ => (i64::MAX, bound.to_bits() as i64),
        };
        let (rest, above) = (self.int(ints, rest), self.int(ints, bound + 1));
        let mut sizes: Vec<Ssa> = all
            .iter()
            .map(|a| {
                let bits = self.cast(ints, *a);
                self.b.ins().band(bits, rest)
            })
            .collect();
        if ints != types::I64X2 {
            sizes = vec![sizes.into_iter().reduce(|a, b| self.b.ins().smax(a, b))?];
        }
        let masks: Vec<Ssa> =
            sizes.into_iter().map(|size| self.b.ins().icmp(IntCC::SignedGreaterThan, above, size)).collect();
        let inside = masks.into_iter().reduce(|a, b| self.b.ins().band(a, b))?;
        Some(if ty.is_vector() { self.all_lanes(inside) } else { inside })
    }

    /// A power as a number from √½ to √2 and the power of two that it is multiplied with: an integer that has still to be
    /// taken from, and what.
    fn parts(&mut self, base: Base, a: Ssa) -> (Ssa, Ssa, Ssa) {
        let ty = self.type_of(a);
        let short = self.is_f32(a);
        let magic = self.float(ty, if short { MAGIC_F32 } else { MAGIC });
        let sum = match base {
            Base::Two => self.b.ins().fadd(a, magic),
            Base::E => {
                let log2e = self.float(ty, std::f64::consts::LOG2_E);
                self.b.ins().fma(a, log2e, magic)
            }
        };
        let n = self.b.ins().fsub(sum, magic);
        let one = self.float(ty, 1.0);
        let power = if base == Base::Two {
            let r = self.b.ins().fsub(a, n);
            let p = self.polynomial_f32(&EXP2_F32, r);
            self.b.ins().fma(r, p, one)
        } else {
            let parts: [f64; 2] = match short {
                true => LN_2_F32.map(|bits| -f64::from(f32::from_bits(bits))),
                false => LN_2.map(|bits| -f64::from_bits(bits)),
            };
            let mut r = a;
            for part in parts {
                let part = self.float(ty, part);
                r = self.b.ins().fma(n, part, r);
            }
            if short {
                let p = self.polynomial_f32(&EXP_F32, r);
                let p = self.b.ins().fma(p, r, one);
                self.b.ins().fma(p, r, one)
            } else {
                let square = self.b.ins().fmul(r, r);
                let p = self.polynomial(&EXP, r);
                let tail = self.b.ins().fma(square, p, r);
                self.b.ins().fadd(tail, one)
            }
        };
        let ints = self.bits_type(a);
        let (sum, magic) = (self.cast(ints, sum), self.cast(ints, magic));
        (power, sum, magic)
    }

    /// Below `low` an exponential is 0, as often for −∞. It is made so before it is scaled: a machine takes long over a
    /// product that is too small for its format.
    fn vanishes(&mut self, a: Ssa, low: f64) -> (Ssa, Ssa) {
        let ty = self.type_of(a);
        let (low, zero) = (self.float(ty, low), self.float(ty, 0.0));
        (self.b.ins().fcmp(FloatCC::LessThan, a, low), zero)
    }

    /// One over a number, in a vector's first lane: a constant that is a vector does not keep the division in the loops
    /// that use it.
    pub(super) fn reciprocal(&mut self, a: Ssa) -> Ssa {
        let ty = self.type_of(a);
        if ty.is_vector() {
            let one = self.float(ty, 1.0);
            return self.b.ins().fdiv(one, a);
        }
        let wide =
            self.b.ins().scalar_to_vector(if ty == types::F32 { types::F32X4 } else { types::F64X2 }, a);
        let result = self.reciprocal(wide);
        self.b.ins().extractlane(result, 0)
    }
}
