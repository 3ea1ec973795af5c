//! What an element is.

use vm_ir::Scalar;

/// The type of an array's elements.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    strum::Display,
    strum::EnumString,
    strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum DType {
    /// A truth value, a byte of 0 or 1.
    Bool,
    /// Signed integer of 8 bits.
    Int8,
    /// Signed integer of 16 bits.
    Int16,
    /// Signed integer of 32 bits.
    Int32,
    /// Signed integer of 64 bits.
    Int64,
    /// Unsigned integer of 8 bits.
    UInt8,
    /// Unsigned integer of 16 bits.
    UInt16,
    /// Unsigned integer of 32 bits.
    UInt32,
    /// Unsigned integer of 64 bits.
    UInt64,
    /// IEEE 754 binary16.
    Float16,
    /// bfloat16: the upper half of binary32.
    BFloat16,
    /// IEEE 754 binary32.
    Float32,
    /// IEEE 754 binary64.
    Float64,
    /// Two [`Float32`](DType::Float32): real and imaginary part.
    Complex64,
    /// Two [`Float64`](DType::Float64): real and imaginary part.
    Complex128,
}

/// What values a type has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Truth values.
    Bool,
    /// Signed integers.
    Signed,
    /// Unsigned integers.
    Unsigned,
    /// Floats.
    Float,
    /// Complex numbers.
    Complex,
}

use DType::*;

impl DType {
    /// Every type.
    pub const ALL: &[DType] = <DType as strum::VariantArray>::VARIANTS;

    /// What values it has.
    pub const fn kind(self) -> Kind {
        match self {
            Bool => Kind::Bool,
            Int8 | Int16 | Int32 | Int64 => Kind::Signed,
            UInt8 | UInt16 | UInt32 | UInt64 => Kind::Unsigned,
            Float16 | BFloat16 | Float32 | Float64 => Kind::Float,
            Complex64 | Complex128 => Kind::Complex,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Bool | Int8 | UInt8 => 1,
            Int16 | UInt16 | Float16 | BFloat16 => 2,
            Int32 | UInt32 | Float32 => 4,
            Int64 | UInt64 | Float64 | Complex64 => 8,
            Complex128 => 16,
        }
    }

    /// What it is in a kernel's registers; of a complex number each of its parts.
    pub(crate) const fn scalar(self) -> Scalar {
        match self {
            Bool => Scalar::Bool,
            Int8 | UInt8 => Scalar::I8,
            Int16 | UInt16 => Scalar::I16,
            Int32 | UInt32 => Scalar::I32,
            Int64 | UInt64 => Scalar::I64,
            Float16 => Scalar::F16,
            BFloat16 => Scalar::Bf16,
            Float32 | Complex64 => Scalar::F32,
            Float64 | Complex128 => Scalar::F64,
        }
    }

    /// What it is in memory; of a complex number each of its parts.
    pub(crate) const fn stored(self) -> Scalar {
        match self {
            Bool => Scalar::I8,
            other => other.scalar(),
        }
    }

    /// Scalars of an element in memory: 2 of a complex number.
    pub(crate) const fn parts(self) -> u64 {
        match self {
            Complex64 | Complex128 => 2,
            _ => 1,
        }
    }

    /// Is it a float or a complex number?
    pub const fn is_inexact(self) -> bool {
        matches!(self.kind(), Kind::Float | Kind::Complex)
    }

    /// Is it an integer?
    pub const fn is_integer(self) -> bool {
        matches!(self.kind(), Kind::Signed | Kind::Unsigned)
    }

    /// Is it a complex number?
    pub const fn is_complex(self) -> bool {
        matches!(self.kind(), Kind::Complex)
    }

    /// The type of a complex number's parts; of others itself.
    pub const fn real(self) -> DType {
        match self {
            Complex64 => Float32,
            Complex128 => Float64,
            other => other,
        }
    }

    /// The complex type with parts of this float; bfloat16 and float16 are widened.
    pub const fn complex(self) -> DType {
        match self {
            Float64 | Complex128 => Complex128,
            _ => Complex64,
        }
    }

    /// The type that both convert to without loss, as `numpy.promote_types` has it; what numpy has not, bfloat16, is promoted like float16, and with
    /// that to float32.
    pub fn promote(self, other: DType) -> DType {
        if self == other {
            return self;
        }
        let (low, high) = if self.kind() <= other.kind() { (self, other) } else { (other, self) };
        match (low.kind(), high.kind()) {
            (Kind::Bool, _) => high,
            (a, b) if a == b => match (low, high) {
                (Float16, BFloat16) | (BFloat16, Float16) => Float32,
                _ if low.bytes() < high.bytes() => high,
                _ => low,
            },
            (Kind::Signed, Kind::Unsigned) => match (2 * high.bytes()).max(low.bytes()) {
                2 => Int16,
                4 => Int32,
                8 => Int64,
                _ => Float64,
            },
            (Kind::Signed | Kind::Unsigned, Kind::Float) => match low.bytes() {
                1 => high,
                2 => high.promote(Float32),
                _ => Float64,
            },
            (Kind::Signed | Kind::Unsigned, _) => match low.bytes() {
                1 | 2 => high,
                _ => Complex128,
            },
            _ => match low {
                Float64 => Complex128,
                _ => high,
            },
        }
    }

    /// The float that functions of reals (`exp`, true division) of this type have.
    pub fn to_inexact(self) -> DType {
        match self {
            Bool | Int8 | UInt8 | Int16 | UInt16 | Int32 | UInt32 | Int64 | UInt64 => Float64,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_numpys() {
        let check = |a: DType, b: DType, expect: DType| {
            assert_eq!([a.promote(b), b.promote(a)], [expect; 2], "{a} {b}");
        };
        check(Bool, UInt8, UInt8);
        check(Int8, UInt8, Int16);
        check(Int64, UInt32, Int64);
        check(Int64, UInt64, Float64);
        check(Int32, UInt8, Int32);
        check(UInt16, Float16, Float32);
        check(Int8, Float16, Float16);
        check(Int32, Float32, Float64);
        check(Int16, Float32, Float32);
        check(Float16, BFloat16, Float32);
        check(BFloat16, Float64, Float64);
        check(Float64, Complex64, Complex128);
        check(Int32, Complex64, Complex128);
        check(Int16, Complex64, Complex64);
        for &a in DType::ALL {
            for &b in DType::ALL {
                assert_eq!(a.promote(b), b.promote(a), "{a} {b}");
                assert_eq!(a.promote(a.promote(b)), a.promote(b), "{a} {b}");
            }
        }
    }
}
