//! Conversions.
//!
//! What PTX has no single instruction for goes through f32. Where the way there rounds, it rounds to odd: the
//! last bit says that something was lost, so that rounding once more to half as many bits or fewer gives what
//! rounding once would have given.

use super::asm::{Arg, Class, Reg, def, ins};
use super::legal::Way;
use super::writer::{Writer, class_of};
use vm_ir::Scalar;
use vm_ir::op::Opcode;

/// A small float's format, as f32 sees it.
struct Small {
    mantissa: i64,
    bias: i64,
    /// Bits of the largest finite number.
    largest: i64,
    nan: i64,
}

const fn small(scalar: Scalar) -> Small {
    match scalar {
        Scalar::F8E4M3 => Small { mantissa: 3, bias: 7, largest: 0x7e, nan: 0x7f },
        _ => Small { mantissa: 2, bias: 15, largest: 0x7b, nan: 0x7f },
    }
}

fn is_fp8(scalar: Scalar) -> bool {
    matches!(scalar, Scalar::F8E4M3 | Scalar::F8E5M2)
}

fn suffix(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::F16 => "f16",
        Scalar::F64 => "f64",
        _ => "f32",
    }
}

impl Writer<'_> {
    pub(super) fn convert(&mut self, code: Opcode, from: Scalar, to: Scalar, a: Reg) -> Reg {
        match code {
            Opcode::Sext => {
                if to == Scalar::I64 {
                    let name = format!("cvt.s64.s{}", from.bits());
                    return def!(self, B64, &name, a);
                }
                let reg = self.signed(from, a);
                self.fill(to, reg)
            }
            Opcode::Zext => match (from, to) {
                (Scalar::Bool, Scalar::I64) => def!(self, B64, "selp.b64", 1, 0, a),
                (Scalar::Bool, _) => def!(self, B32, "selp.b32", 1, 0, a),
                (_, Scalar::I64) => def!(self, B64, "cvt.u64.u32", a),
                _ => a,
            },
            Opcode::Trunc => {
                let low = if from == Scalar::I64 { def!(self, B32, "cvt.u32.u64", a) } else { a };
                self.fill(to, low)
            }
            Opcode::SiToFp => self.int_to_float(from, to, a, true),
            Opcode::UiToFp => self.int_to_float(from, to, a, false),
            Opcode::FpToSi => self.float_to_int(from, to, a, true),
            Opcode::FpToUi => self.float_to_int(from, to, a, false),
            _ => self.float_to_float(from, to, a),
        }
    }

    /// Exactly, of f16, bf16, fp8 and f32.
    pub(super) fn widened(&mut self, from: Scalar, a: Reg) -> Reg {
        match from {
            Scalar::F16 => def!(self, B32, "cvt.f32.f16", a),
            Scalar::Bf16 => {
                let low = def!(self, B32, "cvt.u32.u16", a);
                def!(self, B32, "shl.b32", low, 16)
            }
            Scalar::F8E4M3 | Scalar::F8E5M2 => self.fp8_to_f32(from, a),
            _ => a,
        }
    }

    /// Rounded to nearest even.
    pub(super) fn narrowed(&mut self, to: Scalar, a: Reg) -> Reg {
        match to {
            Scalar::F16 => def!(self, B16, "cvt.rn.f16.f32", a),
            Scalar::Bf16 if self.has(80, 7, 0) => def!(self, B16, "cvt.rn.bf16.f32", a),
            Scalar::Bf16 => {
                let bit = def!(self, B32, "bfe.u32", a, 16, 1);
                let half = def!(self, B32, "add.s32", bit, 0x7fff);
                let rounded = def!(self, B32, "add.s32", a, half);
                let nan = def!(self, Pred, "setp.nan.f32", a, a);
                let quiet = def!(self, B32, "or.b32", a, 0x0040_0000);
                let chosen = def!(self, B32, "selp.b32", quiet, rounded, nan);
                let high = def!(self, B32, "shr.u32", chosen, 16);
                def!(self, B16, "cvt.u16.u32", high)
            }
            Scalar::F8E4M3 | Scalar::F8E5M2 => self.f32_to_fp8(to, a),
            _ => a,
        }
    }

    /// f64 to f32, rounded to odd.
    fn odd_f32(&mut self, a: Reg) -> Reg {
        let cut = def!(self, B32, "cvt.rz.f32.f64", a);
        let back = def!(self, B64, "cvt.f64.f32", cut);
        let lost = def!(self, Pred, "setp.neu.f64", back, a);
        let odd = def!(self, B32, "or.b32", cut, 1);
        def!(self, B32, "selp.b32", odd, cut, lost)
    }

    fn float_to_float(&mut self, from: Scalar, to: Scalar, a: Reg) -> Reg {
        match (from, to) {
            (Scalar::F64, _) if to == Scalar::Bf16 || is_fp8(to) => {
                let narrow = self.odd_f32(a);
                self.narrowed(to, narrow)
            }
            (Scalar::F64, _) => {
                let name = format!("cvt.rn.{}.f64", suffix(to));
                let reg = self.asm.new_reg(class_of(to));
                ins!(self, &name, reg, a);
                reg
            }
            (Scalar::F8E4M3 | Scalar::F8E5M2, Scalar::F16) => match self.fp8_to_f16(from, a) {
                Some(half) => half,
                None => {
                    let wide = self.fp8_to_f32(from, a);
                    self.narrowed(to, wide)
                }
            },
            (_, Scalar::F64) => {
                let wide = self.widened(from, a);
                def!(self, B64, "cvt.f64.f32", wide)
            }
            _ => {
                let wide = self.widened(from, a);
                self.narrowed(to, wide)
            }
        }
    }

    /// fp8 to f16 where there is a short way.
    fn fp8_to_f16(&mut self, from: Scalar, a: Reg) -> Option<Reg> {
        if from == Scalar::F8E5M2 {
            // It is the upper half of an f16.
            let bits = def!(self, B32, "shl.b32", a, 8);
            return Some(def!(self, B16, "cvt.u16.u32", bits));
        }
        if self.way(Opcode::FpConv, from, Scalar::F16) != Way::Native {
            return None;
        }
        let pair = def!(self, B16, "cvt.u16.u32", a);
        let both = def!(self, B32, "cvt.rn.f16x2.e4m3x2", pair);
        let (low, high) = (self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16));
        ins!(self, "mov.b32", Arg::List(&[low, high]), both);
        Some(low)
    }

    fn fp8_to_f32(&mut self, from: Scalar, a: Reg) -> Reg {
        if let Some(half) = self.fp8_to_f16(from, a) {
            return self.widened(Scalar::F16, half);
        }
        // The magnitude's bits, moved to where f32 has them, are the number times 2^-120, exactly.
        let magnitude = def!(self, B32, "and.b32", a, 0x7f);
        let moved = def!(self, B32, "shl.b32", magnitude, 20);
        let value = def!(self, B32, "mul.rn.f32", moved, Arg::F32((120 + 127) << 23));
        let nan = def!(self, Pred, "setp.eq.u32", magnitude, 0x7f);
        let value = def!(self, B32, "selp.b32", 0x7fc0_0000, value, nan);
        let sign = def!(self, B32, "and.b32", a, 0x80);
        let sign = def!(self, B32, "shl.b32", sign, 24);
        def!(self, B32, "or.b32", value, sign)
    }

    fn f32_to_fp8(&mut self, to: Scalar, a: Reg) -> Reg {
        if self.way(Opcode::FpConv, Scalar::F32, to) == Way::Native {
            let name = if to == Scalar::F8E4M3 {
                "cvt.rn.satfinite.e4m3x2.f32"
            } else {
                "cvt.rn.satfinite.e5m2x2.f32"
            };
            let pair = def!(self, B16, name, Arg::F32(0), a);
            return def!(self, B32, "cvt.u32.u16", pair);
        }
        let Small { mantissa, bias, largest, nan } = small(to);
        let cut = 23 - mantissa;
        let magnitude = def!(self, B32, "and.b32", a, 0x7fff_ffff);
        // A normal number: round the bits, cut them, move the exponent.
        let bit = def!(self, B32, "bfe.u32", magnitude, cut, 1);
        let half = def!(self, B32, "add.s32", bit, (1 << (cut - 1)) - 1);
        let rounded = def!(self, B32, "add.s32", magnitude, half);
        let shifted = def!(self, B32, "shr.u32", rounded, cut);
        let normal = def!(self, B32, "sub.s32", shifted, (127 - bias) << mantissa);
        // A subnormal one: add the number whose last place is the format's, and the sum's low bits count
        // the steps.
        let step = ((1 - bias - mantissa + 23 + 127) << 23) as u32;
        let sum = def!(self, B32, "add.rn.f32", magnitude, Arg::F32(step));
        let steps = def!(self, B32, "sub.s32", sum, i64::from(step));
        let is_small = def!(self, Pred, "setp.lt.u32", magnitude, (128 - bias) << 23);
        let value = def!(self, B32, "selp.b32", steps, normal, is_small);
        let value = def!(self, B32, "min.s32", value, largest);
        let is_nan = def!(self, Pred, "setp.gt.u32", magnitude, 0x7f80_0000);
        let value = def!(self, B32, "selp.b32", nan, value, is_nan);
        let sign = def!(self, B32, "shr.u32", a, 24);
        let sign = def!(self, B32, "and.b32", sign, 0x80);
        def!(self, B32, "or.b32", value, sign)
    }

    fn int_to_float(&mut self, from: Scalar, to: Scalar, a: Reg, signed: bool) -> Reg {
        let a = if signed { self.signed(from, a) } else { a };
        let letter = if signed { 's' } else { 'u' };
        let width = if from == Scalar::I64 { 64 } else { 32 };
        if to != Scalar::Bf16 {
            let name = format!("cvt.rn.{}.{letter}{width}", suffix(to));
            let reg = self.asm.new_reg(class_of(to));
            ins!(self, &name, reg, a);
            return reg;
        }
        let wide = match from {
            // Exact in f32.
            Scalar::I8 | Scalar::I16 => {
                let name = format!("cvt.rn.f32.{letter}32");
                def!(self, B32, &name, a)
            }
            Scalar::I32 => {
                let name = format!("cvt.rn.f64.{letter}32");
                let exact = def!(self, B64, &name, a);
                self.odd_f32(exact)
            }
            _ => {
                let cut = def!(self, B32, &format!("cvt.rz.f32.{letter}64"), a);
                let back = def!(self, B64, &format!("cvt.rzi.{letter}64.f32"), cut);
                let lost = def!(self, Pred, "setp.ne.s64", back, a);
                let odd = def!(self, B32, "or.b32", cut, 1);
                def!(self, B32, "selp.b32", odd, cut, lost)
            }
        };
        self.narrowed(to, wide)
    }

    /// Towards zero and saturating. PTX gives no zero for the NaN of an f64 and for 64-bit results.
    fn float_to_int(&mut self, from: Scalar, to: Scalar, a: Reg, signed: bool) -> Reg {
        let (from, a) = if from == Scalar::Bf16 { (Scalar::F32, self.widened(from, a)) } else { (from, a) };
        let letter = if signed { 's' } else { 'u' };
        let width = if to == Scalar::I64 { 64 } else { 32 };
        let reg = self.asm.new_reg(class_of(to));
        ins!(self, &format!("cvt.rzi.{letter}{width}.{}", suffix(from)), reg, a);
        let mut reg = reg;
        if width == 64 || from == Scalar::F64 {
            let nan = def!(self, Pred, &format!("setp.nan.{}", suffix(from)), a, a);
            let zero = self.number(to, 0);
            reg = self.select(nan, zero, reg, to);
        }
        if to.bits() < 32 {
            let greatest = (to.mask() >> 1) as i64;
            if signed {
                reg = def!(self, B32, "min.s32", reg, greatest);
                reg = def!(self, B32, "max.s32", reg, -greatest - 1);
                reg = self.fill(to, reg);
            } else {
                reg = def!(self, B32, "min.u32", reg, to.mask() as i64);
            }
        }
        reg
    }
}
