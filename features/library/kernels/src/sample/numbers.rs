//! What the kernels compute of single numbers: keys that order logits, weights that add up in any order, random bits.
//!
//! All of it is integers and correctly rounded operations, so every backend comes to the same bits.

use vm_ir::builder::{Builder, Val};
use vm_ir::{Scalar, Type};

/// Bits behind the point of a weight: that of the greatest logit is 2^40, and those of 2^23 columns add up to less than 2^64.
pub(super) const WEIGHT_BITS: i32 = 40;

/// Where NaNs stand among logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Nan {
    /// Above all numbers, as PyTorch and NumPy order them.
    Greatest,
    /// Below all numbers: never sampled.
    Least,
}

impl Nan {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Nan::Greatest => "nan_greatest",
            Nan::Least => "nan_least",
        }
    }

    /// What stands for columns behind the last: never greater than an element.
    pub(super) const fn padding(self) -> f32 {
        match self {
            Nan::Greatest => f32::NEG_INFINITY,
            Nan::Least => f32::NAN,
        }
    }

    /// The greater of two logits.
    pub(super) fn greater<'b>(self, a: Val<'b>, b: Val<'b>) -> Val<'b> {
        match self {
            Nan::Greatest => a.maximum(b),
            Nan::Least => a.max(b),
        }
    }

    /// A signed i32 in the order of the logits; −0 counts as 0, and all NaNs are one.
    pub(super) fn key(self, x: Val<'_>) -> Val<'_> {
        let k = x.builder();
        let bits = (x + 0.0).bitcast(Type::I32);
        let key = bits ^ ((bits >> 31) & i32::MAX);
        let nan = match self {
            Nan::Greatest => i32::MAX - 1,
            Nan::Least => i32::MIN,
        };
        x.ne(x).select(k.i32(nan), key)
    }
}

/// The key of −∞.
pub(super) const LEAST_KEY: i32 = f32::NEG_INFINITY.to_bits().cast_signed() ^ i32::MAX;

/// The logit of a key.
pub(super) fn value(key: Val<'_>) -> Val<'_> {
    (key ^ ((key >> 31) & i32::MAX)).bitcast(Type::F32)
}

/// A key and its column as one signed i64: the greater has the greater key or, of equal ones, the lower column. No pair is
/// [`NONE`] or `i64::MAX`, or below one more than its key alone shifted up.
pub(super) fn pair<'b>(key: Val<'b>, column: Val<'b>) -> Val<'b> {
    key.to(Scalar::I64) << 32 | (!column).to_u(Scalar::I64)
}

/// Less than any pair.
pub(super) const NONE: i64 = i64::MIN;

/// The key and the column of a pair.
pub(super) fn unpair(pair: Val<'_>) -> (Val<'_>, Val<'_>) {
    ((pair >> 32).to(Scalar::I32), !pair.to(Scalar::I32))
}

/// 2^((x − max) · scale) as a whole number of 2^-40, cut: 2^40 where x is the maximum, also an infinite one; 0 of NaN.
///
/// 2^f for f in [−1/2, 1/2] is its Taylor polynomial of degree 6, which is off by at most 1.3e-7.
pub(super) fn weight<'b>(x: Val<'b>, max: Val<'b>, scale: Val<'b>) -> Val<'b> {
    let k = x.builder();
    let below = x.eq(max).select(k.f32(0.0), x - max);
    // A number wins over NaN.
    let power = (below * scale).max(-64.0);
    // Adding 1.5 · 2^23 rounds to a whole number, whose lowest bits are the sum's.
    let shifted = power + 12_582_912.0;
    let fraction = power - (shifted - 12_582_912.0);
    let terms = [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2, 1.0];
    let mantissa = terms.iter().fold(k.f32(1.540_353e-4), |sum, term| sum.fma(fraction, k.f32(*term)));
    let exponent = (shifted.bitcast(Type::I32) << 23) + ((127 + WEIGHT_BITS) << 23);
    (mantissa * exponent.bitcast(Type::F32)).to_u(Scalar::I64)
}

/// a · b / 2^40 of two numbers below 2^51, cut.
pub(super) fn scaled<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    (a << 13).mulhi_u(b << 11)
}

/// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of a key and a counter, whose upper 96 bits
/// are 0: two times 64 bits.
pub(super) fn philox<'b>(seed: Val<'b>, counter: Val<'b>) -> [Val<'b>; 2] {
    let k = seed.builder();
    let zero = k.i32(0);
    let [mut c0, mut c1, mut c2, mut c3] = [counter, zero, zero, zero];
    let (mut key0, mut key1) = (seed.to(Scalar::I32), seed.shr_u(32).to(Scalar::I32));
    for _ in 0..10 {
        let (m0, m1) = (k.i32(0xd251_1f53u32.cast_signed()), k.i32(0xcd9e_8d57u32.cast_signed()));
        [c0, c1, c2, c3] = [c2.mulhi_u(m1) ^ c1 ^ key0, c2 * m1, c0.mulhi_u(m0) ^ c3 ^ key1, c0 * m0];
        (key0, key1) = (key0 + 0x9e37_79b9u32, key1 + 0xbb67_ae85u32);
    }
    let join = |low: Val<'b>, high: Val<'b>| low.to_u(Scalar::I64) | high.to_u(Scalar::I64) << 32;
    [join(c0, c1), join(c2, c3)]
}

/// The sum over the lanes up to this one.
pub(super) fn running<'b>(k: Builder<'b>, mut sum: Val<'b>) -> Val<'b> {
    let lane = k.lane_id();
    for distance in [1, 2, 4, 8, 16] {
        let below = sum.shuffle_up(distance);
        sum = lane.ge(distance).select(sum + below, sum);
    }
    sum
}
