//! Conversions, and the small float formats.

use super::lanes::{Repr, clif, vector};
use super::value::is_half;
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{InstBuilder, Type, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::op::Opcode;

/// A float format below 32 bits.
#[derive(Clone, Copy)]
struct Small {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The bits that too large a number becomes.
    too_large: i64,
    /// The bits of the largest finite number.
    largest: i64,
    nan: i64,
    ty: Type,
}

fn small(scalar: Scalar) -> Option<Small> {
    let format = |exponent_bits, mantissa_bits, too_large, largest, nan, ty| Small {
        exponent_bits,
        mantissa_bits,
        too_large,
        largest,
        nan,
        ty,
    };
    Some(match scalar {
        Scalar::F16 => format(5, 10, 0x7c00, 0x7bff, 0x7e00, types::I16),
        Scalar::Bf16 => format(8, 7, 0x7f80, 0x7f7f, 0x7fc0, types::I16),
        Scalar::F8E4M3 => format(4, 3, 0x7e, 0x7e, 0x7f, types::I8),
        Scalar::F8E5M2 => format(5, 2, 0x7b, 0x7b, 0x7e, types::I8),
        _ => return None,
    })
}

impl Writer<'_, '_> {
    /// A float or fp8 number as f32, or as f64 if it is one.
    pub(super) fn widen(&mut self, scalar: Scalar, one: Ssa) -> Ssa {
        let Some(format) = small(scalar) else { return one };
        let bits = self.b.ins().uextend(types::I32, one);
        let width = format.ty.bits();
        let up = self.b.ins().ishl_imm(bits, i64::from(32 - width));
        let sign = self.b.ins().band_imm(up, i64::from(i32::MIN));
        if scalar == Scalar::Bf16 {
            return self.cast(types::F32, up);
        }
        let rest = self.b.ins().band_imm(bits, (1 << (width - 1)) - 1);
        let moved = self.b.ins().ishl_imm(rest, i64::from(23 - format.mantissa_bits));
        let tiny = self.cast(types::F32, moved);
        // The exponent's bias is another; a product also sets subnormals right.
        let bias = (1 << (format.exponent_bits - 1)) - 1;
        let factor = self.float(types::F32, 2f64.powi(127 - bias));
        let value = self.b.ins().fmul(tiny, factor);
        let value = self.cast(types::I32, value);
        let special = match scalar {
            Scalar::F8E4M3 => self.b.ins().icmp_imm(IntCC::Equal, rest, 0x7f),
            _ => {
                let infinity = ((1i64 << format.exponent_bits) - 1) << format.mantissa_bits;
                self.b.ins().icmp_imm(IntCC::UnsignedGreaterThanOrEqual, rest, infinity)
            }
        };
        let large = self.b.ins().bor_imm(moved, 0x7f80_0000);
        let value = self.b.ins().select(special, large, value);
        let value = self.b.ins().bor(value, sign);
        self.cast(types::F32, value)
    }

    /// An f32 or f64, rounded once to a float or fp8 type.
    pub(super) fn round_to(&mut self, to: Scalar, value: Ssa) -> Ssa {
        let wide = self.type_of(value);
        let Some(format) = small(to) else {
            return match (wide, clif(to)) {
                (types::F32, types::F64) => self.b.ins().fpromote(types::F64, value),
                (types::F64, types::F32) => self.b.ins().fdemote(types::F32, value),
                _ => value,
            };
        };
        if to == Scalar::Bf16 && wide == types::F32 {
            return self.bf16_of(value);
        }
        // Scaled so that the format's last place is 1, a number is rounded by the machine.
        let (int, bias, mantissa) =
            if wide == types::F32 { (types::I32, 127, 23) } else { (types::I64, 1023, 52) };
        let bits = self.cast(int, value);
        let size = self.b.ins().fabs(value);
        let format_bias = (1i64 << (format.exponent_bits - 1)) - 1;
        let least = 1 - format_bias;
        let cap = self.float(wide, 2f64.powi((format_bias + 2) as i32));
        let below = self.b.ins().fcmp(FloatCC::LessThan, size, cap);
        let size = self.b.ins().select(below, size, cap);
        let size_bits = self.cast(int, size);
        let exponent = self.b.ins().ushr_imm(size_bits, mantissa);
        let lowest = self.int(int, least + bias);
        let exponent = self.b.ins().umax(exponent, lowest);
        let top = self.int(int, 2 * bias + i64::from(format.mantissa_bits));
        let scale = self.b.ins().isub(top, exponent);
        let scale = self.b.ins().ishl_imm(scale, mantissa);
        let scale = self.cast(wide, scale);
        let scaled = self.b.ins().fmul(size, scale);
        let rounded = self.b.ins().nearest(scaled);
        let steps = self.b.ins().fcvt_to_sint_sat(int, rounded);
        let above = self.b.ins().isub(exponent, lowest);
        let above = self.b.ins().ishl_imm(above, i64::from(format.mantissa_bits));
        // A subnormal's steps are its bits; above, the leading one adds one to the exponent by itself.
        let result = self.b.ins().iadd(above, steps);
        let over = self.b.ins().icmp_imm(IntCC::SignedGreaterThan, result, format.largest);
        let too_large = self.int(int, format.too_large);
        let result = self.b.ins().select(over, too_large, result);
        let sign = self.b.ins().ushr_imm(bits, i64::from(int.bits() - 1));
        let sign = self.b.ins().ishl_imm(sign, i64::from(format.ty.bits() - 1));
        let result = self.b.ins().bor(result, sign);
        let is_nan = self.b.ins().fcmp(FloatCC::Unordered, value, value);
        let nan = self.int(int, format.nan);
        let result = self.b.ins().select(is_nan, nan, result);
        self.b.ins().ireduce(format.ty, result)
    }

    /// The upper half, rounded to nearest even.
    fn bf16_of(&mut self, value: Ssa) -> Ssa {
        let bits = self.cast(types::I32, value);
        let upper = self.b.ins().ushr_imm(bits, 16);
        let odd = self.b.ins().band_imm(upper, 1);
        let half = self.b.ins().iadd_imm(odd, 0x7fff);
        let sum = self.b.ins().iadd(bits, half);
        let rounded = self.b.ins().ushr_imm(sum, 16);
        let is_nan = self.b.ins().fcmp(FloatCC::Unordered, value, value);
        let nan = self.int(types::I32, 0x7fc0);
        let rounded = self.b.ins().select(is_nan, nan, rounded);
        self.b.ins().ireduce(types::I16, rounded)
    }

    pub(super) fn as_f64(&mut self, scalar: Scalar, one: Ssa) -> Ssa {
        let wide = self.widen(scalar, one);
        if self.type_of(wide) == types::F64 { wide } else { self.b.ins().fpromote(types::F64, wide) }
    }

    /// a · b + c of halves, rounded once: the product is exact in f64, the sum goes to the odd neighbour on the side of
    /// the exact one, which the last rounding then treats as it would treat that.
    pub(super) fn fma_of_halves(&mut self, scalar: Scalar, args: &[Ssa]) -> Ssa {
        let [a, b, c] = [0, 1, 2].map(|i| self.as_f64(scalar, args[i]));
        let product = self.b.ins().fmul(a, b);
        let sum = self.b.ins().fadd(product, c);
        let back = self.b.ins().fsub(sum, product);
        let kept = self.b.ins().fsub(sum, back);
        let lost = self.b.ins().fsub(product, kept);
        let lost_too = self.b.ins().fsub(c, back);
        let error = self.b.ins().fadd(lost, lost_too);
        let zero = self.float(types::F64, 0.0);
        let exact = self.b.ins().fcmp(FloatCC::Equal, error, zero);
        let unknown = self.b.ins().fcmp(FloatCC::Unordered, error, error);
        let bits = self.cast(types::I64, sum);
        let odd = self.b.ins().band_imm(bits, 1);
        let keep = self.b.ins().bor(exact, unknown);
        let keep = self.b.ins().uextend(types::I64, keep);
        let keep = self.b.ins().bor(keep, odd);
        // Away from zero if the error has the sum's sign.
        let error_bits = self.cast(types::I64, error);
        let differ = self.b.ins().bxor(bits, error_bits);
        let towards = self.b.ins().sshr_imm(differ, 63);
        let by = self.b.ins().bor_imm(towards, 1);
        let none = self.int(types::I64, 0);
        let by = self.b.ins().select(keep, none, by);
        let bits = self.b.ins().iadd(bits, by);
        let sum = self.cast(types::F64, bits);
        self.round_to(scalar, sum)
    }

    /// One element's conversion.
    pub(super) fn convert(&mut self, code: Opcode, from: Scalar, to: Scalar, a: Ssa) -> Ssa {
        match code {
            Opcode::Sext => self.b.ins().sextend(clif(to), a),
            Opcode::Zext => match clif(to) == clif(from) {
                true => a,
                false => self.b.ins().uextend(clif(to), a),
            },
            Opcode::Trunc => self.b.ins().ireduce(clif(to), a),
            Opcode::FpConv => {
                let wide = self.widen(from, a);
                self.round_to(to, wide)
            }
            Opcode::SiToFp | Opcode::UiToFp => self.float_of(code == Opcode::SiToFp, from, to, a),
            _ => self.integer_of(code == Opcode::FpToSi, from, to, a),
        }
    }

    fn float_of(&mut self, signed: bool, from: Scalar, to: Scalar, a: Ssa) -> Ssa {
        let exact = if is_half(to) { types::F64 } else { clif(to) };
        if from != Scalar::I64 || !is_half(to) {
            let wide = match (from, signed) {
                (Scalar::I32 | Scalar::I64, _) => a,
                (_, true) => self.b.ins().sextend(types::I32, a),
                (_, false) => self.b.ins().uextend(types::I32, a),
            };
            let value = match signed {
                true => self.b.ins().fcvt_from_sint(exact, wide),
                false => self.b.ins().fcvt_from_uint(exact, wide),
            };
            return self.round_to(to, value);
        }
        // The upper 52 bits, the last of them set if anything is below: exact in f64, and rounded as the whole would be.
        let zero = self.int(types::I64, 0);
        let (size, negative) = match signed {
            true => {
                let negative = self.b.ins().icmp_imm(IntCC::SignedLessThan, a, 0);
                let minus = self.b.ins().ineg(a);
                (self.b.ins().select(negative, minus, a), Some(negative))
            }
            false => (a, None),
        };
        let upper = self.b.ins().ushr_imm(size, 12);
        let lower = self.b.ins().band_imm(size, 0xfff);
        let some = self.b.ins().icmp(IntCC::NotEqual, lower, zero);
        let sticky = self.b.ins().uextend(types::I64, some);
        let joined = self.b.ins().bor(upper, sticky);
        let large = self.b.ins().fcvt_from_sint(types::F64, joined);
        let scale = self.float(types::F64, 4096.0);
        let large = self.b.ins().fmul(large, scale);
        let low_part = self.b.ins().fcvt_from_sint(types::F64, size);
        // Up to 53 bits are exact as they are.
        let is_small = self.b.ins().icmp_imm(IntCC::UnsignedLessThan, size, 1 << 53);
        let value = self.b.ins().select(is_small, low_part, large);
        let value = match negative {
            Some(negative) => {
                let minus = self.b.ins().fneg(value);
                self.b.ins().select(negative, minus, value)
            }
            None => value,
        };
        self.round_to(to, value)
    }

    /// Towards zero; out of range the nearest, and 0 for NaN.
    fn integer_of(&mut self, signed: bool, from: Scalar, to: Scalar, a: Ssa) -> Ssa {
        let wide = self.widen(from, a);
        let ty = if to == Scalar::I64 { types::I64 } else { types::I32 };
        if signed {
            let value = self.b.ins().fcvt_to_sint_sat(ty, wide);
            if ty == clif(to) {
                return value;
            }
            let greatest = (to.mask() >> 1) as i64;
            let (low, high) = (self.int(ty, -greatest - 1), self.int(ty, greatest));
            let value = self.b.ins().smax(value, low);
            let value = self.b.ins().smin(value, high);
            return self.b.ins().ireduce(clif(to), value);
        }
        let value = self.b.ins().fcvt_to_uint_sat(ty, wide);
        if ty == clif(to) {
            return value;
        }
        let high = self.int(ty, to.mask() as i64);
        let value = self.b.ins().umin(value, high);
        self.b.ins().ireduce(clif(to), value)
    }

    /// Conversions that the machine has on vectors.
    pub(super) fn convert_chunks(
        &mut self,
        code: Opcode,
        from: Scalar,
        to: Scalar,
        arg: &Repr,
        elements: usize,
    ) -> Option<Vec<Ssa>> {
        if from == Scalar::Bool {
            vector(to).filter(|_| Self::in_vectors(to, elements))?;
            let masks = self.masks_of(arg, to.bytes(), elements);
            return Some(masks.into_iter().map(|mask| self.b.ins().ineg(mask)).collect());
        }
        if !Self::in_vectors(from, elements) || !Self::in_vectors(to, elements) {
            return None;
        }
        let chunks = |this: &mut Self| this.chunks_of(arg, from, elements);
        let mut halves = |low: &dyn Fn(&mut Self, Ssa) -> Ssa, high: &dyn Fn(&mut Self, Ssa) -> Ssa| {
            let mut all = Vec::new();
            for chunk in self.chunks_of(arg, from, elements) {
                all.push(low(self, chunk));
                all.push(high(self, chunk));
            }
            all
        };
        Some(match (code, from, to) {
            (Opcode::Sext, Scalar::I32, Scalar::I64) => {
                halves(&|w, c| w.b.ins().swiden_low(c), &|w, c| w.b.ins().swiden_high(c))
            }
            (Opcode::Zext, Scalar::I32, Scalar::I64) => {
                halves(&|w, c| w.b.ins().uwiden_low(c), &|w, c| w.b.ins().uwiden_high(c))
            }
            (Opcode::Trunc, Scalar::I64, Scalar::I32) => {
                let all = chunks(self);
                all.chunks(2).map(|pair| self.low_halves(pair[0], pair[1])).collect()
            }
            (Opcode::SiToFp, Scalar::I32, Scalar::F32) => {
                let all = chunks(self);
                all.into_iter().map(|c| self.b.ins().fcvt_from_sint(types::F32X4, c)).collect()
            }
            (Opcode::FpToSi, Scalar::F32, Scalar::I32) => {
                let all = chunks(self);
                all.into_iter().map(|c| self.b.ins().fcvt_to_sint_sat(types::I32X4, c)).collect()
            }
            _ => return None,
        })
    }
}
