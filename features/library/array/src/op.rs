//! The functions of elements, and which types they have.

use crate::dtype::{DType, Kind};
use crate::error::{Error, Result};

/// A function of one element.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::EnumString, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs, reason = "they are what the array API standard and numpy call so")]
pub enum Unary {
    Abs,
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atanh,
    BitwiseInvert,
    Ceil,
    Conj,
    Cos,
    Cosh,
    Erf,
    Exp,
    Exp2,
    Expm1,
    Floor,
    Gelu,
    GeluTanh,
    Imag,
    Isfinite,
    Isinf,
    Isnan,
    Log,
    Log10,
    Log1p,
    Log2,
    LogicalNot,
    Negative,
    Positive,
    Real,
    Reciprocal,
    Relu,
    Round,
    Rsqrt,
    Sigmoid,
    Sign,
    Signbit,
    Silu,
    Sin,
    Sinh,
    Sqrt,
    Square,
    Tan,
    Tanh,
    Trunc,
}

/// A function of two elements.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::EnumString, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs, reason = "they are what the array API standard and numpy call so")]
pub enum Binary {
    Add,
    Atan2,
    BitwiseAnd,
    BitwiseLeftShift,
    BitwiseOr,
    BitwiseRightShift,
    BitwiseXor,
    Copysign,
    Divide,
    Equal,
    FloorDivide,
    Greater,
    GreaterEqual,
    Hypot,
    Less,
    LessEqual,
    Logaddexp,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
    Maximum,
    Minimum,
    Multiply,
    Nextafter,
    NotEqual,
    Pow,
    Remainder,
    Subtract,
}

/// A set of kinds, for the tables below.
const fn set<const N: usize>(kinds: [Kind; N]) -> u8 {
    let (mut bits, mut at) = (0, 0);
    while at < N {
        bits |= 1 << kinds[at] as u8;
        at += 1;
    }
    bits
}

const BOOL: u8 = set([Kind::Bool]);
const INTEGER: u8 = set([Kind::Signed, Kind::Unsigned]);
const FLOAT: u8 = set([Kind::Float]);
const COMPLEX: u8 = set([Kind::Complex]);
const REAL: u8 = INTEGER | FLOAT;
const NUMBER: u8 = REAL | COMPLEX;
const ALL: u8 = NUMBER | BOOL;

fn check(function: &'static str, dtype: DType, kinds: u8, what: &'static str) -> Result<()> {
    match kinds >> dtype.kind() as u8 & 1 {
        0 => Err(Error::Type { function, dtype, what }),
        _ => Ok(()),
    }
}

fn words(kinds: u8) -> &'static str {
    match kinds {
        BOOL => "it takes truth values",
        FLOAT => "it takes floats",
        COMPLEX => "it takes complex numbers",
        REAL => "it takes integers and floats",
        NUMBER => "it takes numbers",
        x if x == BOOL | INTEGER => "it takes integers and truth values",
        x if x == BOOL | REAL => "it takes real numbers and truth values",
        x if x == FLOAT | COMPLEX => "it takes floats and complex numbers",
        _ => "it takes other types",
    }
}

impl Unary {
    /// The type that the operand is converted to, and that of the result.
    ///
    /// # Errors
    /// [`Error::Type`].
    pub fn types(self, dtype: DType) -> Result<(DType, DType)> {
        use Unary as U;
        let name = self.into();
        let (kinds, to_inexact) = match self {
            U::BitwiseInvert => (BOOL | INTEGER, false),
            U::LogicalNot => (ALL, false),
            U::Abs | U::Negative | U::Positive | U::Sign | U::Square => (NUMBER, false),
            U::Ceil | U::Floor | U::Trunc | U::Relu => (REAL, false),
            U::Round | U::Conj | U::Real => (NUMBER, false),
            U::Imag => (COMPLEX, false),
            U::Isfinite | U::Isinf | U::Isnan => (ALL, false),
            U::Signbit => (FLOAT, false),
            U::Erf | U::Gelu | U::GeluTanh | U::Rsqrt | U::Sigmoid | U::Silu => (BOOL | REAL, true),
            _ => (ALL, true),
        };
        check(name, dtype, kinds, words(kinds))?;
        let from = if to_inexact { dtype.to_inexact() } else { dtype };
        let to = match self {
            U::Isfinite | U::Isinf | U::Isnan | U::Signbit | U::LogicalNot => DType::Bool,
            U::Abs | U::Imag | U::Real => from.real(),
            _ => from,
        };
        Ok((from, to))
    }
}

impl Binary {
    /// Returns whether it is a comparison.
    pub const fn is_comparison(self) -> bool {
        use Binary as B;
        matches!(self, B::Equal | B::NotEqual | B::Greater | B::GreaterEqual | B::Less | B::LessEqual)
    }

    /// Returns the comparison that gives the same result with exchanged operands, and other functions unchanged.
    #[must_use]
    pub const fn mirrored(self) -> Self {
        match self {
            Self::Less => Self::Greater,
            Self::LessEqual => Self::GreaterEqual,
            Self::Greater => Self::Less,
            Self::GreaterEqual => Self::LessEqual,
            other => other,
        }
    }

    /// The type that both operands, of the promoted type, are converted to, and that of the result.
    ///
    /// # Errors
    /// [`Error::Type`].
    pub fn types(self, promoted: DType) -> Result<(DType, DType)> {
        use Binary as B;
        let name = self.into();
        let kinds = match self {
            B::BitwiseAnd | B::BitwiseOr | B::BitwiseXor => BOOL | INTEGER,
            B::BitwiseLeftShift | B::BitwiseRightShift => INTEGER,
            B::Copysign | B::Hypot | B::Logaddexp | B::Atan2 => BOOL | REAL,
            B::Nextafter => FLOAT,
            B::Add | B::Multiply | B::Divide | B::Equal | B::NotEqual => ALL,
            B::LogicalAnd | B::LogicalOr | B::LogicalXor => ALL,
            B::Greater | B::GreaterEqual | B::Less | B::LessEqual | B::Maximum | B::Minimum => BOOL | REAL,
            B::FloorDivide | B::Remainder => BOOL | REAL,
            B::Pow => ALL,
            B::Subtract => NUMBER,
        };
        check(name, promoted, kinds, words(kinds))?;
        let from = match self {
            B::Copysign | B::Hypot | B::Logaddexp | B::Atan2 | B::Divide => promoted.to_inexact(),
            B::FloorDivide | B::Remainder | B::Pow if promoted == DType::Bool => DType::Int8,
            _ => promoted,
        };
        let to = match self {
            _ if self.is_comparison() => DType::Bool,
            B::LogicalAnd | B::LogicalOr | B::LogicalXor => DType::Bool,
            _ => from,
        };
        Ok((from, to))
    }
}

/// How elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their product.
    Prod,
    /// The greatest, NaN if one is.
    Max,
    /// The least, NaN if one is.
    Min,
    /// Is one not 0?
    Any,
    /// Is none 0?
    All,
}

impl Reduction {
    /// The type of the result: sums and products of small integers have 64 bits.
    ///
    /// # Errors
    /// [`Error::Type`].
    pub fn of(self, dtype: DType) -> Result<DType> {
        let kinds = match self {
            Self::Max | Self::Min => BOOL | REAL,
            _ => ALL,
        };
        check(self.into(), dtype, kinds, words(kinds))?;
        Ok(match (self, dtype.kind()) {
            (Self::Any | Self::All, _) => DType::Bool,
            (Self::Sum | Self::Prod, Kind::Bool | Kind::Signed) => DType::Int64,
            (Self::Sum | Self::Prod, Kind::Unsigned) => DType::UInt64,
            _ => dtype,
        })
    }

    /// What it is added up in.
    pub(crate) fn accumulator(self, result: DType) -> DType {
        match (self, result) {
            (Self::Sum | Self::Prod, DType::Float16 | DType::BFloat16) => DType::Float32,
            (_, result) => result,
        }
    }

    /// Has it a value where there are no elements?
    pub(crate) fn has_identity(self) -> bool {
        !matches!(self, Self::Max | Self::Min)
    }
}
