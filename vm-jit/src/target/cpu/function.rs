//! Mathematical functions: `exp`, `exp2`, `log`, `log2`, `tanh`, `erf`, `pow`; on numbers and on vectors. All is written where
//! it is used, but `exp` of several vectors on machines that have longer ones (`wide`).
//!
//! The argument is reduced to a range where a short polynomial is exact to the last place or nearly so. Functions of f32
//! but the exponentials are computed in f64. The fast class is the precise one.

use super::writer::Writer;
use crate::target::poly::{ATANH, ATANH_SHORT, ERF, ERF_PARTS, EXP, EXP_F32, EXP2, EXP2_F32, TANH};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{BlockArg, InstBuilder, Value as Ssa, types};
use vm_ir::op::Opcode;

/// ln 2 in two parts.
const LN_2: [u64; 2] = [0x3fe6_2e42_fefa_39ef, 0x3c7a_bc9e_3b39_803f];
/// ln 2 in two parts, the first with so few bits that its product with an exponent is exact.
const LN_2_SHORT: [u64; 2] = [0x3fe6_2e42_fee0_0000, 0x3dea_39ef_3579_3c76];
pub(super) const LN_2_F32: [u32; 2] = [0x3f31_7218, 0xb102_e308];
/// log2 e in two parts.
const LOG2_E: [u64; 2] = [0x3ff7_1547_652b_82fe, 0x3c77_77d0_ffda_0d24];
/// 2 log2 e in two parts.
const TWICE_LOG2_E: [u64; 2] = [0x4007_1547_652b_82fe, 0x3c87_77d0_ffda_0d24];
/// 1/3 in two parts.
const THIRD: [u64; 2] = [0x3fd5_5555_5555_5555, 0x3c75_5555_5555_5555];
/// What is added to it is rounded to an integer, which is then in the low bits: 1.5 · 2^23 and 1.5 · 2^52.
pub(super) const MAGIC_F32: f64 = 12_582_912.0;
const MAGIC: f64 = 6_755_399_441_055_744.0;
/// √½, where a mantissa begins.
const ROOT_HALF: i64 = 0x3fe6_a09e_667f_3bcd;

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

    /// A function of f32 or f64.
    pub(super) fn function(&mut self, code: Opcode, a: Ssa, b: Ssa) -> Ssa {
        match code {
            Opcode::Exp => self.exp(&[a])[0],
            Opcode::Exp2 => self.exp2(a),
            _ if self.is_f32(a) => self.in_f64(a, b, |w, a, b| w.function64(code, a, b, true)),
            _ => self.function64(code, a, b, false),
        }
    }

    fn function64(&mut self, code: Opcode, a: Ssa, b: Ssa, short: bool) -> Ssa {
        match code {
            Opcode::Log => self.log(a, false, short),
            Opcode::Log2 => self.log(a, true, short),
            Opcode::Sin => self.sine(a, 0),
            Opcode::Cos => self.sine(a, 1),
            Opcode::Tanh => self.tanh(a),
            Opcode::Erf => self.erf(a),
            _ => self.pow(a, b),
        }
    }

    /// Does in f64 what is asked of f32.
    fn in_f64(&mut self, a: Ssa, b: Ssa, run: impl Fn(&mut Self, Ssa, Ssa) -> Ssa) -> Ssa {
        if !self.type_of(a).is_vector() {
            let wide_a = self.b.ins().fpromote(types::F64, a);
            let wide_b = if a == b { wide_a } else { self.b.ins().fpromote(types::F64, b) };
            let result = run(self, wide_a, wide_b);
            return self.b.ins().fdemote(types::F32, result);
        }
        let upper = |w: &mut Self, x: Ssa| {
            let bytes = w.cast(types::I8X16, x);
            let picks: Vec<u8> = (8..16).chain(8..16).collect();
            let mask = w.b.func.dfg.immediates.push(picks.into());
            let moved = w.b.ins().shuffle(bytes, bytes, mask);
            w.cast(types::F32X4, moved)
        };
        let low = [a, b].map(|x| self.b.ins().fvpromote_low(x));
        let high = [a, b].map(|x| {
            let x = upper(self, x);
            self.b.ins().fvpromote_low(x)
        });
        let low = run(self, low[0], low[1]);
        let high = run(self, high[0], high[1]);
        let halves = [low, high].map(|x| {
            let x = self.b.ins().fvdemote(x);
            self.cast(types::I8X16, x)
        });
        let picks: Vec<u8> = (0..8).chain(16..24).collect();
        let mask = self.b.func.dfg.immediates.push(picks.into());
        let joined = self.b.ins().shuffle(halves[0], halves[1], mask);
        self.cast(types::F32X4, joined)
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

    /// The nearest integer of a number that is not large: as a float and as an integer.
    pub(super) fn whole(&mut self, x: Ssa) -> (Ssa, Ssa) {
        let ty = self.type_of(x);
        let magic = if self.is_f32(x) { MAGIC_F32 } else { MAGIC };
        let magic = self.float(ty, magic);
        let sum = self.b.ins().fadd(x, magic);
        let float = self.b.ins().fsub(sum, magic);
        let ints = self.bits_type(x);
        let (sum, magic) = (self.cast(ints, sum), self.cast(ints, magic));
        (float, self.b.ins().isub(sum, magic))
    }

    /// `value · 2^exponent`, rounded once.
    fn scale(&mut self, value: Ssa, exponent: Ssa) -> Ssa {
        let ty = self.type_of(value);
        let ints = self.type_of(exponent);
        let (bias, mantissa) = if self.is_f32(value) { (127, 23) } else { (1023, 52) };
        let first = self.b.ins().sshr_imm(exponent, 1);
        let second = self.b.ins().isub(exponent, first);
        let bias = self.int(ints, bias);
        let mut value = value;
        for part in [first, second] {
            let biased = self.b.ins().iadd(part, bias);
            let bits = self.b.ins().ishl_imm(biased, mantissa);
            let power = self.cast(ty, bits);
            value = self.b.ins().fmul(value, power);
        }
        value
    }

    /// e to the power of each of these numbers or vectors, of one type.
    ///
    /// Where all elements are moderate, the power of two goes into the exponent's bits; else it is multiplied in, behind a
    /// branch that is seldom taken.
    pub(super) fn exp(&mut self, all: &[Ssa]) -> Vec<Ssa> {
        if let Some(results) = self.wide_exp(all) {
            return results;
        }
        let ty = self.type_of(all[0]);
        let end = self.b.create_block();
        let results: Vec<Ssa> = all.iter().map(|_| self.b.append_block_param(end, ty)).collect();
        let (low, high, moderate) = match ty.lane_type() {
            types::F32 => (-104.0, 89.0, 86.0),
            _ => (-746.0, 710.0, 707.0),
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
            let (power, exponent, _) = self.exp_parts(*a);
            let ints = self.type_of(exponent);
            let bits = self.cast(ints, power);
            // What lies above the exponent is shifted out.
            let up = self.b.ins().ishl_imm(exponent, mantissa);
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
            let (power, exponent, magic) = self.exp_parts(clamped);
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

    /// e^a as a number from √½ to √2 and the power of two that it is multiplied with: an integer that has still to be
    /// taken from, and what.
    fn exp_parts(&mut self, a: Ssa) -> (Ssa, Ssa, Ssa) {
        let ty = self.type_of(a);
        let short = self.is_f32(a);
        let log2e = self.float(ty, std::f64::consts::LOG2_E);
        let magic = self.float(ty, if short { MAGIC_F32 } else { MAGIC });
        let sum = self.b.ins().fma(a, log2e, magic);
        let n = self.b.ins().fsub(sum, magic);
        let parts: [f64; 2] = match short {
            true => LN_2_F32.map(|bits| -f64::from(f32::from_bits(bits))),
            false => LN_2.map(|bits| -f64::from_bits(bits)),
        };
        let mut r = a;
        for part in parts {
            let part = self.float(ty, part);
            r = self.b.ins().fma(n, part, r);
        }
        let one = self.float(ty, 1.0);
        let power = if short {
            let p = self.polynomial_f32(&EXP_F32, r);
            let p = self.b.ins().fma(p, r, one);
            self.b.ins().fma(p, r, one)
        } else {
            let square = self.b.ins().fmul(r, r);
            let p = self.polynomial(&EXP, r);
            let tail = self.b.ins().fma(square, p, r);
            self.b.ins().fadd(tail, one)
        };
        let ints = self.bits_type(a);
        let (sum, magic) = (self.cast(ints, sum), self.cast(ints, magic));
        (power, sum, magic)
    }

    fn exp2(&mut self, a: Ssa) -> Ssa {
        let (low, high) = if self.is_f32(a) { (-151.0, 129.0) } else { (-1076.0, 1025.0) };
        let nothing = self.vanishes(a, low);
        let a = self.clamp(a, low, high);
        let (n, exponent) = self.whole(a);
        let r = self.b.ins().fsub(a, n);
        let power = self.exp2_of(r);
        let power = self.choose(nothing.0, nothing.1, power);
        self.scale(power, exponent)
    }

    /// Below `low` an exponential is 0, as often for −∞. It is made so before it is scaled: a machine takes long over a
    /// product that is too small for its format.
    fn vanishes(&mut self, a: Ssa, low: f64) -> (Ssa, Ssa) {
        let ty = self.type_of(a);
        let (low, zero) = (self.float(ty, low), self.float(ty, 0.0));
        (self.b.ins().fcmp(FloatCC::LessThan, a, low), zero)
    }

    /// 2^r for |r| ≤ ½ or a little more.
    fn exp2_of(&mut self, r: Ssa) -> Ssa {
        let ty = self.type_of(r);
        let p = if self.is_f32(r) { self.polynomial_f32(&EXP2_F32, r) } else { self.polynomial(&EXP2, r) };
        let one = self.float(ty, 1.0);
        self.b.ins().fma(r, p, one)
    }

    /// A positive number as m · 2^e with m from √½ to √2: e as a float, and m − 1.
    fn split(&mut self, a: Ssa) -> (Ssa, Ssa) {
        let ty = self.type_of(a);
        let ints = self.bits_type(a);
        let least = self.float(ty, f64::MIN_POSITIVE);
        let tiny = self.b.ins().fcmp(FloatCC::LessThan, a, least);
        let up = self.float(ty, 18_014_398_509_481_984.0); // 2^54
        let scaled = self.b.ins().fmul(a, up);
        let x = self.choose(tiny, scaled, a);
        let (none, down) = (self.float(ty, 0.0), self.float(ty, -54.0));
        let offset = self.choose(tiny, down, none);
        let bits = self.cast(ints, x);
        let root = self.int(ints, ROOT_HALF);
        let above = self.b.ins().isub(bits, root);
        let e = self.b.ins().sshr_imm(above, 52);
        let shifted = self.b.ins().ishl_imm(e, 52);
        let m = self.b.ins().isub(bits, shifted);
        let m = self.cast(ty, m);
        let magic = self.float(ty, 6_755_399_441_055_744.0);
        let magic_bits = self.cast(ints, magic);
        let e = self.b.ins().iadd(e, magic_bits);
        let e = self.cast(ty, e);
        let e = self.b.ins().fsub(e, magic);
        let e = self.b.ins().fadd(e, offset);
        let one = self.float(ty, 1.0);
        (e, self.b.ins().fsub(m, one))
    }

    /// The natural logarithm, or that to base 2.
    fn log(&mut self, a: Ssa, base2: bool, short: bool) -> Ssa {
        let ty = self.type_of(a);
        let (e, f) = self.split(a);
        let two = self.float(ty, 2.0);
        let sum = self.b.ins().fadd(f, two);
        let s = self.b.ins().fdiv(f, sum);
        let z = self.b.ins().fmul(s, s);
        let q = if short { self.polynomial(&ATANH_SHORT, z) } else { self.polynomial(&ATANH, z) };
        let twice = self.b.ins().fadd(z, z);
        let rest = self.b.ins().fmul(twice, q);
        let half = self.float(ty, 0.5);
        let square = self.b.ins().fmul(f, f);
        let half_square = self.b.ins().fmul(square, half);
        let inner = self.b.ins().fadd(half_square, rest);
        let tail = self.b.ins().fmul(s, inner);
        let result = if base2 {
            let hi = self.b.ins().fsub(f, half_square);
            let lost = self.b.ins().fsub(f, hi);
            let lost = self.b.ins().fsub(lost, half_square);
            let lo = self.b.ins().fadd(lost, tail);
            let [log2e, log2e_rest] = LOG2_E.map(|bits| self.f64_bits(a, bits));
            let p = self.b.ins().fmul(hi, log2e);
            let minus = self.b.ins().fneg(p);
            let error = self.b.ins().fma(hi, log2e, minus);
            let error = self.b.ins().fma(hi, log2e_rest, error);
            let error = self.b.ins().fma(lo, log2e, error);
            let sum = self.b.ins().fadd(e, p);
            let back = self.b.ins().fsub(e, sum);
            let back = self.b.ins().fadd(back, p);
            let error = self.b.ins().fadd(error, back);
            self.b.ins().fadd(sum, error)
        } else {
            let [ln2, ln2_rest] = LN_2_SHORT.map(|bits| self.f64_bits(a, bits));
            let low = self.b.ins().fma(e, ln2_rest, tail);
            let low = self.b.ins().fsub(half_square, low);
            let low = self.b.ins().fsub(low, f);
            let high = self.b.ins().fmul(e, ln2);
            self.b.ins().fsub(high, low)
        };
        let zero = self.float(ty, 0.0);
        let infinity = self.float(ty, f64::INFINITY);
        let nan = self.float(ty, f64::NAN);
        let minus_infinity = self.float(ty, f64::NEG_INFINITY);
        let below = self.b.ins().fcmp(FloatCC::LessThan, a, infinity);
        let result = self.choose(below, result, a);
        let negative = self.b.ins().fcmp(FloatCC::LessThan, a, zero);
        let result = self.choose(negative, nan, result);
        let is_zero = self.b.ins().fcmp(FloatCC::Equal, a, zero);
        self.choose(is_zero, minus_infinity, result)
    }

    fn tanh(&mut self, a: Ssa) -> Ssa {
        let ty = self.type_of(a);
        let z = self.b.ins().fmul(a, a);
        let near = self.polynomial(&TANH, z);
        let cubic = self.b.ins().fmul(z, a);
        let near = self.b.ins().fma(near, cubic, a);
        // 1 − 2 / (e^2|a| + 1)
        let size = self.b.ins().fabs(a);
        let most = self.clamp(size, 0.0, 20.0);
        let twice = self.b.ins().fadd(most, most);
        let power = self.exp(&[twice])[0];
        let one = self.float(ty, 1.0);
        let two = self.float(ty, 2.0);
        let sum = self.b.ins().fadd(power, one);
        let part = self.b.ins().fdiv(two, sum);
        let far = self.b.ins().fsub(one, part);
        let far = self.with_sign(far, a);
        let bound = self.float(ty, 0.65);
        // A NaN is not far.
        let is_far = self.b.ins().fcmp(FloatCC::GreaterThan, size, bound);
        let zero = self.float(ty, 0.0);
        let is_zero = self.b.ins().fcmp(FloatCC::Equal, a, zero);
        let near = self.choose(is_zero, a, near);
        self.choose(is_far, far, near)
    }

    fn erf(&mut self, a: Ssa) -> Ssa {
        let ty = self.type_of(a);
        let size = self.b.ins().fabs(a);
        let z = self.b.ins().fmul(a, a);
        let near = self.polynomial(&ERF, z);
        let near = self.b.ins().fmul(near, a);
        let most = self.clamp(size, 1.0, 6.0);
        let bounds = [2.0, 3.0, 4.0].map(|x| {
            let bound = self.float(ty, x);
            self.b.ins().fcmp(FloatCC::GreaterThanOrEqual, most, bound)
        });
        let pick = |w: &mut Self, of: [f64; 4]| {
            let mut value = w.float(ty, of[0]);
            for (bound, other) in bounds.iter().zip(&of[1..]) {
                let other = w.float(ty, *other);
                value = w.choose(*bound, other, value);
            }
            value
        };
        let middle = pick(self, [1.5, 2.5, 3.5, 5.0]);
        let x = self.b.ins().fsub(most, middle);
        let mut far = None;
        for i in (0..ERF_PARTS[0].len()).rev() {
            let c = pick(self, [0, 1, 2, 3].map(|part: usize| f64::from_bits(ERF_PARTS[part][i])));
            far = Some(match far {
                None => c,
                Some(sum) => self.b.ins().fma(sum, x, c),
            });
        }
        let far = far.unwrap_or(x);
        let far = self.with_sign(far, a);
        let one = self.float(ty, 1.0);
        let is_far = self.b.ins().fcmp(FloatCC::GreaterThan, size, one);
        self.choose(is_far, far, near)
    }

    /// A positive number with the sign of another.
    fn with_sign(&mut self, size: Ssa, of: Ssa) -> Ssa {
        let (ty, ints) = (self.type_of(size), self.bits_type(of));
        let top = self.int(ints, i64::MIN >> (64 - ints.lane_bits()));
        let bits = self.cast(ints, of);
        let sign = self.b.ins().band(bits, top);
        let size = self.cast(ints, size);
        let both = self.b.ins().bor(size, sign);
        self.cast(ty, both)
    }

    /// The sum of two numbers, the first the larger, and what is lost.
    fn sum(&mut self, a: Ssa, b: Ssa) -> (Ssa, Ssa) {
        let sum = self.b.ins().fadd(a, b);
        let back = self.b.ins().fsub(a, sum);
        (sum, self.b.ins().fadd(back, b))
    }

    /// A product and what is lost.
    pub(super) fn product(&mut self, a: Ssa, b: Ssa) -> (Ssa, Ssa) {
        let product = self.b.ins().fmul(a, b);
        let minus = self.b.ins().fneg(product);
        (product, self.b.ins().fma(a, b, minus))
    }

    /// C's pow: 2^(b · log2 |a|), with the logarithm in two parts; then the cases that have their own rules.
    fn pow(&mut self, a: Ssa, b: Ssa) -> Ssa {
        let ty = self.type_of(a);
        let [zero, one, two] = [0.0, 1.0, 2.0].map(|x| self.float(ty, x));
        let infinity = self.float(ty, f64::INFINITY);
        let size = self.b.ins().fabs(a);
        let (e, f) = self.split(size);
        // s = f / (2 + f) in two parts.
        let (sum, sum_rest) = self.sum(two, f);
        let s = self.b.ins().fdiv(f, sum);
        let (back, back_rest) = self.product(s, sum);
        let left = self.b.ins().fsub(f, back);
        let left = self.b.ins().fsub(left, back_rest);
        let minus = self.b.ins().fneg(s);
        let left = self.b.ins().fma(minus, sum_rest, left);
        let s_rest = self.b.ins().fdiv(left, sum);
        // atanh s / s − 1 = z (1/3 + z q), its first parts twofold too.
        let (z, z_rest) = self.product(s, s);
        let twice = self.b.ins().fadd(s, s);
        let z_rest = self.b.ins().fma(twice, s_rest, z_rest);
        let q = self.polynomial(&ATANH[1..], z);
        let [third, third_rest] = THIRD.map(|bits| self.f64_bits(a, bits));
        let zq = self.b.ins().fmul(z, q);
        let (p, p_rest) = self.sum(third, zq);
        let p_rest = self.b.ins().fadd(p_rest, third_rest);
        let (t, t_rest) = self.product(z, p);
        let t_rest = self.b.ins().fma(z, p_rest, t_rest);
        let t_rest = self.b.ins().fma(z_rest, p, t_rest);
        // (1 + t) · s · 2 log2 e
        let [scale, scale_rest] = TWICE_LOG2_E.map(|bits| self.f64_bits(a, bits));
        let (u, u_rest) = self.product(s, scale);
        let u_rest = self.b.ins().fma(s, scale_rest, u_rest);
        let u_rest = self.b.ins().fma(s_rest, scale, u_rest);
        let (v, v_rest) = self.product(u, t);
        let v_rest = self.b.ins().fma(u, t_rest, v_rest);
        let v_rest = self.b.ins().fma(u_rest, t, v_rest);
        let (w, w_rest) = self.sum(u, v);
        let w_rest = self.b.ins().fadd(w_rest, u_rest);
        let w_rest = self.b.ins().fadd(w_rest, v_rest);
        let (log, log_rest) = self.sum(e, w);
        let log_rest = self.b.ins().fadd(log_rest, w_rest);
        // 2^(b · log)
        let (y, y_rest) = self.product(b, log);
        let y_rest = self.b.ins().fma(b, log_rest, y_rest);
        let y = self.clamp(y, -1100.0, 1100.0);
        let (n, exponent) = self.whole(y);
        let r = self.b.ins().fsub(y, n);
        let small = self.float(ty, 1.0);
        let rest_size = self.b.ins().fabs(y_rest);
        let sane = self.b.ins().fcmp(FloatCC::LessThan, rest_size, small);
        let y_rest = self.choose(sane, y_rest, zero);
        let r = self.b.ins().fadd(r, y_rest);
        let power = self.exp2_of(r);
        let power = self.scale(power, exponent);

        // |a| is 0 or infinite: so is the power, or the other of the two.
        let is_zero = self.b.ins().fcmp(FloatCC::Equal, size, zero);
        let is_infinite = self.b.ins().fcmp(FloatCC::Equal, size, infinity);
        let positive = self.b.ins().fcmp(FloatCC::GreaterThan, b, zero);
        let of_zero = self.choose(positive, zero, infinity);
        let of_infinity = self.choose(positive, infinity, zero);
        let power = self.choose(is_zero, of_zero, power);
        let power = self.choose(is_infinite, of_infinity, power);
        // b is infinite: by whether |a| is above 1.
        let b_size = self.b.ins().fabs(b);
        let b_infinite = self.b.ins().fcmp(FloatCC::Equal, b_size, infinity);
        let above = self.b.ins().fcmp(FloatCC::GreaterThan, size, one);
        let grown = self.choose(above, infinity, zero);
        let shrunk = self.choose(above, zero, infinity);
        let of_infinite = self.choose(positive, grown, shrunk);
        let size_one = self.b.ins().fcmp(FloatCC::Equal, size, one);
        let of_infinite = self.choose(size_one, one, of_infinite);
        let power = self.choose(b_infinite, of_infinite, power);
        // The sign of a negative a is kept by an odd b, and a fraction has no power.
        let whole = self.b.ins().trunc(b);
        let is_whole = self.b.ins().fcmp(FloatCC::Equal, whole, b);
        let half = self.float(ty, 0.5);
        let halved = self.b.ins().fmul(b, half);
        let half_whole = self.b.ins().trunc(halved);
        let half_differs = self.b.ins().fcmp(FloatCC::NotEqual, half_whole, halved);
        let is_odd = self.b.ins().band(is_whole, half_differs);
        let ints = self.bits_type(a);
        let bits = self.cast(ints, a);
        let none = self.int(ints, 0);
        let signed = self.b.ins().icmp(IntCC::SignedLessThan, bits, none);
        let flips = self.b.ins().band(signed, is_odd);
        let minus = self.b.ins().fneg(power);
        let power = self.choose(flips, minus, power);
        let negative = self.b.ins().fcmp(FloatCC::LessThan, a, zero);
        let finite = self.b.ins().fcmp(FloatCC::LessThan, size, infinity);
        let not_whole = self.b.ins().fcmp(FloatCC::NotEqual, whole, b);
        let fraction = self.b.ins().band(negative, finite);
        let fraction = self.b.ins().band(fraction, not_whole);
        let nan = self.float(ty, f64::NAN);
        let power = self.choose(fraction, nan, power);
        // NaNs, unless the other decides alone.
        let sum = self.b.ins().fadd(a, b);
        let a_nan = self.b.ins().fcmp(FloatCC::Unordered, a, a);
        let b_nan = self.b.ins().fcmp(FloatCC::Unordered, b, b);
        let some_nan = self.b.ins().bor(a_nan, b_nan);
        let power = self.choose(some_nan, sum, power);
        let a_one = self.b.ins().fcmp(FloatCC::Equal, a, one);
        let b_zero = self.b.ins().fcmp(FloatCC::Equal, b, zero);
        let always = self.b.ins().bor(a_one, b_zero);
        self.choose(always, one, power)
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
