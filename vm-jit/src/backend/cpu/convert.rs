//! Conversions.

use super::lanes::{Repr, clif, vector};
use super::wide::conversion;
use super::writer::Writer;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::op::Opcode;

impl Writer<'_, '_> {
    /// One element's conversion.
    pub(super) fn convert(&mut self, code: Opcode, from: Scalar, to: Scalar, a: Ssa) -> Ssa {
        if let (Opcode::FpConv, Some(function)) = (code, conversion(from, to)) {
            return self.wide_conversion_of_one(function, a);
        }
        match code {
            Opcode::Sext => self.b.ins().sextend(clif(to), a),
            Opcode::Zext => match clif(to) == clif(from) {
                true => a,
                false => self.b.ins().uextend(clif(to), a),
            },
            Opcode::Trunc => self.b.ins().ireduce(clif(to), a),
            Opcode::FpConv if to == Scalar::F64 => self.b.ins().fpromote(types::F64, a),
            Opcode::FpConv => self.b.ins().fdemote(types::F32, a),
            Opcode::SiToFp | Opcode::UiToFp => self.float_of(code == Opcode::SiToFp, from, to, a),
            _ => self.integer_of(code == Opcode::FpToSi, to, a),
        }
    }

    fn float_of(&mut self, signed: bool, from: Scalar, to: Scalar, a: Ssa) -> Ssa {
        let wide = match (from, signed) {
            (Scalar::I32 | Scalar::I64, _) => a,
            (_, true) => self.b.ins().sextend(types::I32, a),
            (_, false) => self.b.ins().uextend(types::I32, a),
        };
        match signed {
            true => self.b.ins().fcvt_from_sint(clif(to), wide),
            false => self.b.ins().fcvt_from_uint(clif(to), wide),
        }
    }

    /// Towards zero; out of range the nearest, and 0 for NaN.
    fn integer_of(&mut self, signed: bool, to: Scalar, a: Ssa) -> Ssa {
        let ty = if to == Scalar::I64 { types::I64 } else { types::I32 };
        if signed {
            let value = self.b.ins().fcvt_to_sint_sat(ty, a);
            if ty == clif(to) {
                return value;
            }
            let greatest = (to.mask() >> 1) as i64;
            let (low, high) = (self.int(ty, -greatest - 1), self.int(ty, greatest));
            let value = self.b.ins().smax(value, low);
            let value = self.b.ins().smin(value, high);
            return self.b.ins().ireduce(clif(to), value);
        }
        let value = self.b.ins().fcvt_to_uint_sat(ty, a);
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
        if let (Opcode::FpConv, Some(function)) = (code, conversion(from, to)) {
            let all = match (from, arg) {
                (Scalar::F32, _) if Self::in_halves(to, elements) => self.chunks_of(arg, from, elements),
                (Scalar::F16, Repr::Chunks(halves)) => halves.clone(),
                _ => return None,
            };
            return Some(self.wide_conversion(function, &all));
        }
        match (code, arg) {
            (Opcode::Zext | Opcode::Sext, Repr::Chunks(chunks))
                if from == Scalar::I16 && to == Scalar::I32 =>
            {
                let widened = chunks.iter().flat_map(|chunk| match code {
                    Opcode::Zext => [self.b.ins().uwiden_low(*chunk), self.b.ins().uwiden_high(*chunk)],
                    _ => [self.b.ins().swiden_low(*chunk), self.b.ins().swiden_high(*chunk)],
                });
                return Some(widened.collect());
            }
            (Opcode::Trunc, Repr::Chunks(chunks))
                if from == Scalar::I32 && to == Scalar::I16 && Self::in_halves(to, elements) =>
            {
                let rest = self.int(types::I32X4, 0xffff);
                let pairs = chunks.chunks(2).map(|pair| {
                    let [low, high] = [pair[0], pair[1]].map(|chunk| self.b.ins().band(chunk, rest));
                    self.b.ins().unarrow(low, high)
                });
                return Some(pairs.collect());
            }
            _ => {}
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
            (Opcode::FpConv, Scalar::F32, Scalar::F64) => {
                halves(&|w, c| w.b.ins().fvpromote_low(c), &|w, c| {
                    let upper = w.upper_half(c);
                    w.b.ins().fvpromote_low(upper)
                })
            }
            (Opcode::FpConv, Scalar::F64, Scalar::F32) => {
                let all = chunks(self);
                let narrow: Vec<Ssa> = all.into_iter().map(|c| self.b.ins().fvdemote(c)).collect();
                narrow.chunks(2).map(|pair| self.joined_halves(pair[0], pair[1])).collect()
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

    /// The upper two of four floats, where the lower ones were.
    fn upper_half(&mut self, x: Ssa) -> Ssa {
        let bytes = self.cast(types::I8X16, x);
        let picks: Vec<u8> = (8..16).chain(8..16).collect();
        let mask = self.b.func.dfg.immediates.push(picks.into());
        let moved = self.b.ins().shuffle(bytes, bytes, mask);
        self.cast(types::F32X4, moved)
    }

    /// The lower two floats of one vector, and behind them those of another.
    fn joined_halves(&mut self, low: Ssa, high: Ssa) -> Ssa {
        let [low, high] = [low, high].map(|x| self.cast(types::I8X16, x));
        let picks: Vec<u8> = (0..8).chain(16..24).collect();
        let mask = self.b.func.dfg.immediates.push(picks.into());
        let joined = self.b.ins().shuffle(low, high, mask);
        self.cast(types::F32X4, joined)
    }
}
