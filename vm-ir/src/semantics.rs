//! What each op on values means, one lane at a time. The interpreter runs on it, and a compiler may fold
//! constants with it.
//!
//! A lane is its bits in the low end of a `u64`. f16 and bf16 arithmetic is done in f64 and rounded once
//! more, which for these formats gives the correctly rounded result. Functions of f32 and smaller types are
//! evaluated in f64, those of f64 by the `libm` crate, so that every machine computes the same.

use crate::format::{from_f64, signed, to_f64};
use crate::op::Opcode;
use crate::types::Scalar;

/// The result of one lane of `code`, or `None` if the op is not on values alone.
///
/// `from` is the scalar of the operands (of the last one, for `select`), `to` that of the result.
pub fn eval(code: Opcode, from: Scalar, to: Scalar, args: &[u64]) -> Option<u64> {
    let a = args.first().copied().unwrap_or(0);
    let b = args.get(1).copied().unwrap_or(0);
    let c = args.get(2).copied().unwrap_or(0);
    let bits = match code {
        Opcode::Select => {
            if a & 1 != 0 {
                b
            } else {
                c
            }
        }
        Opcode::Sext => signed(from, a) as u64,
        Opcode::Zext | Opcode::Trunc => a,
        Opcode::FpConv => from_f64(to, to_f64(from, a)),
        Opcode::SiToFp => int_to_float(to, i128::from(signed(from, a))),
        Opcode::UiToFp => int_to_float(to, i128::from(a)),
        Opcode::FpToSi => {
            let greatest = (to.mask() >> 1) as i64;
            (to_f64(from, a) as i64).clamp(-greatest - 1, greatest) as u64
        }
        Opcode::FpToUi => (to_f64(from, a) as u64).min(to.mask()),
        _ if from.is_float() => float(code, from, a, b, c)?,
        _ => integer(code, from, a, b)?,
    };
    Some(bits & to.mask())
}

/// To nearest even in one step; through f64 a 64-bit integer would be rounded twice.
fn int_to_float(to: Scalar, value: i128) -> u64 {
    match to {
        Scalar::F32 => u64::from((value as f32).to_bits()),
        Scalar::F64 => (value as f64).to_bits(),
        _ => from_f64(to, to_odd(value as f64, value.cmp(&(value as f64 as i128)))),
    }
}

/// `rounded`, or the neighbour with an odd last bit on the side of the exact value, which a later rounding
/// to half as many bits or fewer then treats as it would treat the exact value.
fn to_odd(rounded: f64, exact: std::cmp::Ordering) -> f64 {
    use std::cmp::Ordering::*;
    if exact == Equal || !rounded.is_finite() || rounded.to_bits() & 1 != 0 {
        return rounded;
    }
    if exact == Greater { rounded.next_up() } else { rounded.next_down() }
}

fn truth(value: bool) -> u64 {
    u64::from(value)
}

fn integer(code: Opcode, ty: Scalar, a: u64, b: u64) -> Option<u64> {
    let width = ty.bits();
    let (sa, sb) = (signed(ty, a), signed(ty, b));
    let shift = (b % u64::from(width)) as u32;
    Some(match code {
        Opcode::Add => a.wrapping_add(b),
        Opcode::Sub => a.wrapping_sub(b),
        Opcode::Mul => a.wrapping_mul(b),
        Opcode::Neg => a.wrapping_neg(),
        Opcode::AbsS => sa.unsigned_abs(),
        Opcode::MinS => sa.min(sb) as u64,
        Opcode::MaxS => sa.max(sb) as u64,
        Opcode::MinU => a.min(b),
        Opcode::MaxU => a.max(b),
        Opcode::DivS => {
            if b == 0 {
                0
            } else {
                sa.wrapping_div(sb) as u64
            }
        }
        Opcode::DivU => a.checked_div(b).unwrap_or(0),
        Opcode::RemS => {
            if b == 0 {
                a
            } else {
                sa.wrapping_rem(sb) as u64
            }
        }
        Opcode::RemU => a.checked_rem(b).unwrap_or(a),
        Opcode::MulHiS => ((i128::from(sa) * i128::from(sb)) >> width) as u64,
        Opcode::MulHiU => ((u128::from(a) * u128::from(b)) >> width) as u64,
        Opcode::And => a & b,
        Opcode::Or => a | b,
        Opcode::Xor => a ^ b,
        Opcode::Not => !a,
        Opcode::Shl => a << shift,
        Opcode::ShrS => (sa >> shift) as u64,
        Opcode::ShrU => a >> shift,
        Opcode::Rotl if shift == 0 => a,
        Opcode::Rotl => a << shift | a >> (width - shift),
        Opcode::Clz => u64::from((a.leading_zeros()) - (64 - width)),
        Opcode::Ctz => u64::from(a.trailing_zeros().min(width)),
        Opcode::Popcount => u64::from(a.count_ones()),
        Opcode::BitReverse => a.reverse_bits() >> (64 - width),
        Opcode::Eq if !matches!(ty, Scalar::F8E4M3 | Scalar::F8E5M2) => truth(a == b),
        Opcode::Ne if !matches!(ty, Scalar::F8E4M3 | Scalar::F8E5M2) => truth(a != b),
        Opcode::Eq => truth(to_f64(ty, a) == to_f64(ty, b)),
        Opcode::Ne => truth(to_f64(ty, a) != to_f64(ty, b)),
        Opcode::LtS => truth(sa < sb),
        Opcode::LeS => truth(sa <= sb),
        Opcode::GtS => truth(sa > sb),
        Opcode::GeS => truth(sa >= sb),
        Opcode::LtU => truth(a < b),
        Opcode::LeU => truth(a <= b),
        Opcode::GtU => truth(a > b),
        Opcode::GeU => truth(a >= b),
        _ => return None,
    })
}

fn float(code: Opcode, ty: Scalar, a: u64, b: u64, c: u64) -> Option<u64> {
    let sign = 1u64 << (ty.bits() - 1);
    let (x, y, z) = (to_f64(ty, a), to_f64(ty, b), to_f64(ty, c));
    let value = match code {
        // On the bits, so that a NaN's payload survives.
        Opcode::Neg => return Some(a ^ sign),
        Opcode::Abs => return Some(a & !sign),
        Opcode::Eq => return Some(truth(x == y)),
        Opcode::Ne => return Some(truth(x != y)),
        Opcode::Lt => return Some(truth(x < y)),
        Opcode::Le => return Some(truth(x <= y)),
        Opcode::Gt => return Some(truth(x > y)),
        Opcode::Ge => return Some(truth(x >= y)),
        // f64 has more than twice the bits of the others and two, so rounding its result once more gives
        // the correctly rounded one.
        Opcode::Add => x + y,
        Opcode::Sub => x - y,
        Opcode::Mul => x * y,
        Opcode::Div => x / y,
        Opcode::Sqrt => x.sqrt(),
        Opcode::Rcp => 1.0 / x,
        Opcode::Fma => return Some(fma(ty, x, y, z)),
        Opcode::Min => min_number(x, y),
        Opcode::Max => -min_number(-x, -y),
        Opcode::Minimum if x.is_nan() || y.is_nan() => f64::NAN,
        Opcode::Minimum => min_number(x, y),
        Opcode::Maximum if x.is_nan() || y.is_nan() => f64::NAN,
        Opcode::Maximum => -min_number(-x, -y),
        Opcode::Rsqrt => 1.0 / x.sqrt(),
        Opcode::Exp => libm::exp(x),
        Opcode::Exp2 => libm::exp2(x),
        Opcode::Log => libm::log(x),
        Opcode::Log2 => libm::log2(x),
        Opcode::Sin => libm::sin(x),
        Opcode::Cos => libm::cos(x),
        Opcode::Tanh => libm::tanh(x),
        Opcode::Erf => libm::erf(x),
        Opcode::Pow => libm::pow(x, y),
        Opcode::Floor => x.floor(),
        Opcode::Ceil => x.ceil(),
        Opcode::Round => x.round_ties_even(),
        Opcode::Fix => x.trunc(),
        _ => return None,
    };
    Some(from_f64(ty, value))
}

/// x · y + z rounded once.
fn fma(ty: Scalar, x: f64, y: f64, z: f64) -> u64 {
    match ty {
        Scalar::F64 => libm::fma(x, y, z).to_bits(),
        Scalar::F32 => u64::from(libm::fmaf(x as f32, y as f32, z as f32).to_bits()),
        _ => {
            // The product is exact in f64; the sum's error, which is exact too, says on which side it is.
            let product = x * y;
            let sum = product + z;
            if !sum.is_finite() {
                return from_f64(ty, sum);
            }
            let back = sum - product;
            let error = (product - (sum - back)) + (z - back);
            from_f64(ty, to_odd(sum, error.partial_cmp(&0.0).unwrap_or(std::cmp::Ordering::Equal)))
        }
    }
}

/// The lesser; a number wins over a NaN, −0 is less than +0.
fn min_number(x: f64, y: f64) -> f64 {
    if x.is_nan() {
        y
    } else if y.is_nan() {
        x
    } else if x == y {
        if x.is_sign_negative() { x } else { y }
    } else if x < y {
        x
    } else {
        y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(code: Opcode, ty: Scalar, args: &[u64], expect: u64) {
        let got = eval(code, ty, ty, args).unwrap();
        assert_eq!(got, expect, "{code} {ty} {args:x?}: {got:#x}, not {expect:#x}");
    }

    fn check_f32(code: Opcode, args: &[f32], expect: f32) {
        let bits: Vec<u64> = args.iter().map(|x| u64::from(x.to_bits())).collect();
        let got = f32::from_bits(eval(code, Scalar::F32, Scalar::F32, &bits).unwrap() as u32);
        assert!(
            got.to_bits() == expect.to_bits() || got.is_nan() && expect.is_nan(),
            "{code} {args:?}: {got}"
        );
    }

    #[test]
    fn integers_wrap_and_never_trap() {
        check(Opcode::Add, Scalar::I8, &[0xff, 2], 1);
        check(Opcode::DivS, Scalar::I32, &[0x8000_0000, 0xffff_ffff], 0x8000_0000);
        check(Opcode::DivS, Scalar::I64, &[1 << 63, u64::MAX], 1 << 63);
        check(Opcode::RemS, Scalar::I64, &[1 << 63, u64::MAX], 0);
        check(Opcode::DivS, Scalar::I32, &[7, 0], 0);
        check(Opcode::DivU, Scalar::I32, &[7, 0], 0);
        check(Opcode::RemS, Scalar::I32, &[0xffff_fff9, 2], 0xffff_ffff);
        check(Opcode::RemU, Scalar::I16, &[9, 0], 9);
        check(Opcode::AbsS, Scalar::I8, &[0x80], 0x80);
        check(Opcode::MulHiU, Scalar::I32, &[0xffff_ffff, 0xffff_ffff], 0xffff_fffe);
        check(Opcode::MulHiS, Scalar::I64, &[u64::MAX, 5], u64::MAX);
        check(Opcode::Shl, Scalar::I32, &[1, 33], 2);
        check(Opcode::ShrS, Scalar::I8, &[0x80, 7], 0xff);
        check(Opcode::Rotl, Scalar::I8, &[0x81, 1], 3);
        check(Opcode::Rotl, Scalar::I64, &[5, 64], 5);
        check(Opcode::Clz, Scalar::I16, &[0], 16);
        check(Opcode::Clz, Scalar::I8, &[1], 7);
        check(Opcode::Ctz, Scalar::I32, &[0], 32);
        check(Opcode::BitReverse, Scalar::I8, &[0x13], 0xc8);
        check(Opcode::Not, Scalar::Bool, &[1], 0);
    }

    #[test]
    fn floats_follow_ieee() {
        check_f32(Opcode::Min, &[f32::NAN, 1.0], 1.0);
        check_f32(Opcode::Min, &[0.0, -0.0], -0.0);
        check_f32(Opcode::Max, &[-0.0, 0.0], 0.0);
        check_f32(Opcode::Maximum, &[1.0, f32::NAN], f32::NAN);
        check_f32(Opcode::Round, &[2.5], 2.0);
        check_f32(Opcode::Div, &[1.0, -0.0], f32::NEG_INFINITY);
        check_f32(Opcode::Fma, &[1.000_000_1, 1.000_000_1, -1.0], 1.000_000_1f32.mul_add(1.000_000_1, -1.0));
        check_f32(Opcode::Exp, &[f32::NEG_INFINITY], 0.0);
        check_f32(Opcode::Add, &[f32::MAX, f32::MAX], f32::INFINITY);
        check(Opcode::Neg, Scalar::F32, &[0x7fc0_1234], 0xffc0_1234);
        // 2048 · 1 + 1.0009765625: a tie that only the small addend breaks.
        check(Opcode::Fma, Scalar::F16, &[0x6800, 0x3c00, 0x3c01], 0x6801);
    }

    #[test]
    fn conversions_saturate() {
        let conv = |code, from, to, bits| eval(code, from, to, &[bits]).unwrap();
        let f32_bits = |x: f32| u64::from(x.to_bits());
        assert_eq!(conv(Opcode::FpToSi, Scalar::F32, Scalar::I8, f32_bits(-1e9)), 0x80);
        assert_eq!(conv(Opcode::FpToSi, Scalar::F32, Scalar::I64, f32_bits(1e30)), i64::MAX as u64);
        assert_eq!(conv(Opcode::FpToUi, Scalar::F32, Scalar::I32, f32_bits(-1.0)), 0);
        assert_eq!(conv(Opcode::FpToUi, Scalar::F32, Scalar::I16, f32_bits(f32::NAN)), 0);
        assert_eq!(conv(Opcode::FpToUi, Scalar::F64, Scalar::I64, 1e300f64.to_bits()), u64::MAX);
        assert_eq!(conv(Opcode::UiToFp, Scalar::I64, Scalar::F32, u64::MAX), f32_bits(1.844_674_4e19));
        // 2^53 + 2^45 + 1 lies just above a tie of bf16.
        assert_eq!(conv(Opcode::SiToFp, Scalar::I64, Scalar::Bf16, (1 << 53) + (1 << 45) + 1), 0x5a01);
        assert_eq!(conv(Opcode::Sext, Scalar::I8, Scalar::I32, 0x80), 0xffff_ff80);
        assert_eq!(conv(Opcode::Zext, Scalar::Bool, Scalar::I32, 1), 1);
        assert_eq!(conv(Opcode::Trunc, Scalar::I64, Scalar::I16, 0x1_2345), 0x2345);
    }

    #[test]
    fn wide_floats_are_rounded_once() {
        // The correctly rounded f32 ops must agree with the machine's.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (x, y) = (f32::from_bits((state >> 32) as u32), f32::from_bits((state >> 7) as u32));
            check_f32(Opcode::Add, &[x, y], x + y);
            check_f32(Opcode::Mul, &[x, y], x * y);
            check_f32(Opcode::Div, &[x, y], x / y);
            check_f32(Opcode::Sqrt, &[x], x.sqrt());
            check_f32(Opcode::Rcp, &[x], 1.0 / x);
        }
    }
}
