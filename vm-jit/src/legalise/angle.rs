//! `sin` and `cos` of f64.
//!
//! Up to a million quarter turns π/2 in three parts is taken off; above, the mantissa is multiplied by those digits of
//! 2/π that matter (Payne and Hanek).

use super::function::{product, whole};
use super::poly::{COS, HALF_PI, SIN, TWO_OVER_PI};
use super::value::{bits, choose, float, polynomial};
use vm_ir::Scalar;
use vm_ir::builder::Val;

/// Above this, digits are used.
const LARGE: f64 = 1_500_000.0;

/// The sine, or with a quarter more the cosine.
pub(super) fn sine(a: Val<'_>, quarter: i64) -> Val<'_> {
    let size = a.abs();
    let (n, q) = whole(a * std::f64::consts::FRAC_2_PI);
    let [first, second, third] = HALF_PI.map(f64::from_bits);
    let w = (-n).fma(first, a);
    let (p, p_rest) = product(n, second);
    let r = w - p;
    let rest = (-n).fma(third, (w - r) - p - p_rest);
    let [r, rest, q] = where_large(size.gt(LARGE), [r, rest, q], || far_angle(a, size));

    let z = r * r;
    let half_z = z * 0.5;
    let near_one = 1.0 - half_z;
    // sin (r + rest) = r + r³ S + rest (1 − z/2)
    let sin = r + (z * r).fma(polynomial(&SIN, z), rest * near_one);
    // cos (r + rest) = 1 − z/2 + (z² C − r rest), with what the first difference loses
    let lost = (-r).fma(rest, (1.0 - near_one) - half_z);
    let cos = near_one + (z * z).fma(polynomial(&COS, z), lost);

    let q = if quarter == 0 { q } else { q + quarter };
    let value = (q & 1).ne(0).select(cos, sin);
    let value = float(bits(value) ^ ((q & 2) << 62));
    let value = choose(size.lt(f64::INFINITY), a, value, f64::NAN);
    // A zero's sign would be lost.
    if quarter == 0 { a.eq(0.0).select(a, value) } else { value }
}

/// Selects the result of `far` for large angles and `near` for others. `far` runs if any lane needs it; in a tile kernel, whose maps have no
/// branches, it always runs.
pub(super) fn where_large<'b>(
    large: Val<'b>,
    near: [Val<'b>; 3],
    far: impl Fn() -> [Val<'b>; 3],
) -> [Val<'b>; 3] {
    let k = large.builder();
    let chosen = || {
        let far = far();
        [0, 1, 2].map(|i| large.select(far[i], near[i]))
    };
    match large.ty().is_vector() {
        _ if k.is_tile() => chosen(),
        false => k.if_else(large, &far, || near),
        true => {
            let any = (1..large.ty().lanes()).fold(large.lane(0), |any, lane| any | large.lane(lane));
            k.if_else(any, chosen, || near)
        }
    }
}

/// As many words from the one at `index` on as there are in the result. Whoever asks for words that are not there gets
/// others.
pub(super) fn words<'b, const COUNT: usize>(
    table: &[u64],
    index: Val<'b>,
    like: Val<'b>,
) -> [Val<'b>; COUNT] {
    let mut window: Vec<Val<'b>> = table.iter().map(|word| like.builder().bits(like.ty(), *word)).collect();
    let levels = usize::BITS - (table.len() - COUNT).leading_zeros();
    for level in (0..levels).rev() {
        let step = 1 << level;
        let bit = (index & step as i64).ne(0);
        let here = |i: usize| match window.get(i + step) {
            Some(above) => bit.select(*above, window[i]),
            None => window[i],
        };
        window = (0..(COUNT + step - 1).min(window.len())).map(here).collect();
    }
    std::array::from_fn(|i| window[i])
}

/// The angle within its quarter turn, in two parts, and which quarter it is.
fn far_angle<'b>(a: Val<'b>, size: Val<'b>) -> [Val<'b>; 3] {
    let fraction = bits(size) & ((1i64 << 52) - 1);
    let mantissa = fraction | (1i64 << 52);
    // An infinity or a NaN may go wrong, but not out of the table. Digits that are whole turns of the product are left out.
    let offset = bits(size).shr_u(52).min_u(2046) - (1075 - 62);
    let shift = offset & 63;
    let digits: [Val<'b>; 4] = words(&TWO_OVER_PI, offset.shr_u(6), offset);
    let words: [Val<'b>; 3] = std::array::from_fn(|i| {
        let low = digits[i + 1].shr_u(1).shr_u(63 - shift);
        (digits[i] << shift) | low
    });
    let low = mantissa * words[2];
    let carry = mantissa.mulhi_u(words[2]);
    let middle = mantissa * words[1] + carry;
    let over = middle.lt_u(carry).to_u(Scalar::I64);
    let high = mantissa * words[0] + mantissa.mulhi_u(words[1]) + over;
    // Two bits of quarters, then the fraction, taken as from −½ to ½.
    let join = |upper: Val<'b>, lower: Val<'b>| (upper << 2) | lower.shr_u(62);
    let (upper, lower) = (join(high, middle), join(middle, low));
    let sign = upper >> 63;
    let quarter = high.shr_u(62) - sign;
    // The magnitude; one in the last of 128 places is of no account.
    let (upper, lower) = (upper ^ sign, lower ^ sign);
    let zeros = upper.clz().min_u(63);
    let digits = (upper << zeros) | lower.shr_u(1).shr_u(63 - zeros);
    let rest_digits = lower << zeros;
    let first = digits.shr_u(11);
    let second = ((digits << 42) | rest_digits.shr_u(22)) & ((1i64 << 53) - 1);
    // 2^-(53 + zeros), with the sign.
    let power = ((1023 - 53 - zeros) << 52) | (sign << 63);
    let power = float(power ^ (bits(a) & i64::MIN));
    let first = first.to(Scalar::F64) * power;
    let second = second.to(Scalar::F64) * power * 2f64.powi(-53);
    let [pi, pi_rest, _] = HALF_PI.map(f64::from_bits);
    let (r, rest) = product(first, pi);
    let rest = second.fma(pi, first.fma(pi_rest, rest));
    // A negative angle has the negative quarter.
    [r, rest, bits(a).lt(0).select(-quarter, quarter)]
}
