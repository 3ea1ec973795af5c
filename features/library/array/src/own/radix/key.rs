//! Elements as integers in their order.

use vm_ir::builder::Val;
use vm_ir::{Scalar, Type};

use crate::dtype::{DType, Kind};

/// Values of a digit.
pub(super) const DIGITS: u32 = 256;

/// The type of the elements, of which kernels see the bits.
#[derive(Clone, Copy)]
pub(super) struct Key(pub(super) DType);

impl Key {
    /// What the bits are in memory.
    pub(super) fn stored(self) -> Scalar {
        match self.0.bytes() {
            1 => Scalar::I8,
            2 => Scalar::I16,
            4 => Scalar::I32,
            _ => Scalar::I64,
        }
    }

    /// What they are in registers, with zeros before them.
    pub(super) fn register(self) -> Scalar {
        if self.0.bytes() == 8 { Scalar::I64 } else { Scalar::I32 }
    }

    /// A digit of an element as an unsigned number: those of lesser elements are less, both zeros have the same, and NaN has the greatest. `flip` has all bits
    /// where elements descend.
    pub(super) fn digit<'b>(self, bits: Val<'b>, shift: Val<'b>, flip: Val<'b>) -> Val<'b> {
        let ordered = self.ordered(bits);
        let shifted = ordered.shr_u(shift.to(self.register())).to(Scalar::I32);
        (shifted ^ flip) & (DIGITS as i32 - 1)
    }

    fn ordered(self, bits: Val<'_>) -> Val<'_> {
        let number = |number: u64| bits.builder().bits(Type::scalar_of(self.register()), number);
        let width = self.0.bytes() * 8;
        let top = 1u64 << (width - 1);
        match self.0.kind() {
            Kind::Signed => bits ^ number(top),
            Kind::Float => {
                let infinity = match self.0 {
                    DType::Float16 => 0x7c00,
                    DType::BFloat16 => 0x7f80,
                    DType::Float32 => 0x7f80_0000,
                    _ => 0x7ff0_0000_0000_0000,
                };
                let magnitude = bits & number(top - 1);
                // All bits of a negative one, the top one of others.
                let negative = match width {
                    8 | 16 => number(0) - bits.shr_u(number(width - 1)),
                    _ => bits >> number(width - 1),
                };
                let ordered = bits ^ (negative | number(top));
                let ordered = magnitude.eq(0).select(number(top), ordered);
                magnitude.gt(number(infinity)).select(number(u64::MAX), ordered)
            }
            _ => bits,
        }
    }
}
