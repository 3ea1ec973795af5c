//! Mathematical functions of f64, by the same steps as on the CPU, so that both give the same bits: the argument is
//! reduced to a range where a short polynomial is exact to the last place or nearly so. The fast class is the precise
//! one.

use super::asm::{Arg, Reg, def, ins, when};
use super::writer::Writer;
use crate::target::poly::{ATANH, COS, ERF, ERF_PARTS, EXP, EXP2, SIN, TANH, TWO_OVER_PI};
use std::fmt::Write;
use vm_ir::op::Opcode;

/// 1.5 · 2^52: adding it rounds to an integer, which the sum's low bits then hold.
const ROUNDER: u64 = 0x4338_0000_0000_0000;
const ONE: u64 = 0x3ff0_0000_0000_0000;
const HALF: u64 = 0x3fe0_0000_0000_0000;
const TWO: u64 = 0x4000_0000_0000_0000;
const INFINITY: u64 = 0x7ff0_0000_0000_0000;
const MINUS_INFINITY: u64 = 0xfff0_0000_0000_0000;
const NAN: u64 = 0x7ff8_0000_0000_0000;
/// ln 2 in two parts.
const LN_2: [u64; 2] = [0x3fe6_2e42_fefa_39ef, 0x3c7a_bc9e_3b39_803f];
/// ln 2 in two parts, the first with so few bits that its product with an exponent is exact.
const LN_2_SHORT: [u64; 2] = [0x3fe6_2e42_fee0_0000, 0x3dea_39ef_3579_3c76];
/// log2 e in two parts.
const LOG2_E: [u64; 2] = [0x3ff7_1547_652b_82fe, 0x3c77_77d0_ffda_0d24];
/// 2 log2 e in two parts.
const TWICE_LOG2_E: [u64; 2] = [0x4007_1547_652b_82fe, 0x3c87_77d0_ffda_0d24];
/// 1/3 in two parts.
const THIRD: [u64; 2] = [0x3fd5_5555_5555_5555, 0x3c75_5555_5555_5555];
/// √½, where a mantissa begins.
const ROOT_HALF: i64 = 0x3fe6_a09e_667f_3bcd;
/// π/2 in three parts, and 2/π.
const HALF_PI: [u64; 3] = [0x3ff9_21fb_5444_2d18, 0x3c91_a626_3314_5c07, 0xb91f_1976_b7ed_8fbc];
const TWO_OVER_PI_ROUNDED: u64 = 0x3fe4_5f30_6dc9_c883;
/// Above this, digits of 2/π are used.
const LARGE: f64 = 1_500_000.0;
/// The name of those digits.
const DIGITS: &str = "quarters";

/// The declaration of the digits of 2/π.
pub(super) fn digits(text: &mut String) {
    let _ = write!(text, ".const .align 8 .b64 {DIGITS}[{}] = {{", TWO_OVER_PI.len());
    for (i, word) in TWO_OVER_PI.iter().enumerate() {
        let _ = write!(text, "{}{word:#x}", if i == 0 { "" } else { ", " });
    }
    text.push_str("};\n");
}

fn f(bits: u64) -> Arg<'static> {
    Arg::F64(bits)
}

impl Writer<'_> {
    /// A function of f64.
    pub(super) fn function64(&mut self, code: Opcode, a: Reg, b: Reg) -> Reg {
        match code {
            Opcode::Exp => self.exp64(a),
            Opcode::Exp2 => {
                let a = self.clamp64(a, -1076.0, 1025.0);
                let (n, exponent) = self.whole64(a);
                let r = def!(self, B64, "sub.rn.f64", a, n);
                let power = self.exp2_of(r);
                self.scale64(power, exponent)
            }
            Opcode::Log => self.log64(a, false),
            Opcode::Log2 => self.log64(a, true),
            Opcode::Sin => self.sine64(a, 0),
            Opcode::Cos => self.sine64(a, 1),
            Opcode::Tanh => self.tanh64(a),
            Opcode::Erf => self.erf64(a),
            _ => self.pow64(a, b),
        }
    }

    /// A polynomial, lowest power first.
    fn polynomial64(&mut self, coefficients: &[u64], x: Reg) -> Reg {
        let mut sum = None;
        for bits in coefficients.iter().rev() {
            sum = Some(match sum {
                None => def!(self, B64, "mov.b64", f(*bits)),
                Some(sum) => def!(self, B64, "fma.rn.f64", sum, x, f(*bits)),
            });
        }
        sum.unwrap_or(x)
    }

    fn test(&mut self, name: &str, a: Reg, b: Arg) -> Reg {
        def!(self, Pred, name, a, b)
    }

    fn choose(&mut self, condition: Reg, a: Arg, b: Arg) -> Reg {
        def!(self, B64, "selp.b64", a, b, condition)
    }

    fn size(&mut self, a: Reg) -> Reg {
        def!(self, B64, "and.b64", a, i64::MAX)
    }

    /// Not above `high`, not below `low`; a NaN stays one.
    fn clamp64(&mut self, x: Reg, low: f64, high: f64) -> Reg {
        let (low, high) = (f(low.to_bits()), f(high.to_bits()));
        let above = self.test("setp.gt.f64", x, high);
        let x = self.choose(above, high, x.into());
        let below = self.test("setp.lt.f64", x, low);
        self.choose(below, low, x.into())
    }

    /// The nearest integer of a number that is not large: as a float and as an integer.
    fn whole64(&mut self, x: Reg) -> (Reg, Reg) {
        let sum = def!(self, B64, "add.rn.f64", x, f(ROUNDER));
        let float = def!(self, B64, "sub.rn.f64", sum, f(ROUNDER));
        (float, def!(self, B64, "sub.s64", sum, ROUNDER as i64))
    }

    /// `value · 2^exponent`, rounded once.
    fn scale64(&mut self, value: Reg, exponent: Reg) -> Reg {
        let first = def!(self, B64, "shr.s64", exponent, 1);
        let second = def!(self, B64, "sub.s64", exponent, first);
        let mut value = value;
        for part in [first, second] {
            let biased = def!(self, B64, "add.s64", part, 1023);
            let power = def!(self, B64, "shl.b64", biased, 52);
            value = def!(self, B64, "mul.rn.f64", value, power);
        }
        value
    }

    fn exp64(&mut self, a: Reg) -> Reg {
        let a = self.clamp64(a, -746.0, 710.0);
        let scaled = def!(self, B64, "mul.rn.f64", a, f(LOG2_E[0]));
        let (n, exponent) = self.whole64(scaled);
        let minus = def!(self, B64, "neg.f64", n);
        let r = def!(self, B64, "fma.rn.f64", minus, f(LN_2[0]), a);
        let r = def!(self, B64, "fma.rn.f64", minus, f(LN_2[1]), r);
        let square = def!(self, B64, "mul.rn.f64", r, r);
        let p = self.polynomial64(&EXP, r);
        let tail = def!(self, B64, "fma.rn.f64", square, p, r);
        let power = def!(self, B64, "add.rn.f64", tail, f(ONE));
        self.scale64(power, exponent)
    }

    /// 2^r for |r| ≤ ½ or a little more.
    fn exp2_of(&mut self, r: Reg) -> Reg {
        let p = self.polynomial64(&EXP2, r);
        def!(self, B64, "fma.rn.f64", r, p, f(ONE))
    }

    /// A positive number as m · 2^e with m from √½ to √2: e as a float, and m − 1.
    fn split64(&mut self, a: Reg) -> (Reg, Reg) {
        let tiny = self.test("setp.lt.f64", a, f(f64::MIN_POSITIVE.to_bits()));
        let scaled = def!(self, B64, "mul.rn.f64", a, f(18_014_398_509_481_984f64.to_bits())); // 2^54
        let x = self.choose(tiny, scaled.into(), a.into());
        let offset = self.choose(tiny, f((-54f64).to_bits()), f(0));
        let above = def!(self, B64, "sub.s64", x, ROOT_HALF);
        let e = def!(self, B64, "shr.s64", above, 52);
        let shifted = def!(self, B64, "shl.b64", e, 52);
        let m = def!(self, B64, "sub.s64", x, shifted);
        let e = def!(self, B64, "cvt.rn.f64.s64", e);
        let e = def!(self, B64, "add.rn.f64", e, offset);
        (e, def!(self, B64, "sub.rn.f64", m, f(ONE)))
    }

    /// The natural logarithm, or that to base 2.
    fn log64(&mut self, a: Reg, base2: bool) -> Reg {
        let (e, m) = self.split64(a);
        let sum = def!(self, B64, "add.rn.f64", m, f(TWO));
        let s = def!(self, B64, "div.rn.f64", m, sum);
        let z = def!(self, B64, "mul.rn.f64", s, s);
        let q = self.polynomial64(&ATANH, z);
        let twice = def!(self, B64, "add.rn.f64", z, z);
        let rest = def!(self, B64, "mul.rn.f64", twice, q);
        let square = def!(self, B64, "mul.rn.f64", m, m);
        let half_square = def!(self, B64, "mul.rn.f64", square, f(HALF));
        let inner = def!(self, B64, "add.rn.f64", half_square, rest);
        let tail = def!(self, B64, "mul.rn.f64", s, inner);
        let result = if base2 {
            let high = def!(self, B64, "sub.rn.f64", m, half_square);
            let lost = def!(self, B64, "sub.rn.f64", m, high);
            let lost = def!(self, B64, "sub.rn.f64", lost, half_square);
            let low = def!(self, B64, "add.rn.f64", lost, tail);
            let p = def!(self, B64, "mul.rn.f64", high, f(LOG2_E[0]));
            let minus = def!(self, B64, "neg.f64", p);
            let error = def!(self, B64, "fma.rn.f64", high, f(LOG2_E[0]), minus);
            let error = def!(self, B64, "fma.rn.f64", high, f(LOG2_E[1]), error);
            let error = def!(self, B64, "fma.rn.f64", low, f(LOG2_E[0]), error);
            let (sum, rest) = self.sum64(e, p);
            let error = def!(self, B64, "add.rn.f64", error, rest);
            def!(self, B64, "add.rn.f64", sum, error)
        } else {
            let low = def!(self, B64, "fma.rn.f64", e, f(LN_2_SHORT[1]), tail);
            let low = def!(self, B64, "sub.rn.f64", half_square, low);
            let low = def!(self, B64, "sub.rn.f64", low, m);
            let high = def!(self, B64, "mul.rn.f64", e, f(LN_2_SHORT[0]));
            def!(self, B64, "sub.rn.f64", high, low)
        };
        let below = self.test("setp.lt.f64", a, f(INFINITY));
        let result = self.choose(below, result.into(), a.into());
        let negative = self.test("setp.lt.f64", a, f(0));
        let result = self.choose(negative, f(NAN), result.into());
        let is_zero = self.test("setp.eq.f64", a, f(0));
        self.choose(is_zero, f(MINUS_INFINITY), result.into())
    }

    fn tanh64(&mut self, a: Reg) -> Reg {
        let z = def!(self, B64, "mul.rn.f64", a, a);
        let near = self.polynomial64(&TANH, z);
        let cubic = def!(self, B64, "mul.rn.f64", z, a);
        let near = def!(self, B64, "fma.rn.f64", near, cubic, a);
        // 1 − 2 / (e^2|a| + 1)
        let size = self.size(a);
        let most = self.clamp64(size, 0.0, 20.0);
        let twice = def!(self, B64, "add.rn.f64", most, most);
        let power = self.exp64(twice);
        let sum = def!(self, B64, "add.rn.f64", power, f(ONE));
        let part = def!(self, B64, "div.rn.f64", f(TWO), sum);
        let far = def!(self, B64, "sub.rn.f64", f(ONE), part);
        let far = self.with_sign(far, a);
        // A NaN is not far.
        let is_far = self.test("setp.gt.f64", size, f(0.65f64.to_bits()));
        let is_zero = self.test("setp.eq.f64", a, f(0));
        let near = self.choose(is_zero, a.into(), near.into());
        self.choose(is_far, far.into(), near.into())
    }

    fn erf64(&mut self, a: Reg) -> Reg {
        let size = self.size(a);
        let z = def!(self, B64, "mul.rn.f64", a, a);
        let near = self.polynomial64(&ERF, z);
        let near = def!(self, B64, "mul.rn.f64", near, a);
        let most = self.clamp64(size, 1.0, 6.0);
        let bounds = [2.0, 3.0, 4.0].map(|x: f64| self.test("setp.ge.f64", most, f(x.to_bits())));
        let pick = |w: &mut Self, of: [u64; 4]| {
            let mut value = def!(w, B64, "mov.b64", f(of[0]));
            for (bound, other) in bounds.iter().zip(&of[1..]) {
                value = w.choose(*bound, f(*other), value.into());
            }
            value
        };
        let middle = pick(self, [1.5, 2.5, 3.5, 5.0].map(f64::to_bits));
        let x = def!(self, B64, "sub.rn.f64", most, middle);
        let mut far = None;
        for i in (0..ERF_PARTS[0].len()).rev() {
            let c = pick(self, [0, 1, 2, 3].map(|part: usize| ERF_PARTS[part][i]));
            far = Some(match far {
                None => c,
                Some(sum) => def!(self, B64, "fma.rn.f64", sum, x, c),
            });
        }
        let far = self.with_sign(far.unwrap_or(x), a);
        let is_far = self.test("setp.gt.f64", size, f(ONE));
        self.choose(is_far, far.into(), near.into())
    }

    /// A positive number with the sign of another.
    fn with_sign(&mut self, size: Reg, of: Reg) -> Reg {
        let sign = def!(self, B64, "and.b64", of, i64::MIN);
        def!(self, B64, "or.b64", size, sign)
    }

    /// The sum of two numbers, the first the larger, and what is lost.
    fn sum64(&mut self, a: Reg, b: Reg) -> (Reg, Reg) {
        let sum = def!(self, B64, "add.rn.f64", a, b);
        let back = def!(self, B64, "sub.rn.f64", a, sum);
        (sum, def!(self, B64, "add.rn.f64", back, b))
    }

    /// A product and what is lost.
    fn product64(&mut self, a: Reg, b: Arg) -> (Reg, Reg) {
        let product = def!(self, B64, "mul.rn.f64", a, b);
        let minus = def!(self, B64, "neg.f64", product);
        (product, def!(self, B64, "fma.rn.f64", a, b, minus))
    }

    /// The sine, or with a quarter more the cosine.
    fn sine64(&mut self, a: Reg, quarter: i64) -> Reg {
        let size = self.size(a);
        let turns = def!(self, B64, "mul.rn.f64", a, f(TWO_OVER_PI_ROUNDED));
        let (n, q) = self.whole64(turns);
        let minus = def!(self, B64, "neg.f64", n);
        let w = def!(self, B64, "fma.rn.f64", minus, f(HALF_PI[0]), a);
        let (p, p_rest) = self.product64(n, f(HALF_PI[1]));
        let r = def!(self, B64, "sub.rn.f64", w, p);
        let lost = def!(self, B64, "sub.rn.f64", w, r);
        let lost = def!(self, B64, "sub.rn.f64", lost, p);
        let lost = def!(self, B64, "sub.rn.f64", lost, p_rest);
        let rest = def!(self, B64, "fma.rn.f64", minus, f(HALF_PI[2]), lost);
        let large = self.test("setp.gt.f64", size, f(LARGE.to_bits()));
        let done = self.asm.new_label();
        when!(self, large, false, "bra", Arg::Label(done));
        self.far_angle(a, size, [r, rest, q]);
        self.asm.place(done);

        let z = def!(self, B64, "mul.rn.f64", r, r);
        let half_z = def!(self, B64, "mul.rn.f64", z, f(HALF));
        // sin (r + rest) = r + r³ S + rest (1 − z/2)
        let s = self.polynomial64(&SIN, z);
        let cube = def!(self, B64, "mul.rn.f64", z, r);
        let near_one = def!(self, B64, "sub.rn.f64", f(ONE), half_z);
        let small = def!(self, B64, "mul.rn.f64", rest, near_one);
        let tail = def!(self, B64, "fma.rn.f64", cube, s, small);
        let sin = def!(self, B64, "add.rn.f64", r, tail);
        // cos (r + rest) = 1 − z/2 + (z² C − r rest), with what the first difference loses
        let c = self.polynomial64(&COS, z);
        let square = def!(self, B64, "mul.rn.f64", z, z);
        let lost = def!(self, B64, "sub.rn.f64", f(ONE), near_one);
        let lost = def!(self, B64, "sub.rn.f64", lost, half_z);
        let minus = def!(self, B64, "neg.f64", r);
        let lost = def!(self, B64, "fma.rn.f64", minus, rest, lost);
        let tail = def!(self, B64, "fma.rn.f64", square, c, lost);
        let cos = def!(self, B64, "add.rn.f64", near_one, tail);

        let q = if quarter == 0 { q } else { def!(self, B64, "add.s64", q, quarter) };
        let odd = def!(self, B64, "and.b64", q, 1);
        let odd = self.test("setp.ne.u64", odd, Arg::Int(0));
        let value = self.choose(odd, cos.into(), sin.into());
        let turn = def!(self, B64, "and.b64", q, 2);
        let turn = def!(self, B64, "shl.b64", turn, 62);
        let value = def!(self, B64, "xor.b64", value, turn);
        let finite = self.test("setp.lt.f64", size, f(INFINITY));
        let value = self.choose(finite, value.into(), f(NAN));
        if quarter != 0 {
            return value;
        }
        // A zero's sign would be lost.
        let is_zero = self.test("setp.eq.f64", a, f(0));
        self.choose(is_zero, a.into(), value.into())
    }

    /// Payne and Hanek's way: the angle within its quarter turn, in two parts, and which quarter it is.
    fn far_angle(&mut self, a: Reg, size: Reg, [r, rest, q]: [Reg; 3]) {
        self.quarters = true;
        let fraction = def!(self, B64, "and.b64", size, (1i64 << 52) - 1);
        let mantissa = def!(self, B64, "or.b64", fraction, 1i64 << 52);
        // An infinity or a NaN may go wrong, but not out of the table.
        let biased = def!(self, B64, "shr.u64", size, 52);
        let biased = def!(self, B64, "min.u64", biased, 2046);
        // Digits that are whole turns of the product are left out.
        let offset = def!(self, B64, "add.s64", biased, 62 - 1075);
        let index = def!(self, B64, "shr.u64", offset, 6);
        let shift = def!(self, B64, "and.b64", offset, 63);
        let shift = def!(self, B32, "cvt.u32.u64", shift);
        let down = def!(self, B32, "sub.s32", 63, shift);
        let at = def!(self, B64, "shl.b64", index, 3);
        let table = def!(self, B64, "mov.u64", DIGITS);
        let at = def!(self, B64, "add.s64", table, at);
        let digits: [Reg; 4] =
            std::array::from_fn(|i| def!(self, B64, "ld.const.b64", Arg::At(at, 8 * i as i64)));
        let words: [Reg; 3] = std::array::from_fn(|i| {
            let high = def!(self, B64, "shl.b64", digits[i], shift);
            let low = def!(self, B64, "shr.u64", digits[i + 1], 1);
            let low = def!(self, B64, "shr.u64", low, down);
            def!(self, B64, "or.b64", high, low)
        });
        let low = def!(self, B64, "mul.lo.u64", mantissa, words[2]);
        let carry = def!(self, B64, "mul.hi.u64", mantissa, words[2]);
        let middle = def!(self, B64, "mul.lo.u64", mantissa, words[1]);
        let middle = def!(self, B64, "add.s64", middle, carry);
        let over = self.test("setp.lt.u64", middle, carry.into());
        let over = self.choose(over, Arg::Int(1), Arg::Int(0));
        let carry = def!(self, B64, "mul.hi.u64", mantissa, words[1]);
        let high = def!(self, B64, "mul.lo.u64", mantissa, words[0]);
        let high = def!(self, B64, "add.s64", high, carry);
        let high = def!(self, B64, "add.s64", high, over);
        // Two bits of quarters, then the fraction, taken as from −½ to ½.
        let quarter = def!(self, B64, "shr.u64", high, 62);
        let join = |w: &mut Self, upper: Reg, lower: Reg| {
            let upper = def!(w, B64, "shl.b64", upper, 2);
            let lower = def!(w, B64, "shr.u64", lower, 62);
            def!(w, B64, "or.b64", upper, lower)
        };
        let upper = join(self, high, middle);
        let lower = join(self, middle, low);
        let sign = def!(self, B64, "shr.s64", upper, 63);
        let quarter = def!(self, B64, "sub.s64", quarter, sign);
        // The magnitude; one in the last of 128 places is of no account.
        let upper = def!(self, B64, "xor.b64", upper, sign);
        let lower = def!(self, B64, "xor.b64", lower, sign);
        let zeros = def!(self, B32, "clz.b64", upper);
        let zeros = def!(self, B32, "min.u32", zeros, 63);
        let up = def!(self, B64, "shl.b64", upper, zeros);
        let half = def!(self, B64, "shr.u64", lower, 1);
        let down = def!(self, B32, "sub.s32", 63, zeros);
        let down = def!(self, B64, "shr.u64", half, down);
        let digits = def!(self, B64, "or.b64", up, down);
        let rest_digits = def!(self, B64, "shl.b64", lower, zeros);
        let first = def!(self, B64, "shr.u64", digits, 11);
        let second = def!(self, B64, "shl.b64", digits, 42);
        let more = def!(self, B64, "shr.u64", rest_digits, 22);
        let second = def!(self, B64, "or.b64", second, more);
        let second = def!(self, B64, "and.b64", second, (1i64 << 53) - 1);
        let first = def!(self, B64, "cvt.rn.f64.s64", first);
        let second = def!(self, B64, "cvt.rn.f64.s64", second);
        // 2^-(53 + zeros), with the sign.
        let zeros = def!(self, B64, "cvt.u64.u32", zeros);
        let exponent = def!(self, B64, "sub.s64", 1023 - 53, zeros);
        let power = def!(self, B64, "shl.b64", exponent, 52);
        let negative = def!(self, B64, "shl.b64", sign, 63);
        let power = def!(self, B64, "or.b64", power, negative);
        let a_sign = def!(self, B64, "and.b64", a, i64::MIN);
        let power = def!(self, B64, "xor.b64", power, a_sign);
        let first = def!(self, B64, "mul.rn.f64", first, power);
        let second = def!(self, B64, "mul.rn.f64", second, power);
        let second = def!(self, B64, "mul.rn.f64", second, f(2f64.powi(-53).to_bits()));
        let (angle, angle_rest) = self.product64(first, f(HALF_PI[0]));
        let angle_rest = def!(self, B64, "fma.rn.f64", first, f(HALF_PI[1]), angle_rest);
        ins!(self, "fma.rn.f64", rest, second, f(HALF_PI[0]), angle_rest);
        self.mov(r, angle);
        // A negative angle has the negative quarter.
        let minus = def!(self, B64, "neg.s64", quarter);
        let is_negative = self.test("setp.lt.s64", a, Arg::Int(0));
        ins!(self, "selp.b64", q, minus, quarter, is_negative);
    }

    /// C's pow: 2^(b · log2 |a|), with the logarithm in two parts; then the cases that have their own rules.
    fn pow64(&mut self, a: Reg, b: Reg) -> Reg {
        let size = self.size(a);
        let (e, m) = self.split64(size);
        // s = m / (2 + m) in two parts.
        let two = def!(self, B64, "mov.b64", f(TWO));
        let (sum, sum_rest) = self.sum64(two, m);
        let s = def!(self, B64, "div.rn.f64", m, sum);
        let (back, back_rest) = self.product64(s, sum.into());
        let left = def!(self, B64, "sub.rn.f64", m, back);
        let left = def!(self, B64, "sub.rn.f64", left, back_rest);
        let minus = def!(self, B64, "neg.f64", s);
        let left = def!(self, B64, "fma.rn.f64", minus, sum_rest, left);
        let s_rest = def!(self, B64, "div.rn.f64", left, sum);
        // atanh s / s − 1 = z (1/3 + z q), its first parts twofold too.
        let (z, z_rest) = self.product64(s, s.into());
        let twice = def!(self, B64, "add.rn.f64", s, s);
        let z_rest = def!(self, B64, "fma.rn.f64", twice, s_rest, z_rest);
        let q = self.polynomial64(&ATANH[1..], z);
        let zq = def!(self, B64, "mul.rn.f64", z, q);
        let third = def!(self, B64, "mov.b64", f(THIRD[0]));
        let (p, p_rest) = self.sum64(third, zq);
        let p_rest = def!(self, B64, "add.rn.f64", p_rest, f(THIRD[1]));
        let (t, t_rest) = self.product64(z, p.into());
        let t_rest = def!(self, B64, "fma.rn.f64", z, p_rest, t_rest);
        let t_rest = def!(self, B64, "fma.rn.f64", z_rest, p, t_rest);
        // (1 + t) · s · 2 log2 e
        let (u, u_rest) = self.product64(s, f(TWICE_LOG2_E[0]));
        let u_rest = def!(self, B64, "fma.rn.f64", s, f(TWICE_LOG2_E[1]), u_rest);
        let u_rest = def!(self, B64, "fma.rn.f64", s_rest, f(TWICE_LOG2_E[0]), u_rest);
        let (v, v_rest) = self.product64(u, t.into());
        let v_rest = def!(self, B64, "fma.rn.f64", u, t_rest, v_rest);
        let v_rest = def!(self, B64, "fma.rn.f64", u_rest, t, v_rest);
        let (w, w_rest) = self.sum64(u, v);
        let w_rest = def!(self, B64, "add.rn.f64", w_rest, u_rest);
        let w_rest = def!(self, B64, "add.rn.f64", w_rest, v_rest);
        let (log, log_rest) = self.sum64(e, w);
        let log_rest = def!(self, B64, "add.rn.f64", log_rest, w_rest);
        // 2^(b · log)
        let (y, y_rest) = self.product64(b, log.into());
        let y_rest = def!(self, B64, "fma.rn.f64", b, log_rest, y_rest);
        let y = self.clamp64(y, -1100.0, 1100.0);
        let (n, exponent) = self.whole64(y);
        let r = def!(self, B64, "sub.rn.f64", y, n);
        let rest_size = self.size(y_rest);
        let sane = self.test("setp.lt.f64", rest_size, f(ONE));
        let y_rest = self.choose(sane, y_rest.into(), f(0));
        let r = def!(self, B64, "add.rn.f64", r, y_rest);
        let power = self.exp2_of(r);
        let power = self.scale64(power, exponent);
        self.pow_rules(a, b, size, power)
    }

    /// What C's pow says of zeros, infinities, signs and NaNs.
    fn pow_rules(&mut self, a: Reg, b: Reg, size: Reg, power: Reg) -> Reg {
        // |a| is 0 or infinite: so is the power, or the other of the two.
        let positive = self.test("setp.gt.f64", b, f(0));
        let is_zero = self.test("setp.eq.f64", size, f(0));
        let of_zero = self.choose(positive, f(0), f(INFINITY));
        let power = self.choose(is_zero, of_zero.into(), power.into());
        let is_infinite = self.test("setp.eq.f64", size, f(INFINITY));
        let of_infinity = self.choose(positive, f(INFINITY), f(0));
        let power = self.choose(is_infinite, of_infinity.into(), power.into());
        // b is infinite: by whether |a| is above 1.
        let b_size = self.size(b);
        let b_infinite = self.test("setp.eq.f64", b_size, f(INFINITY));
        let above = self.test("setp.gt.f64", size, f(ONE));
        let grown = self.choose(above, f(INFINITY), f(0));
        let shrunk = self.choose(above, f(0), f(INFINITY));
        let of_infinite = self.choose(positive, grown.into(), shrunk.into());
        let size_one = self.test("setp.eq.f64", size, f(ONE));
        let of_infinite = self.choose(size_one, f(ONE), of_infinite.into());
        let power = self.choose(b_infinite, of_infinite.into(), power.into());
        // The sign of a negative a is kept by an odd b, and a fraction has no power.
        let whole = def!(self, B64, "cvt.rzi.f64.f64", b);
        let is_whole = self.test("setp.eq.f64", whole, b.into());
        let halved = def!(self, B64, "mul.rn.f64", b, f(HALF));
        let half_whole = def!(self, B64, "cvt.rzi.f64.f64", halved);
        let half_differs = self.test("setp.ne.f64", half_whole, halved.into());
        let is_odd = def!(self, Pred, "and.pred", is_whole, half_differs);
        let signed = self.test("setp.lt.s64", a, Arg::Int(0));
        let flips = def!(self, Pred, "and.pred", signed, is_odd);
        let minus = def!(self, B64, "neg.f64", power);
        let power = self.choose(flips, minus.into(), power.into());
        let negative = self.test("setp.lt.f64", a, f(0));
        let finite = self.test("setp.lt.f64", size, f(INFINITY));
        let not_whole = def!(self, Pred, "not.pred", is_whole);
        let fraction = def!(self, Pred, "and.pred", negative, finite);
        let fraction = def!(self, Pred, "and.pred", fraction, not_whole);
        let power = self.choose(fraction, f(NAN), power.into());
        // NaNs, unless the other decides alone.
        let sum = def!(self, B64, "add.rn.f64", a, b);
        let some_nan = def!(self, Pred, "setp.nan.f64", a, b);
        let power = self.choose(some_nan, sum.into(), power.into());
        let a_one = self.test("setp.eq.f64", a, f(ONE));
        let b_zero = self.test("setp.eq.f64", b, f(0));
        let always = def!(self, Pred, "or.pred", a_one, b_zero);
        self.choose(always, f(ONE), power.into())
    }
}
