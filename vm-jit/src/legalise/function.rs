//! `exp`, `exp2`, `log`, `log2`, `tanh`, `erf` and `pow` of f64: the argument is reduced to a range
//! where a short polynomial is exact to the last place or nearly so. The fast class is the precise one.

use super::poly::{
    ATANH, ATANH_SHORT, ERF, ERF_F32, ERF_PARTS, ERF_POWER_F32, ERF_SPLIT_F32, EXP, EXP2, LN_2, LN_2_SHORT,
    LOG2_E, TANH, TANH_F32,
};
use super::value::{bits, choose, clamp, constant, float, polynomial, with_sign};
use vm_ir::builder::{IntoVal, Val};
use vm_ir::op::Opcode;

/// What is added to a number to round it to an integer, which is then in the low bits: 1.5 · 2^52.
const ROUNDER: f64 = 6_755_399_441_055_744.0;
/// 2 log2 e in two parts.
const TWICE_LOG2_E: [u64; 2] = [0x4007_1547_652b_82fe, 0x3c87_77d0_ffda_0d24];
/// 1/3 in two parts.
const THIRD: [u64; 2] = [0x3fd5_5555_5555_5555, 0x3c75_5555_5555_5555];
/// √½, where a mantissa begins.
const ROOT_HALF: i64 = 0x3fe6_a09e_667f_3bcd;

/// The nearest integer of a number that is not large: as a float and as an integer.
pub(super) fn whole<'b>(x: Val<'b>) -> (Val<'b>, Val<'b>) {
    let rounder = constant(x, ROUNDER);
    let sum = x + rounder;
    (sum - rounder, bits(sum) - bits(rounder))
}

/// `value · 2^exponent`, rounded once.
pub(super) fn scale<'b>(value: Val<'b>, exponent: Val<'b>) -> Val<'b> {
    let first = exponent >> 1;
    let second = exponent - first;
    [first, second].into_iter().fold(value, |value, part| value * float((part + 1023) << 52))
}

pub(super) fn exp(a: Val<'_>) -> Val<'_> {
    let a = clamp(a, -746.0, 710.0);
    let (n, exponent) = whole(a * f64::from_bits(LOG2_E[0]));
    let minus = -n;
    let r = minus.fma(f64::from_bits(LN_2[0]), a);
    let r = minus.fma(f64::from_bits(LN_2[1]), r);
    let tail = (r * r).fma(polynomial(&EXP, r), r);
    scale(tail + 1.0, exponent)
}

pub(super) fn exp2(a: Val<'_>) -> Val<'_> {
    let a = clamp(a, -1076.0, 1025.0);
    let (n, exponent) = whole(a);
    scale(exp2_of(a - n), exponent)
}

/// 2^r for |r| ≤ ½ or a little more.
fn exp2_of(r: Val<'_>) -> Val<'_> {
    r.fma(polynomial(&EXP2, r), 1.0)
}

/// A positive number as m · 2^e with m from √½ to √2: e as a float, and m − 1.
fn split<'b>(a: Val<'b>) -> (Val<'b>, Val<'b>) {
    let tiny = a.lt(f64::MIN_POSITIVE);
    let x = tiny.select(a * 18_014_398_509_481_984.0, a); // 2^54
    let offset = choose(tiny, a, -54.0, 0.0);
    let e = (bits(x) - ROOT_HALF) >> 52;
    let m = float(bits(x) - (e << 52));
    let rounder = constant(a, ROUNDER);
    let e = float(e + bits(rounder)) - rounder;
    (e + offset, m - 1.0)
}

/// The natural logarithm, or that to base 2; `short` is one that is exact enough for f32.
pub(super) fn log(a: Val<'_>, base2: bool, short: bool) -> Val<'_> {
    let (e, m) = split(a);
    let s = m / (m + 2.0);
    let z = s * s;
    let q = if short { polynomial(&ATANH_SHORT, z) } else { polynomial(&ATANH, z) };
    let half_square = m * m * 0.5;
    let tail = s * (half_square + (z + z) * q);
    let result = if base2 {
        let high = m - half_square;
        let low = ((m - high) - half_square) + tail;
        let [log2e, log2e_rest] = LOG2_E.map(f64::from_bits);
        let p = high * log2e;
        let error = high.fma(log2e, -p);
        let error = high.fma(log2e_rest, error);
        let error = low.fma(log2e, error);
        let (sum, rest) = sum(e, p);
        sum + (error + rest)
    } else {
        let [ln2, ln2_rest] = LN_2_SHORT.map(f64::from_bits);
        let low = half_square - e.fma(ln2_rest, tail);
        e * ln2 - (low - m)
    };
    let result = a.lt(f64::INFINITY).select(result, a);
    let result = choose(a.lt(0.0), a, f64::NAN, result);
    choose(a.eq(0.0), a, f64::NEG_INFINITY, result)
}

pub(super) fn tanh(a: Val<'_>) -> Val<'_> {
    let z = a * a;
    let near = polynomial(&TANH, z).fma(z * a, a);
    // 1 − 2 / (e^2|a| + 1)
    let size = a.abs();
    let most = clamp(size, 0.0, 20.0);
    let far = 1.0 - 2.0 / ((most + most).exp() + 1.0);
    let near = a.eq(0.0).select(a, near);
    // A NaN is not far.
    size.gt(0.65).select(with_sign(far, a), near)
}

pub(super) fn erf(a: Val<'_>) -> Val<'_> {
    let size = a.abs();
    let near = polynomial(&ERF, a * a) * a;
    let most = clamp(size, 1.0, 6.0);
    let bounds = [2.0, 3.0, 4.0].map(|bound: f64| most.ge(bound));
    let pick = |of: [f64; 4]| {
        let first = constant(a, of[0]);
        bounds.iter().zip(&of[1..]).fold(first, |value, (bound, other)| choose(*bound, a, *other, value))
    };
    let x = most - pick([1.5, 2.5, 3.5, 5.0]);
    let coefficients =
        (0..ERF_PARTS[0].len()).map(|i| [0, 1, 2, 3].map(|part: usize| f64::from_bits(ERF_PARTS[part][i])));
    let far = coefficients.rev().map(pick).reduce(|sum, c| sum.fma(x, c)).unwrap_or(x);
    size.gt(1.0).select(with_sign(far, a), near)
}

/// The sum of two numbers, the first the larger, and what is lost.
fn sum<'b>(a: Val<'b>, b: Val<'b>) -> (Val<'b>, Val<'b>) {
    let sum = a + b;
    (sum, (a - sum) + b)
}

/// A product and what is lost.
pub(super) fn product<'b>(a: Val<'b>, b: impl IntoVal<'b>) -> (Val<'b>, Val<'b>) {
    let b = b.into_val(a.builder(), a.ty());
    let product = a * b;
    (product, a.fma(b, -product))
}

/// C's pow: 2^(b · log2 |a|), with the logarithm in two parts; then the cases that have their own rules.
pub(super) fn pow<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let size = a.abs();
    let (e, m) = split(size);
    // s = m / (2 + m) in two parts.
    let (total, total_rest) = sum(constant(a, 2.0), m);
    let s = m / total;
    let (back, back_rest) = product(s, total);
    let left = (-s).fma(total_rest, (m - back) - back_rest);
    let s_rest = left / total;
    // atanh s / s − 1 = z (1/3 + z q), its first parts twofold too.
    let (z, z_rest) = product(s, s);
    let z_rest = (s + s).fma(s_rest, z_rest);
    let zq = z * polynomial(&ATANH[1..], z);
    let [third, third_rest] = THIRD.map(|bits| constant(a, f64::from_bits(bits)));
    let (p, p_rest) = sum(third, zq);
    let p_rest = p_rest + third_rest;
    let (t, t_rest) = product(z, p);
    let t_rest = z_rest.fma(p, z.fma(p_rest, t_rest));
    // (1 + t) · s · 2 log2 e
    let [factor, factor_rest] = TWICE_LOG2_E.map(f64::from_bits);
    let (u, u_rest) = product(s, factor);
    let u_rest = s_rest.fma(factor, s.fma(factor_rest, u_rest));
    let (v, v_rest) = product(u, t);
    let v_rest = u_rest.fma(t, u.fma(t_rest, v_rest));
    let (w, w_rest) = sum(u, v);
    let w_rest = w_rest + u_rest + v_rest;
    let (log, log_rest) = sum(e, w);
    let log_rest = log_rest + w_rest;
    // 2^(b · log)
    let (y, y_rest) = product(b, log);
    let y_rest = b.fma(log_rest, y_rest);
    let y = clamp(y, -1100.0, 1100.0);
    let (n, exponent) = whole(y);
    let y_rest = choose(y_rest.abs().lt(1.0), a, y_rest, 0.0);
    let power = scale(exp2_of((y - n) + y_rest), exponent);
    pow_rules(a, b, size, power)
}

/// What C's pow says of zeros, infinities, signs and NaNs.
pub(super) fn pow_rules<'b>(a: Val<'b>, b: Val<'b>, size: Val<'b>, power: Val<'b>) -> Val<'b> {
    let (zero, one, infinity) = (constant(a, 0.0), constant(a, 1.0), constant(a, f64::INFINITY));
    // |a| is 0 or infinite: so is the power, or the other of the two.
    let positive = b.gt(zero);
    let (falling, rising) = (positive.select(zero, infinity), positive.select(infinity, zero));
    let power = size.eq(zero).select(falling, power);
    let power = size.eq(infinity).select(rising, power);
    // b is infinite: by whether |a| is above 1.
    let of_infinite = size.gt(one).select(rising, falling);
    let of_infinite = size.eq(one).select(one, of_infinite);
    let power = b.abs().eq(infinity).select(of_infinite, power);
    // The sign of a negative a is kept by an odd b, and a fraction has no power.
    let is_whole = b.fix().eq(b);
    let halved = b * 0.5;
    let is_odd = is_whole & halved.fix().ne(halved);
    let power = (bits(a).lt(0) & is_odd).select(-power, power);
    let no_power = a.lt(zero) & size.lt(infinity) & !is_whole;
    let power = choose(no_power, a, f64::NAN, power);
    // NaNs, unless the other decides alone.
    let power = (a.ne(a) | b.ne(b)).select(a + b, power);
    (a.eq(one) | b.eq(zero)).select(one, power)
}

/// A function of f32, in f32: for targets whose vectors hold twice as many of these.
pub(super) fn of_f32(code: Opcode, a: Val<'_>) -> Option<Val<'_>> {
    match code {
        Opcode::Tanh => Some(tanh_f32(a)),
        Opcode::Erf => Some(erf_f32(a)),
        _ => None,
    }
}

fn tanh_f32(a: Val<'_>) -> Val<'_> {
    let z = a * a;
    let near = polynomial(&TANH_F32, z).fma(z * a, a);
    let size = a.abs();
    let most = clamp(size, 0.0, 10.0);
    let far = 1.0 - 2.0 / ((most + most).exp() + 1.0);
    let near = a.eq(0.0).select(a, near);
    // A NaN is not far.
    size.gt(0.62).select(with_sign(far, a), near)
}

fn erf_f32(a: Val<'_>) -> Val<'_> {
    let near = polynomial(&ERF_F32, a * a).fma(a, a);
    // 1 − e^(a polynomial of |a|), which is 1 from 4 on.
    let size = a.abs();
    let most = clamp(size, 0.0, 4.0);
    let power = polynomial(&ERF_POWER_F32, most).fma(most, -most);
    let far = 1.0 - power.exp();
    let near = a.eq(0.0).select(a, near);
    size.gt(ERF_SPLIT_F32).select(with_sign(far, a), near)
}

/// A function of f64. What is `short` is exact enough for f32.
pub(super) fn of<'b>(code: Opcode, a: Val<'b>, b: Val<'b>, short: bool) -> Option<Val<'b>> {
    use Opcode::*;
    Some(match code {
        Exp => exp(a),
        Exp2 => exp2(a),
        Log => log(a, false, short),
        Log2 => log(a, true, short),
        Sin => super::angle::sine(a, 0),
        Cos => super::angle::sine(a, 1),
        Tanh => tanh(a),
        Erf => erf(a),
        Pow => pow(a, b),
        _ => return None,
    })
}
