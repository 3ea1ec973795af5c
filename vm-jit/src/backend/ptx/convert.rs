//! Conversions.

use super::asm::{Arg, Class, Reg, def, ins};
use super::writer::{Writer, class_of};
use vm_ir::Scalar;
use vm_ir::op::Opcode;

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

    fn float_to_float(&mut self, from: Scalar, to: Scalar, a: Reg) -> Reg {
        match (from, to) {
            (Scalar::F8E5M2, Scalar::F16) => {
                // It is the upper half of an f16.
                let bits = def!(self, B32, "shl.b32", a, 8);
                def!(self, B16, "cvt.u16.u32", bits)
            }
            (Scalar::F8E4M3, Scalar::F16) => {
                let pair = def!(self, B16, "cvt.u16.u32", a);
                let both = def!(self, B32, "cvt.rn.f16x2.e4m3x2", pair);
                let (low, high) = (self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16));
                ins!(self, "mov.b32", Arg::List(&[low, high]), both);
                low
            }
            (Scalar::F32, Scalar::F8E4M3 | Scalar::F8E5M2) => {
                let format = if to == Scalar::F8E4M3 { "e4m3x2" } else { "e5m2x2" };
                let pair = def!(self, B16, &format!("cvt.rn.satfinite.{format}.f32"), Arg::F32(0), a);
                def!(self, B32, "cvt.u32.u16", pair)
            }
            _ => {
                let rounding = if to.bits() < from.bits() { ".rn" } else { "" };
                let to_name = if to == Scalar::Bf16 { "bf16" } else { suffix(to) };
                let reg = self.asm.new_reg(class_of(to));
                ins!(self, &format!("cvt{rounding}.{to_name}.{}", suffix(from)), reg, a);
                reg
            }
        }
    }

    fn int_to_float(&mut self, from: Scalar, to: Scalar, a: Reg, signed: bool) -> Reg {
        let a = if signed { self.signed(from, a) } else { a };
        let letter = if signed { 's' } else { 'u' };
        let width = if from == Scalar::I64 { 64 } else { 32 };
        let name = format!("cvt.rn.{}.{letter}{width}", suffix(to));
        let reg = self.asm.new_reg(class_of(to));
        ins!(self, &name, reg, a);
        reg
    }

    /// Towards zero and saturating. PTX gives no zero for the NaN of an f64 and for 64-bit results.
    fn float_to_int(&mut self, from: Scalar, to: Scalar, a: Reg, signed: bool) -> Reg {
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
