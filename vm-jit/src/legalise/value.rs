//! What the expansions are written with.

use vm_ir::Scalar;
use vm_ir::builder::{IntoVal, Val};

/// The coefficients of a polynomial, as bits.
pub(super) trait Coefficient: Copy {
    fn value(self) -> f64;
}

impl Coefficient for u64 {
    fn value(self) -> f64 {
        f64::from_bits(self)
    }
}

impl Coefficient for u32 {
    fn value(self) -> f64 {
        f32::from_bits(self).into()
    }
}

pub(super) fn is_f32(x: Val<'_>) -> bool {
    x.ty().scalar() == Scalar::F32
}

/// A constant of a value's type.
pub(super) fn constant<'b>(like: Val<'b>, number: impl IntoVal<'b>) -> Val<'b> {
    number.into_val(like.builder(), like.ty())
}

/// `a` where the bool is true, else `b`, of a value's type.
pub(super) fn choose<'b>(
    condition: Val<'b>,
    like: Val<'b>,
    a: impl IntoVal<'b>,
    b: impl IntoVal<'b>,
) -> Val<'b> {
    condition.select(constant(like, a), constant(like, b))
}

fn cast(x: Val<'_>, scalar: Scalar) -> Val<'_> {
    x.bitcast(x.ty().with_scalar(scalar))
}

/// The bits of a number, as integers.
pub(super) fn bits(x: Val<'_>) -> Val<'_> {
    let scalar = match x.ty().scalar().bits() {
        8 => Scalar::I8,
        16 => Scalar::I16,
        32 => Scalar::I32,
        _ => Scalar::I64,
    };
    cast(x, scalar)
}

/// The f32 or f64 of these bits.
pub(super) fn float(x: Val<'_>) -> Val<'_> {
    cast(x, if x.ty().scalar() == Scalar::I32 { Scalar::F32 } else { Scalar::F64 })
}

/// The sign bit of the type's integers.
fn sign_bit(x: Val<'_>) -> i64 {
    if is_f32(x) { i32::MIN.into() } else { i64::MIN }
}

/// A positive number with the sign of another.
pub(super) fn with_sign<'b>(size: Val<'b>, of: Val<'b>) -> Val<'b> {
    float(bits(size) | (bits(of) & sign_bit(of)))
}

/// Not above `high`, not below `low`; a NaN stays one.
pub(super) fn clamp(x: Val<'_>, low: f64, high: f64) -> Val<'_> {
    let x = choose(x.gt(high), x, high, x);
    choose(x.lt(low), x, low, x)
}

/// A polynomial, lowest power first.
pub(super) fn polynomial<'b>(coefficients: &[impl Coefficient], x: Val<'b>) -> Val<'b> {
    let mut terms = coefficients.iter().rev().map(|c| constant(x, c.value()));
    match terms.next() {
        Some(first) => terms.fold(first, |sum, term| sum.fma(x, term)),
        None => x,
    }
}
