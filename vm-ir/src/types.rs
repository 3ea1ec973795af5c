//! Register types: scalars, and vectors of 2 to 16 of them.

use std::fmt;

/// What one lane of a value is. Integers carry no sign: the sign is in the op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[derive(strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Scalar {
    /// A truth value. It lives in registers only; memory holds `i8`.
    Bool = 0,
    /// 8-bit integer.
    I8 = 1,
    /// 16-bit integer.
    I16 = 2,
    /// 32-bit integer.
    I32 = 3,
    /// 64-bit integer.
    I64 = 4,
    /// IEEE 754 binary16.
    F16 = 5,
    /// bfloat16: the upper half of binary32.
    Bf16 = 6,
    /// IEEE 754 binary32.
    F32 = 7,
    /// IEEE 754 binary64.
    F64 = 8,
    /// OCP FP8 E4M3 (no infinity, largest value 448). Storage and conversion only.
    F8E4M3 = 9,
    /// OCP FP8 E5M2. Storage and conversion only.
    F8E5M2 = 10,
    /// 19-bit TensorFloat in a 32-bit container. Matrix ops only, so no SIMT op takes it.
    Tf32 = 11,
}

impl Scalar {
    /// Every scalar, in the order of its binary code.
    pub const ALL: &[Scalar] = <Scalar as strum::VariantArray>::VARIANTS;

    /// The name in text.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The scalar with this text name.
    pub fn from_name(name: &str) -> Option<Scalar> {
        name.parse().ok()
    }

    /// The binary code.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The scalar with this binary code.
    pub fn from_code(code: u8) -> Option<Scalar> {
        Scalar::ALL.get(usize::from(code)).copied()
    }

    /// Width in bits; 1 for `bool`.
    pub const fn bits(self) -> u32 {
        match self {
            Scalar::Bool => 1,
            Scalar::I8 | Scalar::F8E4M3 | Scalar::F8E5M2 => 8,
            Scalar::I16 | Scalar::F16 | Scalar::Bf16 => 16,
            Scalar::I32 | Scalar::F32 | Scalar::Tf32 => 32,
            Scalar::I64 | Scalar::F64 => 64,
        }
    }

    /// Size in memory in bytes. `bool` has none of its own and counts as one.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// The bits a value of this type may have set.
    pub const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Is it `i8` to `i64`?
    pub const fn is_int(self) -> bool {
        Class::INT.contains(self)
    }

    /// Is it a float with arithmetic (`f16`, `bf16`, `f32`, `f64`)?
    pub const fn is_float(self) -> bool {
        Class::FLOAT.contains(self)
    }

    /// May memory hold it?
    pub const fn in_memory(self) -> bool {
        Class::DATA.contains(self)
    }
}

/// The type of a value: a scalar, or a vector of 2, 4, 8 or 16 lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Type {
    scalar: Scalar,
    lanes: u8,
}

impl Type {
    /// `bool`.
    pub const BOOL: Type = Type::scalar_of(Scalar::Bool);
    /// `i8`.
    pub const I8: Type = Type::scalar_of(Scalar::I8);
    /// `i16`.
    pub const I16: Type = Type::scalar_of(Scalar::I16);
    /// `i32`.
    pub const I32: Type = Type::scalar_of(Scalar::I32);
    /// `i64`.
    pub const I64: Type = Type::scalar_of(Scalar::I64);
    /// `f16`.
    pub const F16: Type = Type::scalar_of(Scalar::F16);
    /// `bf16`.
    pub const BF16: Type = Type::scalar_of(Scalar::Bf16);
    /// `f32`.
    pub const F32: Type = Type::scalar_of(Scalar::F32);
    /// `f64`.
    pub const F64: Type = Type::scalar_of(Scalar::F64);

    /// The lane counts a vector may have; 1 is a scalar.
    pub const LANES: [u8; 5] = [1, 2, 4, 8, 16];

    /// The type of one lane of `scalar`.
    pub const fn scalar_of(scalar: Scalar) -> Type {
        Type { scalar, lanes: 1 }
    }

    /// `scalar` in `lanes` lanes; `None` unless that is 1, 2, 4, 8 or 16.
    pub const fn vector(scalar: Scalar, lanes: u8) -> Option<Type> {
        match lanes {
            1 | 2 | 4 | 8 | 16 => Some(Type { scalar, lanes }),
            _ => None,
        }
    }

    /// What one lane is.
    pub const fn scalar(self) -> Scalar {
        self.scalar
    }

    /// Number of lanes; 1 for a scalar.
    pub const fn lanes(self) -> u8 {
        self.lanes
    }

    /// Is it a vector?
    pub const fn is_vector(self) -> bool {
        self.lanes > 1
    }

    /// The same lanes of another scalar.
    pub const fn with_scalar(self, scalar: Scalar) -> Type {
        Type { scalar, lanes: self.lanes }
    }

    /// Width of all lanes together, in bits.
    pub const fn bits(self) -> u32 {
        self.scalar.bits() * self.lanes as u32
    }

    /// Size of all lanes together in memory, in bytes.
    pub const fn bytes(self) -> u32 {
        self.scalar.bytes() * self.lanes as u32
    }

    /// The binary code: the scalar in the low four bits, log2 of the lanes above.
    pub const fn code(self) -> u8 {
        self.scalar.code() | ((self.lanes.trailing_zeros() as u8) << 4)
    }

    /// The type with this binary code.
    pub fn from_code(code: u8) -> Option<Type> {
        let lanes = *Type::LANES.get(usize::from(code >> 4))?;
        Type::vector(Scalar::from_code(code & 15)?, lanes)
    }
}

impl From<Scalar> for Type {
    fn from(scalar: Scalar) -> Type {
        Type::scalar_of(scalar)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lanes {
            1 => write!(f, "{}", self.scalar),
            n => write!(f, "vec{n}<{}>", self.scalar),
        }
    }
}

/// A set of scalars: what an op accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(u16);

impl Class {
    /// `bool`.
    pub const BOOL: Class = Class::of(&[Scalar::Bool]);
    /// `i8` to `i64`.
    pub const INT: Class = Class::of(&[Scalar::I8, Scalar::I16, Scalar::I32, Scalar::I64]);
    /// `i32` and `i64`: what atomics, indices and warp reductions work on.
    pub const WORD: Class = Class::of(&[Scalar::I32, Scalar::I64]);
    /// `f16`, `bf16`, `f32`, `f64`.
    pub const FLOAT: Class = Class::of(&[Scalar::F16, Scalar::Bf16, Scalar::F32, Scalar::F64]);
    /// `f32`, `f64`.
    pub const WIDE_FLOAT: Class = Class::of(&[Scalar::F32, Scalar::F64]);
    /// The two FP8 formats.
    pub const F8: Class = Class::of(&[Scalar::F8E4M3, Scalar::F8E5M2]);
    /// Integers and floats.
    pub const ARITH: Class = Class::INT.or(Class::FLOAT);
    /// Integers and `bool`.
    pub const BITS: Class = Class::INT.or(Class::BOOL);
    /// Floats and FP8.
    pub const ANY_FLOAT: Class = Class::FLOAT.or(Class::F8);
    /// What memory holds: integers, floats, FP8.
    pub const DATA: Class = Class::ARITH.or(Class::F8);
    /// What registers hold: all but `tf32`.
    pub const REGISTER: Class = Class::DATA.or(Class::BOOL);
    /// `i32`, `i64`, `f32`, `f64`.
    pub const WORD_ARITH: Class = Class::WORD.or(Class::WIDE_FLOAT);

    const NAMES: [(Class, &'static str); 12] = [
        (Class::BOOL, "bool"),
        (Class::INT, "an integer"),
        (Class::WORD, "i32 or i64"),
        (Class::FLOAT, "f16, bf16, f32 or f64"),
        (Class::WIDE_FLOAT, "f32 or f64"),
        (Class::F8, "an fp8 type"),
        (Class::ARITH, "an integer or a float"),
        (Class::BITS, "an integer or bool"),
        (Class::ANY_FLOAT, "a float or an fp8 type"),
        (Class::DATA, "an integer, a float or an fp8 type"),
        (Class::REGISTER, "any type but tf32"),
        (Class::WORD_ARITH, "i32, i64, f32 or f64"),
    ];

    const fn of(scalars: &[Scalar]) -> Class {
        let mut bits = 0;
        let mut i = 0;
        while i < scalars.len() {
            bits |= 1 << scalars[i] as u16;
            i += 1;
        }
        Class(bits)
    }

    const fn or(self, other: Class) -> Class {
        Class(self.0 | other.0)
    }

    /// Does the class hold this scalar?
    pub const fn contains(self, scalar: Scalar) -> bool {
        self.0 & (1 << scalar as u16) != 0
    }

    /// The scalars in the class.
    pub fn scalars(self) -> impl Iterator<Item = Scalar> {
        Scalar::ALL.iter().copied().filter(move |s| self.contains(*s))
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Class::NAMES.iter().find(|(class, _)| class == self) {
            Some((_, name)) => f.write_str(name),
            None => {
                let names: Vec<_> = self.scalars().map(Scalar::name).collect();
                f.write_str(&names.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for &scalar in Scalar::ALL {
            assert_eq!(Scalar::from_name(scalar.name()), Some(scalar));
            for lanes in Type::LANES {
                let ty = Type::vector(scalar, lanes).unwrap();
                assert_eq!(Type::from_code(ty.code()), Some(ty));
            }
        }
        assert_eq!(Type::from_code(0x5c), None);
        assert_eq!(Type::vector(Scalar::F32, 3), None);
    }
}
