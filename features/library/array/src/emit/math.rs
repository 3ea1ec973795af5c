//! What functions of elements are in operations of the IR.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_PI_2, LN_2, LN_10, LOG2_10, PI};

use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

use super::value::{V, constant, zero};
use crate::dtype::{DType, Kind};
use crate::op::{Binary, Unary};

/// A function of an element, which is of the type that it is converted to.
pub(super) fn unary<'b>(op: Unary, x: V<'b>, to: DType) -> V<'b> {
    use Unary as U;
    if let (Some(im), false) = (x.im, matches!(op, U::LogicalNot)) {
        return complex::unary(op, x.dtype, (x.re, im));
    }
    let (a, dtype) = (x.re, x.dtype);
    let real = matches!(dtype.kind(), Kind::Float);
    let is = |value| V::bool(value);
    let value = match op {
        U::Isnan if real => return is(a.ne(a)),
        U::Isinf if real => return is(a.abs().eq(constant(a, f64::INFINITY))),
        U::Isfinite if real => return is(a.abs().lt(constant(a, f64::INFINITY))),
        U::Isnan | U::Isinf => return is(like_bool(a, false)),
        U::Isfinite => return is(like_bool(a, true)),
        U::Signbit => return is(bits(a).lt(zero(bits(a)))),
        U::LogicalNot => return is(!x.truth()),
        U::Positive | U::Conj | U::Real => a,
        U::Imag => zero(a),
        U::BitwiseInvert => !a,
        U::Negative => -a,
        U::Abs if real => a.abs(),
        U::Abs if dtype.kind() == Kind::Signed => a.abs_s(),
        U::Abs => a,
        U::Sign if real => {
            let one = constant(a, 1.0);
            let other = a.eq(zero(a)).select(zero(a), a);
            a.gt(zero(a)).select(one, a.lt(zero(a)).select(-one, other))
        }
        U::Sign if dtype.kind() == Kind::Signed => {
            let one = constant(a, 1.0);
            a.gt(zero(a)).select(one, a.lt(zero(a)).select(-one, zero(a)))
        }
        U::Sign => a.ne(zero(a)).select(constant(a, 1.0), zero(a)),
        U::Square => a * a,
        U::Ceil if real => a.ceil(),
        U::Floor if real => a.floor(),
        U::Trunc if real => a.fix(),
        U::Round if real => a.round(),
        U::Ceil | U::Floor | U::Trunc | U::Round => a,
        U::Relu => maximum(dtype, a, zero(a)),
        U::Sqrt => a.sqrt(),
        U::Rsqrt => a.rsqrt(),
        U::Reciprocal => a.rcp(),
        U::Exp => a.exp(),
        U::Exp2 => a.exp2(),
        U::Log => a.log(),
        U::Log2 => a.log2(),
        U::Sin => a.sin(),
        U::Cos => a.cos(),
        U::Tanh => a.tanh(),
        U::Erf => a.erf(),
        U::Sigmoid => (constant(a, 1.0) + (-a).exp()).rcp(),
        U::Silu => a / (constant(a, 1.0) + (-a).exp()),
        U::Gelu => a * constant(a, 0.5) * ((a * constant(a, FRAC_1_SQRT_2)).erf() + constant(a, 1.0)),
        U::GeluTanh => {
            let inner = a * (a * a).fma(constant(a, 0.044715), constant(a, 1.0));
            a * constant(a, 0.5) * ((inner * constant(a, (2.0 / PI).sqrt())).tanh() + constant(a, 1.0))
        }
        // In f32 at least: what is rounded on the way would be seen.
        _ => return V::new(dtype, wide(a, |a| function(op, a))).to(to),
    };
    V::new(dtype, value).to(to)
}

/// A function of floats of two bytes by way of f32.
fn wide<'b>(a: Val<'b>, f: impl Fn(Val<'b>) -> Val<'b>) -> Val<'b> {
    match a.ty().scalar() {
        narrow @ (Scalar::F16 | Scalar::Bf16) => f(a.to(Scalar::F32)).to(narrow),
        _ => f(a),
    }
}

fn function<'b>(op: Unary, a: Val<'b>) -> Val<'b> {
    use Unary as U;
    let c = |number| constant(a, number);
    let odd = |value: Val<'b>| copysign(value, a);
    match op {
        U::Log10 => a.log2() * c(1.0 / LOG2_10),
        U::Log1p => log1p(a),
        U::Expm1 => expm1(a),
        U::Tan => a.sin() / a.cos(),
        U::Atan => atan(a),
        U::Asin => atan(a / ((c(1.0) - a) * (c(1.0) + a)).sqrt()),
        U::Acos => atan(((c(1.0) - a) / (c(1.0) + a)).sqrt()) * c(2.0),
        U::Sinh => {
            let t = expm1(a.abs());
            let half = (a.abs() * c(0.5)).exp();
            let great = half * c(0.5) * half;
            let small = (t + t / (t + c(1.0))) * c(0.5);
            odd(a.abs().gt(c(20.0)).select(great, small))
        }
        U::Cosh => {
            let half = (a.abs() * c(0.5)).exp();
            let e = a.abs().exp();
            a.abs().gt(c(20.0)).select(half * c(0.5) * half, (e + e.rcp()) * c(0.5))
        }
        U::Asinh => {
            let m = a.abs();
            let near = log1p(m + m * m / (c(1.0) + m.fma(m, c(1.0)).sqrt()));
            odd(m.gt(c(1e8)).select(m.log() + c(LN_2), near))
        }
        U::Acosh => {
            let t = a - c(1.0);
            let near = log1p(t + t.sqrt() * (t + c(2.0)).sqrt());
            a.gt(c(1e8)).select(a.log() + c(LN_2), near)
        }
        U::Atanh => log1p(a * c(2.0) / (c(1.0) - a)) * c(0.5),
        _ => a,
    }
}

/// ln(1 + a), right of small numbers too (Kahan).
fn log1p(a: Val<'_>) -> Val<'_> {
    let one = constant(a, 1.0);
    let u = a + one;
    let exact = u.eq(one) | u.eq(constant(a, f64::INFINITY));
    exact.select(a, u.log() * (a / (u - one)))
}

/// e^a − 1, right of small numbers too (Kahan).
fn expm1(a: Val<'_>) -> Val<'_> {
    let one = constant(a, 1.0);
    let u = a.exp();
    let less = u - one;
    let corrected = less * (a / u.log());
    let value = less.eq(-one).select(-one, corrected);
    let value = u.eq(constant(a, f64::INFINITY)).select(u, value);
    u.eq(one).select(a, value)
}

/// The arc tangent: of 1 / a beyond 1, with the angle halved twice, by its series (Abramowitz and Stegun 4.4.42).
fn atan(a: Val<'_>) -> Val<'_> {
    let c = |number| constant(a, number);
    let m = a.abs();
    let inverted = m.gt(c(1.0));
    let mut t = inverted.select(m.rcp(), m);
    for _ in 0..2 {
        t = t / (t.fma(t, c(1.0)).sqrt() + c(1.0));
    }
    let z = -(t * t);
    let mut sum = c(1.0 / 25.0);
    for n in (3..=23).rev().step_by(2) {
        sum = sum.fma(z, c(1.0 / f64::from(n)));
    }
    let angle = (t * z).fma(sum, t) * c(4.0);
    copysign(inverted.select(c(FRAC_PI_2) - angle, angle), a)
}

fn atan2<'b>(y: Val<'b>, x: Val<'b>) -> Val<'b> {
    let c = |number| constant(x, number);
    let (ax, ay) = (x.abs(), y.abs());
    let (most, least) = (ax.max(ay), ax.min(ay));
    let ratio = least.eq(most).select(c(1.0), least / most);
    let ratio = most.eq(zero(most)).select(zero(ratio), ratio);
    let angle = atan(ratio);
    let angle = ay.gt(ax).select(c(FRAC_PI_2) - angle, angle);
    let angle = negative(x).select(c(PI) - angle, angle);
    nan_of(x, y).select(x + y, copysign(angle, y))
}

fn hypot<'b>(x: Val<'b>, y: Val<'b>) -> Val<'b> {
    let c = |number| constant(x, number);
    let (ax, ay) = (x.abs(), y.abs());
    let (most, least) = (ax.max(ay), ax.min(ay));
    let ratio = least / most;
    let value = most * ratio.fma(ratio, c(1.0)).sqrt();
    let value = most.eq(zero(most)).select(most, value);
    let value = nan_of(x, y).select(x + y, value);
    let infinite = ax.eq(c(f64::INFINITY)) | ay.eq(c(f64::INFINITY));
    infinite.select(c(f64::INFINITY), value)
}

fn logaddexp<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let sum = a.maximum(b) + log1p((-(a - b).abs()).exp());
    a.eq(b).select(a + constant(a, LN_2), sum)
}

/// The bits of a float as an integer.
fn bits(a: Val<'_>) -> Val<'_> {
    let scalar = match a.ty().scalar() {
        Scalar::F64 => Scalar::I64,
        Scalar::F32 => Scalar::I32,
        _ => Scalar::I16,
    };
    a.bitcast(a.ty().with_scalar(scalar))
}

fn negative(a: Val<'_>) -> Val<'_> {
    bits(a).lt(zero(bits(a)))
}

fn nan_of<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    a.ne(a) | b.ne(b)
}

/// The magnitude of one with the sign of another.
fn copysign<'b>(a: Val<'b>, sign: Val<'b>) -> Val<'b> {
    let sign = bits(sign);
    let top = a.builder().bits(sign.ty(), 1 << (sign.ty().scalar().bits() - 1));
    ((bits(a) & !top) | (sign & top)).bitcast(a.ty())
}

fn nextafter<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let from = bits(a);
    let one = a.builder().bits(from.ty(), 1);
    let outwards = a.lt(b) ^ negative(a);
    let stepped = outwards.select(from + one, from - one).bitcast(a.ty());
    let least = copysign(one.bitcast(a.ty()), b);
    let value = a.eq(zero(a)).select(least, stepped);
    let value = a.eq(b).select(b, value);
    nan_of(a, b).select(a + b, value)
}

/// Truth values, as many as a value has lanes.
fn like_bool(a: Val<'_>, value: bool) -> Val<'_> {
    a.builder().bits(a.ty().with_scalar(Scalar::Bool), value.into())
}

fn maximum<'b>(dtype: DType, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    match dtype.kind() {
        Kind::Bool => a | b,
        Kind::Signed => a.max(b),
        Kind::Unsigned => a.max_u(b),
        _ => a.maximum(b),
    }
}

fn minimum<'b>(dtype: DType, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    match dtype.kind() {
        Kind::Bool => a & b,
        Kind::Signed => a.min(b),
        Kind::Unsigned => a.min_u(b),
        _ => a.minimum(b),
    }
}

/// Returns whether a condition holds in any lane.
fn any_lane(value: Val<'_>) -> Val<'_> {
    match value.ty().lanes() {
        1 => value,
        lanes => (1..lanes).fold(value.lane(0), |any, lane| any | value.lane(lane)),
    }
}

/// Returns the exact remainder of finite `a` ≥ 0 by finite `b` > 0.
///
/// Each step takes off a multiple of b·2ⁿ, n falling to 0, whose quotient is below 2^21 (2^50 of f64): the quotient's integer part and what
/// `fma` leaves of `a` are exact then. One step suffices if `a` < b·2^21.
fn remainder_exact<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let k = a.builder();
    let bits = if a.ty().scalar() == Scalar::F64 { 50 } else { 21 };
    let (up, down) = (constant(a, 2.0f64.powi(bits)), constant(a, 2.0f64.powi(-bits)));
    let step = |rest: Val<'b>, by: Val<'b>| {
        let left = (-(rest / by).fix()).fma(by, rest);
        // The quotient may have been rounded up to the next integer.
        left.lt(zero(left)).select(left + by, left)
    };
    let above = |by: Val<'b>| a.ge(by * up);
    let by = k.while_(b, |by| any_lane(above(by)), |by| above(by).select(by * up, by));
    let (rest, _) = k.while_(
        (a, by),
        |(_, by)| any_lane(by.gt(b)),
        |(rest, by)| (step(rest, by), by.gt(b).select(by * down, by)),
    );
    step(rest, b)
}

/// Quotient, rounded down, and remainder of floats as CPython and numpy compute them, but that the quotient of an infinite number is
/// infinite, as the array API standard has it.
fn divide_floats<'b>(a: Val<'b>, b: Val<'b>) -> (Val<'b>, Val<'b>) {
    let (none, one) = (zero(a), constant(a, 1.0));
    let infinity = constant(a, f64::INFINITY);
    let bad = b.eq(none) | !a.abs().lt(infinity) | b.ne(b);
    let unbounded = b.abs().eq(infinity);
    let trivial = bad | unbounded;
    let rest = remainder_exact(trivial.select(none, a.abs()), trivial.select(one, b.abs()));
    let rest = unbounded.select(a, copysign(rest, a));
    let whole = (a - rest) / b;
    let unlike = rest.ne(none) & (negative(rest) ^ negative(b));
    let whole = unlike.select(whole - one, whole);
    let floor = whole.floor();
    let floor = (whole - floor).gt(constant(a, 0.5)).select(floor + one, floor);
    let floor = whole.eq(none).select(copysign(none, a / b), floor);
    let modulo = rest.eq(none).select(copysign(none, b), unlike.select(rest + b, rest));
    (bad.select(a / b, floor), bad.select(constant(a, f64::NAN), modulo))
}

/// Quotient, rounded down, and remainder, of the divisor's sign, as Python has them.
fn divide_floor<'b>(dtype: DType, a: Val<'b>, b: Val<'b>) -> (Val<'b>, Val<'b>) {
    let none = zero(a);
    match dtype.kind() {
        Kind::Unsigned => (a.div_u(b), b.eq(none).select(none, a.rem_u(b))),
        Kind::Float => match a.ty().scalar() {
            narrow @ (Scalar::F16 | Scalar::Bf16) => {
                let (floor, modulo) = divide_floor(dtype, a.to(Scalar::F32), b.to(Scalar::F32));
                (floor.to(narrow), modulo.to(narrow))
            }
            _ => divide_floats(a, b),
        },
        _ => {
            let (quotient, rest) = (a / b, a % b);
            let unlike = rest.ne(none) & ((rest ^ b).lt(none));
            let zero_divisor = b.eq(none);
            let floor = unlike.select(quotient - constant(a, 1.0), quotient);
            let modulo = unlike.select(rest + b, rest);
            (zero_divisor.select(none, floor), zero_divisor.select(none, modulo))
        }
    }
}

/// A power of integers, which wraps.
fn power<'b>(a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let k = a.builder();
    let one = constant(a, 1.0);
    let (power, _, _) = k.range(k.i32(0), 64).fold((one, a, b), |_, (power, square, rest)| {
        let odd = (rest & one).ne(zero(rest));
        (odd.select(power * square, power), square * square, rest.shr_u(one))
    });
    power
}

/// A function of two elements of one type.
pub(crate) fn binary<'b>(op: Binary, x: V<'b>, y: V<'b>) -> V<'b> {
    use Binary as B;
    let logical = |value: Val<'b>| V::bool(value);
    match op {
        B::LogicalAnd => return logical(x.truth() & y.truth()),
        B::LogicalOr => return logical(x.truth() | y.truth()),
        B::LogicalXor => return logical(x.truth() ^ y.truth()),
        _ => {}
    }
    if let (Some(xi), Some(yi)) = (x.im, y.im) {
        return complex::binary(op, x.dtype, (x.re, xi), (y.re, yi));
    }
    let (dtype, kind) = (x.dtype, x.dtype.kind());
    let (a, b) = (x.re, y.re);
    let unsigned = kind == Kind::Unsigned;
    let narrow = |f: fn(Val<'b>, Val<'b>) -> Val<'b>| match a.ty().scalar() {
        scalar @ (Scalar::F16 | Scalar::Bf16) => f(a.to(Scalar::F32), b.to(Scalar::F32)).to(scalar),
        _ => f(a, b),
    };
    let value = match op {
        B::Equal if kind == Kind::Bool => return logical(!(a ^ b)),
        B::NotEqual if kind == Kind::Bool => return logical(a ^ b),
        B::Equal => return logical(a.eq(b)),
        B::NotEqual => return logical(a.ne(b)),
        B::Less if kind == Kind::Bool => return logical(!a & b),
        B::LessEqual if kind == Kind::Bool => return logical(!a | b),
        B::Greater if kind == Kind::Bool => return logical(a & !b),
        B::GreaterEqual if kind == Kind::Bool => return logical(a | !b),
        B::Less => return logical(if unsigned { a.lt_u(b) } else { a.lt(b) }),
        B::LessEqual => return logical(if unsigned { a.le_u(b) } else { a.le(b) }),
        B::Greater => return logical(if unsigned { a.gt_u(b) } else { a.gt(b) }),
        B::GreaterEqual => return logical(if unsigned { a.ge_u(b) } else { a.ge(b) }),
        B::Add if kind == Kind::Bool => a | b,
        B::Multiply if kind == Kind::Bool => a & b,
        B::Add => a + b,
        B::Subtract => a - b,
        B::Multiply => a * b,
        B::Divide => a / b,
        B::Maximum => maximum(dtype, a, b),
        B::Minimum => minimum(dtype, a, b),
        B::BitwiseAnd => a & b,
        B::BitwiseOr => a | b,
        B::BitwiseXor => a ^ b,
        B::BitwiseLeftShift | B::BitwiseRightShift => {
            let width = constant(a, dtype.bytes() as f64 * 8.0);
            let beyond = b.ge_u(width);
            match (op, unsigned) {
                (B::BitwiseLeftShift, _) => beyond.select(zero(a), a << b),
                (_, true) => beyond.select(zero(a), a.shr_u(b)),
                (_, false) => a >> beyond.select(width - constant(a, 1.0), b),
            }
        }
        B::FloorDivide => divide_floor(dtype, a, b).0,
        B::Remainder => divide_floor(dtype, a, b).1,
        B::Pow if kind == Kind::Float => a.pow(b),
        B::Pow if kind == Kind::Signed => {
            // Of a negative power only 1 and -1 leave a whole number.
            let (one, none) = (constant(a, 1.0), zero(a));
            let odd = (b & one).ne(none);
            let unit = a.eq(one).select(one, a.eq(-one).select(odd.select(a, one), none));
            b.lt(none).select(unit, power(a, b))
        }
        B::Pow => power(a, b),
        B::Copysign => copysign(a, b),
        B::Nextafter => nextafter(a, b),
        B::Atan2 => narrow(atan2),
        B::Hypot => narrow(hypot),
        B::Logaddexp => narrow(logaddexp),
        B::LogicalAnd | B::LogicalOr | B::LogicalXor => a,
    };
    V::new(dtype, value)
}

/// Functions of complex numbers: real and imaginary part.
mod complex {
    use super::*;

    type C<'b> = (Val<'b>, Val<'b>);

    fn add<'b>(a: C<'b>, b: C<'b>) -> C<'b> {
        (a.0 + b.0, a.1 + b.1)
    }

    fn sub<'b>(a: C<'b>, b: C<'b>) -> C<'b> {
        (a.0 - b.0, a.1 - b.1)
    }

    fn mul<'b>(a: C<'b>, b: C<'b>) -> C<'b> {
        (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0)
    }

    /// 1 / a.
    fn reciprocal(a: C<'_>) -> C<'_> {
        div((constant(a.0, 1.0), zero(a.0)), a)
    }

    /// 1 + a. The imaginary part is not added to, as zeros on a branch cut keep their signs.
    fn one_plus(a: C<'_>) -> C<'_> {
        (a.0 + constant(a.0, 1.0), a.1)
    }

    /// 1 − a.
    fn one_minus(a: C<'_>) -> C<'_> {
        (constant(a.0, 1.0) - a.0, -a.1)
    }

    /// The greater magnitude of both parts, without those that are NaN.
    fn most(a: C<'_>) -> Val<'_> {
        a.0.abs().max(a.1.abs())
    }

    fn scale<'b>(a: C<'b>, by: f64) -> C<'b> {
        let by = constant(a.0, by);
        (a.0 * by, a.1 * by)
    }

    /// The quotient, scaled so that nothing on the way is beyond the type's range (Smith 1962).
    fn div<'b>(a: C<'b>, b: C<'b>) -> C<'b> {
        let wide = b.0.abs().ge(b.1.abs());
        let (most, least) = (wide.select(b.0, b.1), wide.select(b.1, b.0));
        let ratio = least / most;
        let ratio = most.eq(zero(most)).select(zero(most), ratio);
        let divisor = least.fma(ratio, most);
        let re = wide.select(a.1.fma(ratio, a.0), a.0.fma(ratio, a.1)) / divisor;
        let im = wide.select((-a.0).fma(ratio, a.1), a.1.fma(ratio, -a.0)) / divisor;
        (re, im)
    }

    fn log(a: C<'_>) -> C<'_> {
        (hypot(a.0, a.1).log(), atan2(a.1, a.0))
    }

    fn is_infinite(a: Val<'_>) -> Val<'_> {
        a.abs().eq(constant(a, f64::INFINITY))
    }

    fn is_finite(a: Val<'_>) -> Val<'_> {
        a.abs().lt(constant(a, f64::INFINITY))
    }

    // What follows has the special values of C's Annex G, as the array API standard does: an infinite part beside one that is no number.

    fn exp(a: C<'_>) -> C<'_> {
        let m = a.0.exp();
        let none = a.1.eq(zero(a.1));
        let far = is_infinite(a.0) & !is_finite(a.1);
        let im = far.select(a.0.lt(zero(a.0)).select(m, constant(m, f64::NAN)), m * a.1.sin());
        ((none | far).select(m, m * a.1.cos()), none.select(a.1, im))
    }

    fn sqrt(a: C<'_>) -> C<'_> {
        let c = |number| constant(a.0, number);
        // Scaled by an even power of two, so that neither the sum overflows nor small numbers lose digits.
        let (large, small) = (most(a).gt(c(2.0f64.powi(60))), most(a).lt(c(2.0f64.powi(-60))));
        let scale =
            |down: i32, up: i32| large.select(c(2.0f64.powi(down)), small.select(c(2.0f64.powi(up)), c(1.0)));
        let (by, back) = (scale(-100, 100), scale(50, -50));
        let (x, y) = (a.0 * by, a.1 * by);
        let t = ((x.abs() + hypot(x, y)) * c(0.5)).sqrt();
        let other = t.eq(zero(t)).select(zero(t), y.abs() * c(0.5) / t) * back;
        let t = t * back;
        let right = !negative(a.0);
        let infinite = is_infinite(a.1);
        let re = infinite.select(c(f64::INFINITY), right.select(t, other));
        let im = infinite.select(c(f64::INFINITY), right.select(other, t));
        (re, copysign(im, a.1))
    }

    fn sinh(a: C<'_>) -> C<'_> {
        let (sinh, cosh) = (function(Unary::Sinh, a.0), function(Unary::Cosh, a.0));
        let none = a.1.eq(zero(a.1));
        let itself = a.0.eq(zero(a.0)) | is_infinite(a.0) & !is_finite(a.1);
        let re = none.select(sinh, sinh * a.1.cos());
        (itself.select(a.0, re), none.select(a.1, cosh * a.1.sin()))
    }

    fn cosh(a: C<'_>) -> C<'_> {
        let (sinh, cosh) = (function(Unary::Sinh, a.0), function(Unary::Cosh, a.0));
        let none = a.1.eq(zero(a.1));
        let far = is_infinite(a.0) & !is_finite(a.1);
        let signs = copysign(zero(a.0), a.0) * copysign(constant(a.1, 1.0), a.1);
        let im = (none | a.0.eq(zero(a.0))).select(signs, sinh * a.1.sin());
        ((none | far).select(cosh, cosh * a.1.cos()), im)
    }

    /// tanh (x + i y) = (sinh x cosh x + i sin y cos y) / (sinh² x + cos² y), in which nothing cancels near the poles; ±1 far out.
    fn tanh((x, y): C<'_>) -> C<'_> {
        let far = x.abs().gt(constant(x, 40.0)) & is_finite(y) | is_infinite(x);
        let (sinh, cos) = (function(Unary::Sinh, x), y.cos());
        let below = sinh * sinh + cos * cos;
        let re = sinh * function(Unary::Cosh, x) / below;
        let re = x.eq(zero(x)).select(x, far.select(copysign(constant(x, 1.0), x), re));
        let im = far.select(copysign(zero(y), y), y.sin() * cos / below);
        (re, y.eq(zero(y)).select(y, im))
    }

    /// a (1 + c a² + d a⁴), of small numbers, with their signs.
    fn odd_series<'b>(a: C<'b>, [c, d]: [f64; 2]) -> C<'b> {
        let square = mul(a, a);
        let value = mul(a, one_plus(mul(square, add(scale(square, d), (constant(a.0, c), zero(a.0))))));
        (copysign(value.0, a.0), copysign(value.1, a.1))
    }

    /// Returns whether a number is so small that `odd_series` is exact to the last digit.
    fn is_small(a: C<'_>) -> Val<'_> {
        let bits = if a.0.ty().scalar() == Scalar::F64 { -10 } else { -5 };
        let bound = constant(a.0, 2.0f64.powi(bits));
        a.0.abs().lt(bound) & a.1.abs().lt(bound)
    }

    fn choose<'b>(which: Val<'b>, a: C<'b>, b: C<'b>) -> C<'b> {
        (which.select(a.0, b.0), which.select(a.1, b.1))
    }

    /// i a.
    fn turn(a: C<'_>) -> C<'_> {
        (-a.1, a.0)
    }

    /// −i a.
    fn turn_back(a: C<'_>) -> C<'_> {
        (a.1, -a.0)
    }

    fn asinh(a: C<'_>) -> C<'_> {
        // The half plane in which nothing cancels.
        let flip = negative(a.0);
        let b = (a.0.abs(), flip.select(-a.1, a.1));
        let root = mul(sqrt(one_plus(turn(b))), sqrt(one_minus(turn(b))));
        let value = log(add(b, root));
        // For large |b| the result is ln 2b.
        let far = most(b).gt(constant(a.0, 2.0f64.powi(40)));
        let part = constant(a.0, 0.25);
        let log_2b = hypot(b.0 * part, b.1 * part).log() + constant(a.0, 3.0 * LN_2);
        let re = far.select(log_2b, value.0);
        let im = far.select(atan2(b.1, b.0), value.1);
        let value = (re, a.1.eq(zero(a.1)).select(b.1, im));
        let value = (flip.select(-value.0, value.0), flip.select(-value.1, value.1));
        choose(is_small(a), odd_series(a, [-1.0 / 6.0, 3.0 / 40.0]), value)
    }

    fn acos(a: C<'_>) -> C<'_> {
        let s = turn_back(asinh(turn(a)));
        (constant(a.0, FRAC_PI_2) - s.0, -s.1)
    }

    fn atanh(a: C<'_>) -> C<'_> {
        let value = scale(sub(log(one_plus(a)), log(one_minus(a))), 0.5);
        let infinite = is_infinite(a.0) | is_infinite(a.1);
        let right = copysign(constant(a.1, FRAC_PI_2), a.1);
        let right = a.1.ne(a.1).select(a.1, right);
        // For large |a| the real part is that of 1 / a.
        let m = hypot(a.0, a.1);
        let far = m.gt(constant(a.0, 2.0f64.powi(30)));
        let re = infinite.select(copysign(zero(a.0), a.0), far.select(a.0 / m / m, value.0));
        let value = (a.0.eq(zero(a.0)).select(a.0, re), infinite.select(right, value.1));
        choose(is_small(a), odd_series(a, [1.0 / 3.0, 1.0 / 5.0]), value)
    }

    /// e^a − 1: its real part is (e^x − 1) cos y − 2 sin² (y / 2).
    fn expm1(a: C<'_>) -> C<'_> {
        let half = (a.1 * constant(a.1, 0.5)).sin();
        let less = super::expm1(a.0);
        let near = less * a.1.cos() - half * half * constant(a.1, 2.0) + zero(a.0);
        let (none, far) = (a.1.eq(zero(a.1)), is_infinite(a.0) & !is_finite(a.1));
        ((none | far).select(less + zero(a.0), near), exp(a).1)
    }

    pub(super) fn unary<'b>(op: Unary, dtype: DType, a: C<'b>) -> V<'b> {
        use Unary as U;
        let part = |value| V::new(dtype.real(), value);
        let of = |value: fn(Val<'b>) -> Val<'b>, any: bool| {
            let (x, y) = (value(a.0), value(a.1));
            V::bool(if any { x | y } else { x & y })
        };
        let each = |f: fn(Val<'b>) -> Val<'b>| (f(a.0), f(a.1));
        let (re, im) = match op {
            U::Abs => return part(hypot(a.0, a.1)),
            U::Real => return part(a.0),
            U::Imag => return part(a.1),
            U::Isnan => return of(|x| x.ne(x), true),
            U::Isinf => return of(|x| x.abs().eq(constant(x, f64::INFINITY)), true),
            U::Isfinite => return of(|x| x.abs().lt(constant(x, f64::INFINITY)), false),
            U::Positive => a,
            U::Negative => each(|x| -x),
            U::Conj => (a.0, -a.1),
            U::Square => {
                // A difference of squares could overflow where this product does not.
                let half = constant(a.0, 0.5);
                let re = (a.0 - a.1) * (a.0 * half + a.1 * half);
                (re + re + zero(re), a.0 * a.1 + a.1 * a.0)
            }
            U::Reciprocal => reciprocal(a),
            U::Round => each(|x| x.round()),
            U::Sign => {
                // If one part alone is infinite, the sign points along it.
                let (x, y) = (is_infinite(a.0), is_infinite(a.1));
                let far = x ^ y;
                let towards =
                    |part: Val<'b>, is: Val<'b>| is.select(copysign(constant(part, 1.0), part), zero(part));
                let m = hypot(a.0, a.1);
                let none = m.eq(zero(m));
                let of = |part: Val<'b>, is| far.select(towards(part, is), none.select(m, part / m));
                (of(a.0, x), of(a.1, y))
            }
            U::Sqrt => sqrt(a),
            U::Exp => exp(a),
            U::Exp2 => exp(scale(a, LN_2)),
            U::Expm1 => expm1(a),
            U::Log => log(a),
            U::Log2 => scale(log(a), 1.0 / LN_2),
            U::Log10 => scale(log(a), 1.0 / LN_10),
            U::Log1p => {
                // ln |1 + a| = ln(1 + 2 x + x² + y²) / 2.
                let small = log1p(a.0 * (a.0 + constant(a.0, 2.0)) + a.1 * a.1) * constant(a.0, 0.5);
                let b = one_plus(a);
                let near = hypot(a.0, a.1).lt(constant(a.0, 0.5));
                (near.select(small, hypot(b.0, b.1).log()), atan2(b.1, b.0))
            }
            U::Sinh => sinh(a),
            U::Cosh => cosh(a),
            U::Tanh => tanh(a),
            U::Sin => turn_back(sinh(turn(a))),
            U::Cos => cosh(turn(a)),
            U::Tan => turn_back(tanh(turn(a))),
            U::Asinh => asinh(a),
            U::Asin => turn_back(asinh(turn(a))),
            U::Acos => acos(a),
            U::Acosh => {
                let value = acos(a);
                let left = negative(value.1);
                (left.select(-value.1, value.1), left.select(value.0, -value.0))
            }
            U::Atanh => atanh(a),
            U::Atan => turn_back(atanh(turn(a))),
            // The rest has no complex numbers.
            _ => a,
        };
        V::complex(dtype, re, im)
    }

    pub(super) fn binary<'b>(op: Binary, dtype: DType, a: C<'b>, b: C<'b>) -> V<'b> {
        let (re, im) = match op {
            Binary::Equal => return V::bool(a.0.eq(b.0) & a.1.eq(b.1)),
            Binary::NotEqual => return V::bool(a.0.ne(b.0) | a.1.ne(b.1)),
            Binary::Subtract => sub(a, b),
            Binary::Multiply => mul(a, b),
            Binary::Divide => div(a, b),
            Binary::Pow => {
                let value = exp(mul(b, log(a)));
                let (base, power) =
                    (a.0.eq(zero(a.0)) & a.1.eq(zero(a.1)), b.0.eq(zero(b.0)) & b.1.eq(zero(b.1)));
                let one = power.select(constant(a.0, 1.0), zero(a.0));
                (base.select(one, value.0), base.select(zero(a.0), value.1))
            }
            // The rest has no complex numbers.
            _ => add(a, b),
        };
        V::complex(dtype, re, im)
    }
}

/// Philox4x32-10 (Salmon et al. 2011): four words of a counter and a key.
pub(super) fn philox<'b>(counter: Val<'b>, key: Val<'b>) -> [Val<'b>; 4] {
    let k = counter.builder();
    let word = |value: Val<'b>| value.to(Scalar::I32);
    let high = |value: Val<'b>| value.shr_u(constant(value, 32.0)).to(Scalar::I32);
    let ty: Type = word(counter).ty();
    let c = |bits: u32| k.bits(ty, bits.into());
    let none = c(0);
    let mut x = [word(counter), high(counter), none, none];
    let mut keys = [word(key), high(key)];
    for _ in 0..10 {
        let (a, b) = (c(0xD251_1F53), c(0xCD9E_8D57));
        x = [x[2].mulhi_u(b) ^ x[1] ^ keys[0], x[2] * b, x[0].mulhi_u(a) ^ x[3] ^ keys[1], x[0] * a];
        keys = [keys[0] + c(0x9E37_79B9), keys[1] + c(0xBB67_AE85)];
    }
    x
}
