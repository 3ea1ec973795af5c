//! What a value is: elements, extents, and arrays whose contents are known.

use std::fmt;

use serde::{Deserialize, Serialize};
use vm_ir::Scalar;
use vm_ir::format::{from_f64, signed, to_f64};

use crate::limits::{MAX_RANK, capped};

/// What the elements of an array are.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Element {
    /// A truth value, a byte of 0 or 1 in memory.
    Bool,
    /// An unsigned integer of 8 bits.
    U8,
    /// A signed integer of 8 bits.
    I8,
    /// An unsigned integer of 16 bits.
    U16,
    /// A signed integer of 16 bits.
    I16,
    /// An unsigned integer of 32 bits.
    U32,
    /// A signed integer of 32 bits.
    I32,
    /// A signed integer of 64 bits.
    I64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// OCP FP8 E4M3.
    F8E4M3,
    /// OCP FP8 E5M2.
    F8E5M2,
}

impl Element {
    /// Every one.
    pub const ALL: &[Element] = <Element as strum::VariantArray>::VARIANTS;

    /// What the kernel IR calls it, which keeps signs with its operations.
    pub fn scalar(self) -> Scalar {
        match self {
            // A truth value has no memory of its own there.
            Self::Bool | Self::U8 | Self::I8 => Scalar::I8,
            Self::U16 | Self::I16 => Scalar::I16,
            Self::U32 | Self::I32 => Scalar::I32,
            Self::I64 => Scalar::I64,
            Self::F16 => Scalar::F16,
            Self::Bf16 => Scalar::Bf16,
            Self::F32 => Scalar::F32,
            Self::F64 => Scalar::F64,
            Self::F8E4M3 => Scalar::F8E4M3,
            Self::F8E5M2 => Scalar::F8E5M2,
        }
    }

    /// Bytes of one in memory.
    pub fn bytes(self) -> u64 {
        self.scalar().bytes().into()
    }

    /// Is there arithmetic of floats on it? FP8 is storage: it is converted.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Is it an integer?
    pub fn is_int(self) -> bool {
        self.range().is_some() && self != Self::Bool
    }

    /// Is it an integer that tells positions?
    pub fn is_index(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// The least and the greatest integer, or truth value.
    pub fn range(self) -> Option<(i64, i64)> {
        Some(match self {
            Self::Bool => (0, 1),
            Self::U8 => (0, u8::MAX.into()),
            Self::I8 => (i8::MIN.into(), i8::MAX.into()),
            Self::U16 => (0, u16::MAX.into()),
            Self::I16 => (i16::MIN.into(), i16::MAX.into()),
            Self::U32 => (0, u32::MAX.into()),
            Self::I32 => (i32::MIN.into(), i32::MAX.into()),
            Self::I64 => (i64::MIN, i64::MAX),
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2 => return None,
        })
    }

    /// The value of such bits.
    pub fn to_f64(self, bits: u64) -> f64 {
        match self {
            Self::Bool | Self::U8 | Self::U16 | Self::U32 => bits as f64,
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => signed(self.scalar(), bits) as f64,
            _ => to_f64(self.scalar(), bits),
        }
    }

    /// The bits of the nearest value; integers are cut off towards 0 and end at the least and the greatest.
    pub fn from_f64(self, value: f64) -> u64 {
        match self.range() {
            Some((least, greatest)) => (value as i64).clamp(least, greatest) as u64 & self.scalar().mask(),
            None => from_f64(self.scalar(), value),
        }
    }

    /// The nearest value that it has.
    pub fn round(self, value: f64) -> f64 {
        self.to_f64(self.from_f64(value))
    }
}

/// The type of a value: what its elements are, and how many along each dimension, the slowest first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// What its elements are.
    pub element: Element,
    /// How many there are along each dimension; none of a single number.
    #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
    pub extents: Vec<u64>,
}

impl TensorType {
    /// Such a type.
    pub fn new(element: Element, extents: &[u64]) -> TensorType {
        TensorType { element, extents: extents.to_vec() }
    }

    /// Its dimensions.
    pub fn rank(&self) -> usize {
        self.extents.len()
    }

    /// All of its elements; `u64::MAX` if there are more.
    pub fn elements(&self) -> u64 {
        self.extents.iter().fold(1, |product, extent| product.saturating_mul(*extent))
    }

    /// Its bytes in memory; `u64::MAX` if there are more.
    pub fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.element.bytes())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.element, self.extents)
    }
}

/// An array whose contents are known.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Its type.
    pub ty: TensorType,
    /// Its elements, one behind the other, little-endian.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// The elements that are nearest to `values`, of which there are as many as the extents say.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub fn from_f64s(element: Element, extents: &[u64], values: &[f64]) -> Tensor {
        let ty = TensorType::new(element, extents);
        assert_eq!(ty.elements(), values.len() as u64, "elements of {ty}");
        let size = element.bytes() as usize;
        let bytes = values.iter().flat_map(|value| {
            let bits = element.from_f64(*value).to_le_bytes();
            bits.into_iter().take(size)
        });
        Tensor { bytes: bytes.collect(), ty }
    }

    /// One number.
    pub fn number(element: Element, value: f64) -> Tensor {
        Tensor::from_f64s(element, &[], &[value])
    }

    /// The values of its elements.
    pub fn to_f64s(&self) -> Vec<f64> {
        let size = self.ty.element.bytes() as usize;
        let values = self.bytes.chunks_exact(size).map(|bytes| {
            let mut bits = [0; 8];
            bits[..size].copy_from_slice(bytes);
            self.ty.element.to_f64(u64::from_le_bytes(bits))
        });
        values.collect()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let shown = &self.bytes[..self.bytes.len().min(SHOWN)];
        f.debug_struct("Tensor").field("ty", &self.ty).field("bytes", &format_args!("{shown:?}…")).finish()
    }
}
