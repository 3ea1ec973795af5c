//! Mathematical functions of f32. Those of f16 and bf16 are computed by these.
//!
//! The fast class takes what the hardware has. The precise class reduces the argument to a range where a
//! polynomial (interpolated at Chebyshev nodes) or the hardware's `ex2` is good to about one ulp.

use super::arch::Feature;
use super::asm::{Arg, Class, Reg, def, ins, when};
use super::writer::Writer;
use vm_ir::Scalar;
use vm_ir::op::Opcode;

/// 1.5 · 2^23: adding it rounds to an integer, which the sum's low bits then hold.
const ROUNDER: u32 = 0x4b40_0000;
const LOG2_E: u32 = 0x3fb8_aa3b;
/// What is missing of log2 e above.
const LOG2_E_REST: u32 = 0x32a5_7060;
const LN_2: u32 = 0x3f31_7218;
const ONE: u32 = 0x3f80_0000;
const HALF: u32 = 0x3f00_0000;
const INFINITY: u32 = 0x7f80_0000;
const NAN: u32 = 0x7fc0_0000;
const MINUS_INFINITY: u32 = 0xff80_0000;

/// (ln(1 + x) − x + x²/2) / x³ for |x| ≤ 1/3.
const LOG: [u32; 9] = [
    0x3eaa_aaab,
    0xbe7f_ffdb,
    0x3e4c_ccaa,
    0xbe2a_bc19,
    0x3e12_5946,
    0xbdfb_ac4b,
    0x3ddf_8d78,
    0xbdfe_681b,
    0x3de8_0d11,
];
/// (sin x − x) / x³ of x² ≤ 0.62.
const SIN: [u32; 4] = [0xbe2a_aaab, 0x3c08_8887, 0xb950_09cb, 0x3636_dc56];
/// (cos x − 1 + x²/2) / x⁴ of x² ≤ 0.62.
const COS: [u32; 4] = [0x3d2a_aaab, 0xbab6_0b60, 0x37d0_0add, 0xb492_905d];
/// π/2 in three parts.
const HALF_PI: [u32; 3] = [0x3fc9_0fdb, 0xb33b_bd2e, 0xa6f7_2ced];
const TWO_OVER_PI: u32 = 0x3f22_f983;
/// 2π · 2^-64, of an f64.
const TURN: u64 = 0x3c19_21fb_5444_2d18;
/// Above this, the three parts of π/2 are too few.
const LARGE_ANGLE: u32 = 0x47ce_4780;
/// (tanh x − x) / x³ of x² ≤ 0.36.
const TANH: [u32; 6] = [0xbeaa_aaab, 0x3e08_887a, 0xbd5d_069f, 0x3cb2_7b53, 0xbc09_becb, 0x3b1b_302b];
/// erf x / x − 1 of x² ≤ 1: erf is 0.9 ulps off at most.
const ERF: [u32; 8] =
    [0x3e03_75d4, 0xbec0_93a3, 0x3de7_1784, 0xbcdc_14e4, 0x3bab_1530, 0xba5e_67b3, 0x38ec_43a8, 0xb722_2fa4];
/// −log2(1 − erf x) for x from 0.95 to 4.1: 1.1 ulps, and what `ex2` is off.
const ERFC: [u32; 10] = [
    0xba17_3a1d,
    0x3fd0_c8d1,
    0x3f69_114e,
    0x3e23_eda3,
    0xbd1f_d805,
    0x3bee_a4c6,
    0xba81_086a,
    0x38bb_4854,
    0xb69f_dba9,
    0x33ea_f3d0,
];
/// log2(1 + x) / x for x from √½ − 1 to √2 − 1, of an f64, to 2^-38.
const LOG2: [u64; 14] = [
    0x3ff7_1547_652b_524e,
    0xbfe7_1547_651d_937d,
    0x3fde_c709_de7f_6654,
    0xbfd7_1547_84e5_83d8,
    0x3fd2_776b_484a_ef0c,
    0xbfce_c6f4_7efb_a149,
    0x3fca_61c5_46b6_2144,
    0xbfc7_186b_33c1_ae24,
    0x3fc4_80d5_b7ca_52e4,
    0xbfc2_3e30_8369_aa47,
    0x3fc0_b89c_035e_7ff1,
    0xbfc1_40fe_cddc_b6d0,
    0x3fc0_c88b_fd6d_f8a2,
    0xbfb1_6aad_9ed6_f31f,
];

impl Writer<'_> {
    fn f32(&mut self, bits: u32) -> Reg {
        def!(self, B32, "mov.b32", Arg::F32(bits))
    }

    fn polynomial(&mut self, coefficients: &[u32], x: Reg) -> Reg {
        let (last, rest) = match coefficients.split_last() {
            Some((last, rest)) => (*last, rest),
            None => return x,
        };
        let mut sum = self.f32(last);
        for coefficient in rest.iter().rev() {
            sum = def!(self, B32, "fma.rn.f32", sum, x, Arg::F32(*coefficient));
        }
        sum
    }

    /// A function of f32.
    pub(super) fn function(&mut self, code: Opcode, fast: bool, a: Reg, b: Reg) -> Reg {
        match (code, fast) {
            (Opcode::Exp, true) => {
                let scaled = def!(self, B32, "mul.rn.f32", a, Arg::F32(LOG2_E));
                def!(self, B32, "ex2.approx.ftz.f32", scaled)
            }
            (Opcode::Exp2, true) => def!(self, B32, "ex2.approx.ftz.f32", a),
            (Opcode::Log, true) => {
                let log2 = def!(self, B32, "lg2.approx.ftz.f32", a);
                def!(self, B32, "mul.rn.f32", log2, Arg::F32(LN_2))
            }
            (Opcode::Log2, true) => def!(self, B32, "lg2.approx.ftz.f32", a),
            (Opcode::Sin, true) => def!(self, B32, "sin.approx.ftz.f32", a),
            (Opcode::Cos, true) => def!(self, B32, "cos.approx.ftz.f32", a),
            (Opcode::Tanh, true) if self.has(Feature::TanhApprox) => def!(self, B32, "tanh.approx.f32", a),
            (Opcode::Pow, true) => {
                let log2 = def!(self, B32, "lg2.approx.ftz.f32", a);
                let scaled = def!(self, B32, "mul.rn.f32", log2, b);
                def!(self, B32, "ex2.approx.ftz.f32", scaled)
            }
            (Opcode::Exp, _) => self.exp(a),
            (Opcode::Exp2, _) => def!(self, B32, "ex2.approx.f32", a),
            (Opcode::Log, _) => self.log(a, false),
            (Opcode::Log2, _) => self.log(a, true),
            (Opcode::Sin, _) => self.sine(a, 0),
            (Opcode::Cos, _) => self.sine(a, 1),
            (Opcode::Tanh, _) => self.tanh(a),
            (Opcode::Erf, _) => self.erf(a),
            _ => self.pow(a, b),
        }
    }

    /// `value · 2^exponent`, rounded once.
    fn scale(&mut self, value: Reg, exponent: Reg) -> Reg {
        let first = def!(self, B32, "shr.s32", exponent, 1);
        let second = def!(self, B32, "sub.s32", exponent, first);
        let mut value = value;
        for part in [first, second] {
            let bits = def!(self, B32, "shl.b32", part, 23);
            let power = def!(self, B32, "add.s32", bits, i64::from(ONE));
            value = def!(self, B32, "mul.rn.f32", value, power);
        }
        value
    }

    /// 2^j · 2^f with the integer j within the exponents of normal numbers. What lies beyond stays in f, so that
    /// overflow, underflow and NaN come out by themselves.
    fn exp(&mut self, a: Reg) -> Reg {
        let sum = def!(self, B32, "fma.rn.f32", a, Arg::F32(LOG2_E), Arg::F32(ROUNDER));
        let sum = def!(self, B32, "max.f32", sum, Arg::F32(ROUNDER - 126));
        let sum = def!(self, B32, "min.f32", sum, Arg::F32(ROUNDER + 126));
        let whole = def!(self, B32, "sub.rn.f32", sum, Arg::F32(ROUNDER));
        let minus = def!(self, B32, "neg.f32", whole);
        let rest = def!(self, B32, "fma.rn.f32", a, Arg::F32(LOG2_E), minus);
        let rest = def!(self, B32, "fma.rn.f32", a, Arg::F32(LOG2_E_REST), rest);
        let power = def!(self, B32, "ex2.approx.ftz.f32", rest);
        // Only j is left of the sum.
        let bits = def!(self, B32, "shl.b32", sum, 23);
        let scale = def!(self, B32, "add.s32", bits, i64::from(ONE));
        def!(self, B32, "mul.rn.f32", power, scale)
    }

    /// The natural logarithm, or that to base 2.
    fn log(&mut self, a: Reg, base2: bool) -> Reg {
        let tiny = def!(self, Pred, "setp.lt.f32", a, Arg::F32(0x0080_0000));
        let scaled = def!(self, B32, "mul.rn.f32", a, Arg::F32(0x4b00_0000)); // 2^23
        let x = def!(self, B32, "selp.b32", scaled, a, tiny);
        let offset = def!(self, B32, "selp.b32", 0xc1b8_0000i64, 0, tiny); // −23
        // x = m · 2^e with m from 2/3 to 4/3.
        let above = def!(self, B32, "sub.s32", x, 0x3f2a_aaab);
        let exponent = def!(self, B32, "and.b32", above, -0x0080_0000);
        let m = def!(self, B32, "sub.s32", x, exponent);
        let e = def!(self, B32, "cvt.rn.f32.s32", exponent);
        let e = def!(self, B32, "fma.rn.f32", e, Arg::F32(0x3400_0000), offset); // 2^-23
        let f = def!(self, B32, "sub.rn.f32", m, Arg::F32(ONE));
        let square = def!(self, B32, "mul.rn.f32", f, f);
        let tail = self.polynomial(&LOG, f);
        let tail = def!(self, B32, "fma.rn.f32", tail, f, Arg::F32(HALF | 1 << 31));
        let ln = def!(self, B32, "fma.rn.f32", tail, square, f);
        let result = if base2 {
            let rest = def!(self, B32, "mul.rn.f32", ln, Arg::F32(LOG2_E_REST));
            let log2 = def!(self, B32, "fma.rn.f32", ln, Arg::F32(LOG2_E), rest);
            def!(self, B32, "add.rn.f32", e, log2)
        } else {
            def!(self, B32, "fma.rn.f32", e, Arg::F32(LN_2), ln)
        };
        let positive = def!(self, Pred, "setp.gt.f32", a, Arg::F32(0));
        let usual = def!(self, Pred, "setp.lt.and.f32", a, Arg::F32(INFINITY), positive);
        let zero = def!(self, Pred, "setp.eq.f32", a, Arg::F32(0));
        let other = def!(self, B32, "selp.b32", a, i64::from(NAN), positive);
        let other = def!(self, B32, "selp.b32", i64::from(MINUS_INFINITY), other, zero);
        def!(self, B32, "selp.b32", result, other, usual)
    }

    /// The sine, or (with one quarter of a turn more) the cosine.
    fn sine(&mut self, a: Reg, quarter: i64) -> Reg {
        let sum = def!(self, B32, "fma.rn.f32", a, Arg::F32(TWO_OVER_PI), Arg::F32(ROUNDER));
        let whole = def!(self, B32, "sub.rn.f32", sum, Arg::F32(ROUNDER));
        let minus = def!(self, B32, "neg.f32", whole);
        let mut r = a;
        for part in HALF_PI {
            r = def!(self, B32, "fma.rn.f32", minus, Arg::F32(part), r);
        }
        let q = def!(self, B32, "sub.s32", sum, i64::from(ROUNDER));
        let size = def!(self, B32, "and.b32", a, i64::from(i32::MAX));
        let large = def!(self, Pred, "setp.gt.f32", size, Arg::F32(LARGE_ANGLE));
        let done = self.asm.new_label();
        when!(self, large, false, "bra", Arg::Label(done));
        self.large_angle(a, size, r, q);
        self.asm.place(done);

        let z = def!(self, B32, "mul.rn.f32", r, r);
        let sin = self.polynomial(&SIN, z);
        let sin = def!(self, B32, "mul.rn.f32", sin, z);
        let sin = def!(self, B32, "fma.rn.f32", sin, r, r);
        let cos = self.polynomial(&COS, z);
        let cos = def!(self, B32, "fma.rn.f32", cos, z, Arg::F32(HALF | 1 << 31));
        let cos = def!(self, B32, "fma.rn.f32", cos, z, Arg::F32(ONE));
        let q = if quarter == 0 { q } else { def!(self, B32, "add.s32", q, quarter) };
        let odd = def!(self, B32, "and.b32", q, 1);
        let odd = def!(self, Pred, "setp.ne.u32", odd, 0);
        let value = def!(self, B32, "selp.b32", cos, sin, odd);
        let sign = def!(self, B32, "and.b32", q, 2);
        let sign = def!(self, B32, "shl.b32", sign, 30);
        let value = def!(self, B32, "xor.b32", value, sign);
        let finite = def!(self, Pred, "setp.lt.f32", size, Arg::F32(INFINITY));
        let value = def!(self, B32, "selp.b32", value, i64::from(NAN), finite);
        if quarter == 0 { self.keep_zero(a, value) } else { value }
    }

    /// `a` where it is a zero, whose sign a sum would lose.
    fn keep_zero(&mut self, a: Reg, value: Reg) -> Reg {
        let zero = def!(self, Pred, "setp.eq.f32", a, Arg::F32(0));
        def!(self, B32, "selp.b32", a, value, zero)
    }

    /// Payne and Hanek's way: the mantissa times those digits of 1/2π that matter, as a 64-bit fraction of a
    /// turn. Writes the quadrant into `q` and what is left, as an angle, into `r`.
    fn large_angle(&mut self, a: Reg, size: Reg, r: Reg, q: Reg) {
        self.turns = true;
        let mantissa = def!(self, B32, "shl.b32", size, 8);
        let mantissa = def!(self, B32, "or.b32", mantissa, i64::from(i32::MIN));
        let exponent = def!(self, B32, "shr.u32", size, 23);
        let exponent = def!(self, B32, "sub.s32", exponent, 126);
        // An infinity or a NaN may go wrong, but not out of the table.
        let exponent = def!(self, B32, "min.u32", exponent, 128);
        let index = def!(self, B32, "shr.u32", exponent, 5);
        let bit = def!(self, B32, "and.b32", exponent, 31);
        let table = def!(self, B64, "mov.u64", "turns");
        let at = def!(self, B64, "mad.wide.u32", index, 4, table);
        let digits: [Reg; 4] =
            std::array::from_fn(|i| def!(self, B32, "ld.const.b32", Arg::At(at, 4 * i as i64)));
        let words: [Reg; 3] =
            std::array::from_fn(|i| def!(self, B32, "shf.l.wrap.b32", digits[i + 1], digits[i], bit));
        let whole = def!(self, B32, "mul.lo.u32", mantissa, words[0]);
        let low = def!(self, B64, "mul.wide.u32", mantissa, words[2]);
        let low = def!(self, B64, "shr.u64", low, 32);
        let fraction = def!(self, B64, "mad.wide.u32", mantissa, words[1], low);
        let whole = def!(self, B64, "cvt.u64.u32", whole);
        let whole = def!(self, B64, "shl.b64", whole, 32);
        let fraction = def!(self, B64, "add.s64", fraction, whole);
        let rounded = def!(self, B64, "add.s64", fraction, 1i64 << 61);
        let quadrant = def!(self, B64, "shr.u64", rounded, 62);
        let turned = def!(self, B64, "shl.b64", quadrant, 62);
        let left = def!(self, B64, "sub.s64", fraction, turned);
        let left = def!(self, B64, "cvt.rn.f64.s64", left);
        let angle = def!(self, B64, "mul.rn.f64", left, Arg::F64(TURN));
        let angle = def!(self, B32, "cvt.rn.f32.f64", angle);
        let sign = def!(self, B32, "and.b32", a, i64::from(i32::MIN));
        ins!(self, "xor.b32", r, angle, sign);
        let quadrant = def!(self, B32, "cvt.u32.u64", quadrant);
        let minus = def!(self, B32, "neg.s32", quadrant);
        let negative = def!(self, Pred, "setp.ne.u32", sign, 0);
        ins!(self, "selp.b32", q, minus, quadrant, negative);
    }

    fn tanh(&mut self, a: Reg) -> Reg {
        let size = def!(self, B32, "and.b32", a, i64::from(i32::MAX));
        let z = def!(self, B32, "mul.rn.f32", a, a);
        let near = self.polynomial(&TANH, z);
        let near = def!(self, B32, "mul.rn.f32", near, z);
        let near = def!(self, B32, "fma.rn.f32", near, a, a);
        let near = self.keep_zero(a, near);
        // 1 − 2 / (e^2|a| + 1)
        let twice = def!(self, B32, "mul.rn.f32", size, Arg::F32(0x4038_aa3b)); // 2 log2 e
        let power = def!(self, B32, "ex2.approx.ftz.f32", twice);
        let sum = def!(self, B32, "add.rn.f32", power, Arg::F32(ONE));
        let inverse = def!(self, B32, "rcp.approx.ftz.f32", sum);
        let far = def!(self, B32, "fma.rn.f32", inverse, Arg::F32(0xc000_0000), Arg::F32(ONE));
        let sign = def!(self, B32, "and.b32", a, i64::from(i32::MIN));
        let far = def!(self, B32, "or.b32", far, sign);
        // A NaN is not far.
        let is_far = def!(self, Pred, "setp.gt.f32", size, Arg::F32(0x3f19_999a)); // 0.6
        def!(self, B32, "selp.b32", far, near, is_far)
    }

    fn erf(&mut self, a: Reg) -> Reg {
        let size = def!(self, B32, "and.b32", a, i64::from(i32::MAX));
        let z = def!(self, B32, "mul.rn.f32", a, a);
        let near = self.polynomial(&ERF, z);
        let near = def!(self, B32, "fma.rn.f32", near, a, a);
        let most = def!(self, B32, "min.f32", size, Arg::F32(0x4081_999a)); // 4.05
        let exponent = self.polynomial(&ERFC, most);
        let minus = def!(self, B32, "neg.f32", exponent);
        let power = def!(self, B32, "ex2.approx.ftz.f32", minus);
        let far = def!(self, B32, "sub.rn.f32", Arg::F32(ONE), power);
        let sign = def!(self, B32, "and.b32", a, i64::from(i32::MIN));
        let far = def!(self, B32, "or.b32", far, sign);
        let is_far = def!(self, Pred, "setp.gt.f32", size, Arg::F32(ONE));
        def!(self, B32, "selp.b32", far, near, is_far)
    }

    /// C's pow: 2^(b · log2 |a|), the logarithm and the product in f64; then the cases that have their own rules.
    fn pow(&mut self, a: Reg, b: Reg) -> Reg {
        let size = def!(self, B32, "and.b32", a, i64::from(i32::MAX));
        let x = def!(self, B64, "cvt.f64.f32", size);
        let (low, high) = (self.asm.new_reg(Class::B32), self.asm.new_reg(Class::B32));
        ins!(self, "mov.b64", Arg::List(&[low, high]), x);
        // x = m · 2^e with m from √½ to √2.
        let above = def!(self, B32, "sub.s32", high, 0x3fe6_a09e);
        let e = def!(self, B32, "shr.s32", above, 20);
        let moved = def!(self, B32, "shl.b32", e, 20);
        let high = def!(self, B32, "sub.s32", high, moved);
        let m = def!(self, B64, "mov.b64", Arg::List(&[low, high]));
        let f = def!(self, B64, "sub.rn.f64", m, Arg::F64(1f64.to_bits()));
        let (last, rest) = (LOG2[13], &LOG2[..13]);
        let mut tail = self.number(Scalar::F64, last);
        for coefficient in rest.iter().rev() {
            tail = def!(self, B64, "fma.rn.f64", tail, f, Arg::F64(*coefficient));
        }
        let e = def!(self, B64, "cvt.rn.f64.s32", e);
        let log2 = def!(self, B64, "fma.rn.f64", tail, f, e);
        let y = def!(self, B64, "cvt.f64.f32", b);
        let product = def!(self, B64, "mul.rn.f64", y, log2);
        // Without `max.f64` and `min.f64`, which are not ordinary comparisons.
        let [least, greatest] = [-200f64, 200f64].map(|bound| Arg::F64(bound.to_bits()));
        let above = def!(self, Pred, "setp.gt.f64", product, least);
        let product = def!(self, B64, "selp.b64", product, least, above);
        let below = def!(self, Pred, "setp.lt.f64", product, greatest);
        let product = def!(self, B64, "selp.b64", product, greatest, below);
        let whole = def!(self, B64, "cvt.rni.f64.f64", product);
        let left = def!(self, B64, "sub.rn.f64", product, whole);
        let left = def!(self, B32, "cvt.rn.f32.f64", left);
        let power = def!(self, B32, "ex2.approx.ftz.f32", left);
        let exponent = def!(self, B32, "cvt.rni.s32.f64", whole);
        let usual = self.scale(power, exponent);

        // Magnitudes without a logarithm.
        let falls = def!(self, Pred, "setp.lt.f32", b, Arg::F32(0));
        let at_zero = def!(self, B32, "selp.b32", i64::from(INFINITY), 0, falls);
        let at_infinity = def!(self, B32, "selp.b32", 0, i64::from(INFINITY), falls);
        let is_zero = def!(self, Pred, "setp.eq.f32", size, Arg::F32(0));
        let is_infinite = def!(self, Pred, "setp.eq.f32", size, Arg::F32(INFINITY));
        let is_one = def!(self, Pred, "setp.eq.f32", size, Arg::F32(ONE));
        let value = def!(self, B32, "selp.b32", at_zero, usual, is_zero);
        let value = def!(self, B32, "selp.b32", at_infinity, value, is_infinite);
        let value = def!(self, B32, "selp.b32", i64::from(ONE), value, is_one);
        // A negative base: odd powers are negative; those that are no integer are no number.
        let cut = def!(self, B32, "cvt.rzi.f32.f32", b);
        let fractional = def!(self, Pred, "setp.neu.f32", cut, b);
        let half = def!(self, B32, "mul.rn.f32", b, Arg::F32(HALF));
        let half_cut = def!(self, B32, "cvt.rzi.f32.f32", half);
        let odd = def!(self, Pred, "setp.neu.f32", half_cut, half);
        let whole = def!(self, Pred, "not.pred", fractional);
        let odd = def!(self, Pred, "and.pred", odd, whole);
        let sign = def!(self, B32, "and.b32", a, i64::from(i32::MIN));
        let negative = def!(self, Pred, "setp.ne.u32", sign, 0);
        let sign = def!(self, B32, "selp.b32", sign, 0, odd);
        let value = def!(self, B32, "or.b32", value, sign);
        let ordinary = def!(self, Pred, "or.pred", is_zero, is_infinite);
        let ordinary = def!(self, Pred, "not.pred", ordinary);
        let no_number = def!(self, Pred, "and.pred", negative, fractional);
        let no_number = def!(self, Pred, "and.pred", no_number, ordinary);
        let value = def!(self, B32, "selp.b32", i64::from(NAN), value, no_number);
        let unordered = def!(self, Pred, "setp.nan.f32", a, b);
        let value = def!(self, B32, "selp.b32", i64::from(NAN), value, unordered);
        let one_base = def!(self, Pred, "setp.eq.f32", a, Arg::F32(ONE));
        let no_power = def!(self, Pred, "setp.eq.f32", b, Arg::F32(0));
        let is_one = def!(self, Pred, "or.pred", one_base, no_power);
        def!(self, B32, "selp.b32", i64::from(ONE), value, is_one)
    }
}

#[cfg(test)]
mod tests {
    use super::{ERF, ERFC};
    use crate::legalise::poly::tests::{value, worst_of_erf};

    #[test]
    fn erf_is_off_as_little_as_is_said() {
        let far = |x: f32| 1.0 - f64::from(-value(&ERFC, x.min(4.05))).exp2() as f32;
        let worst = worst_of_erf(&ERF, 1.0, far);
        assert!(worst < 1.1, "{worst} ulps");
    }
}
