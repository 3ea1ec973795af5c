//! A value of a kernel that is being written: a register, or two of a complex number.

use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

use crate::dtype::{DType, Kind};

/// An element, or a vector of them.
#[derive(Clone, Copy)]
pub(crate) struct V<'b> {
    pub(crate) dtype: DType,
    pub(crate) re: Val<'b>,
    /// Of complex numbers.
    pub(crate) im: Option<Val<'b>>,
}

impl<'b> V<'b> {
    pub(crate) fn new(dtype: DType, re: Val<'b>) -> Self {
        Self { dtype, re, im: None }
    }

    pub(crate) fn complex(dtype: DType, re: Val<'b>, im: Val<'b>) -> Self {
        Self { dtype, re, im: Some(im) }
    }

    pub(crate) fn bool(re: Val<'b>) -> Self {
        Self::new(DType::Bool, re)
    }

    pub(crate) fn map(self, f: impl Fn(Val<'b>) -> Val<'b>) -> Self {
        Self { re: f(self.re), im: self.im.map(f), ..self }
    }

    /// Is it not 0?
    pub(crate) fn truth(self) -> Val<'b> {
        if self.dtype == DType::Bool {
            return self.re;
        }
        let is = |part: Val<'b>| part.ne(zero(part));
        match self.im {
            None => is(self.re),
            Some(im) => is(self.re) | is(im),
        }
    }

    /// In another type, as numpy converts: a complex number's imaginary part is dropped, what is beyond an integer of floats is as the IR has it.
    pub(crate) fn to(self, dtype: DType) -> Self {
        if dtype == self.dtype {
            return self;
        }
        if dtype == DType::Bool {
            return Self::bool(self.truth());
        }
        let part = |value: Val<'b>| convert(value, self.dtype, dtype);
        let re = part(self.re);
        match dtype.is_complex() {
            true => Self::complex(dtype, re, self.im.map_or_else(|| zero(re), part)),
            false => Self::new(dtype, re),
        }
    }
}

fn convert<'b>(value: Val<'b>, from: DType, to: DType) -> Val<'b> {
    let scalar = to.scalar();
    match (from.kind(), to.kind()) {
        (Kind::Bool, Kind::Float | Kind::Complex) => value.to(Scalar::I32).to(scalar),
        (Kind::Unsigned, _) => value.to_u(scalar),
        // Negative ones wrap, as with C's compilers and numpy, where they fit into 64 bits.
        (Kind::Float | Kind::Complex, Kind::Unsigned) if to != DType::UInt64 => {
            value.to(Scalar::I64).to(scalar)
        }
        (Kind::Float | Kind::Complex, Kind::Unsigned) => {
            let negative = value.lt(zero(value));
            negative.select(value.to(Scalar::I64), value.to_u(Scalar::I64))
        }
        (Kind::Float | Kind::Complex, Kind::Signed) if to.bytes() < 4 => value.to(Scalar::I32).to(scalar),
        _ => value.to(scalar),
    }
}

/// 0, like a value.
pub(crate) fn zero(like: Val<'_>) -> Val<'_> {
    like.builder().bits(like.ty(), 0)
}

/// A number, like a float or an integer.
pub(crate) fn constant(like: Val<'_>, number: f64) -> Val<'_> {
    let (k, ty) = (like.builder(), like.ty());
    match ty.scalar() {
        scalar if scalar.is_int() => k.bits(ty, number as i64 as u64),
        Scalar::Bool => k.bits(ty, u64::from(number != 0.0)),
        _ => k.constant(ty, number),
    }
}

/// A scalar in all of so many lanes.
pub(crate) fn splat(value: Val<'_>, lanes: u8) -> Val<'_> {
    if lanes == 1 || value.ty().lanes() == lanes { value } else { value.splat(lanes) }
}

/// The type of so many lanes.
pub(crate) fn ty(scalar: Scalar, lanes: u8) -> Type {
    Type::vector(scalar, lanes).unwrap_or(Type::scalar_of(scalar))
}
