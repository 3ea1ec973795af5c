//! `sin` and `cos` of f64.
//!
//! Up to a million quarter turns π/2 in three parts is taken off; above, the mantissa is multiplied by those digits of
//! 2/π that matter (Payne and Hanek).

use super::lanes::own;
use super::writer::Writer;
use crate::target::poly::{COS, SIN, TWO_OVER_PI};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{InstBuilder, StackSlotData, StackSlotKind, Value as Ssa, types};

/// π/2 in three parts.
const HALF_PI: [u64; 3] = [0x3ff9_21fb_5444_2d18, 0x3c91_a626_3314_5c07, 0xb91f_1976_b7ed_8fbc];
/// Above this, digits are used.
const LARGE: f64 = 1_500_000.0;

impl Writer<'_, '_> {
    /// The sine, or with a quarter more the cosine.
    pub(super) fn sine(&mut self, a: Ssa, quarter: i64) -> Ssa {
        let size = self.b.ins().fabs(a);
        let bound = self.float(types::F64, LARGE);
        let (near, far, join) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        for ty in [types::F64, types::F64, types::I64] {
            self.b.append_block_param(join, ty);
        }
        let large = self.b.ins().fcmp(FloatCC::GreaterThan, size, bound);
        self.b.ins().brif(large, far, &[], near, &[]);
        self.b.seal_block(near);
        self.b.seal_block(far);
        self.b.switch_to_block(near);
        let scale = self.float(types::F64, std::f64::consts::FRAC_2_PI);
        let turns = self.b.ins().fmul(a, scale);
        let (n, q) = self.whole(turns);
        let [first, second, third] = HALF_PI.map(|bits| self.f64_bits(a, bits));
        let minus = self.b.ins().fneg(n);
        let w = self.b.ins().fma(minus, first, a);
        let (p, p_rest) = self.product(n, second);
        let r = self.b.ins().fsub(w, p);
        let lost = self.b.ins().fsub(w, r);
        let lost = self.b.ins().fsub(lost, p);
        let lost = self.b.ins().fsub(lost, p_rest);
        let rest = self.b.ins().fma(minus, third, lost);
        self.b.ins().jump(join, &[r.into(), rest.into(), q.into()]);
        self.b.set_cold_block(far);
        self.b.switch_to_block(far);
        let (r, rest, q) = self.far_angle(a, size);
        self.b.ins().jump(join, &[r.into(), rest.into(), q.into()]);
        self.b.seal_block(join);
        self.b.switch_to_block(join);
        let [r, rest, q] = self.b.block_params(join)[..] else { return a };

        let z = self.b.ins().fmul(r, r);
        let half = self.float(types::F64, 0.5);
        let one = self.float(types::F64, 1.0);
        let half_z = self.b.ins().fmul(z, half);
        // sin (r + rest) = r + r³ S + rest (1 − z/2)
        let s = self.polynomial(&SIN, z);
        let cube = self.b.ins().fmul(z, r);
        let near_one = self.b.ins().fsub(one, half_z);
        let small = self.b.ins().fmul(rest, near_one);
        let tail = self.b.ins().fma(cube, s, small);
        let sin = self.b.ins().fadd(r, tail);
        // cos (r + rest) = 1 − z/2 + (z² C − r rest), with what the first difference loses
        let c = self.polynomial(&COS, z);
        let square = self.b.ins().fmul(z, z);
        let lost = self.b.ins().fsub(one, near_one);
        let lost = self.b.ins().fsub(lost, half_z);
        let minus = self.b.ins().fneg(r);
        let lost = self.b.ins().fma(minus, rest, lost);
        let tail = self.b.ins().fma(square, c, lost);
        let cos = self.b.ins().fadd(near_one, tail);

        let q = if quarter == 0 { q } else { self.b.ins().iadd_imm(q, quarter) };
        let odd = self.b.ins().band_imm(q, 1);
        let value = self.b.ins().select(odd, cos, sin);
        let turn = self.b.ins().band_imm(q, 2);
        let minus = self.b.ins().fneg(value);
        let value = self.b.ins().select(turn, minus, value);
        let infinity = self.float(types::F64, f64::INFINITY);
        let nan = self.float(types::F64, f64::NAN);
        let finite = self.b.ins().fcmp(FloatCC::LessThan, size, infinity);
        let value = self.b.ins().select(finite, value, nan);
        if quarter == 0 {
            // A zero's sign would be lost.
            let zero = self.float(types::F64, 0.0);
            let is_zero = self.b.ins().fcmp(FloatCC::Equal, a, zero);
            self.b.ins().select(is_zero, a, value)
        } else {
            value
        }
    }

    /// The angle within its quarter turn, in two parts, and which quarter it is.
    fn far_angle(&mut self, a: Ssa, size: Ssa) -> (Ssa, Ssa, Ssa) {
        let bytes = TWO_OVER_PI.len() as u32 * 8;
        let slot = self.b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, bytes, 3));
        let table = self.b.ins().stack_addr(types::I64, slot, 0);
        for (i, word) in TWO_OVER_PI.iter().enumerate() {
            let word = self.b.ins().iconst(types::I64, *word as i64);
            self.b.ins().store(own(), word, table, i as i32 * 8);
        }
        let bits = self.cast(types::I64, size);
        let fraction = self.b.ins().band_imm(bits, (1 << 52) - 1);
        let mantissa = self.b.ins().bor_imm(fraction, 1 << 52);
        // An infinity or a NaN may go wrong, but not out of the table.
        let biased = self.b.ins().ushr_imm(bits, 52);
        let most = self.int(types::I64, 2046);
        let biased = self.b.ins().umin(biased, most);
        // Digits that are whole turns of the product are left out.
        let offset = self.b.ins().iadd_imm(biased, 62 - 1075);
        let index = self.b.ins().ushr_imm(offset, 6);
        let shift = self.b.ins().band_imm(offset, 63);
        let down = self.b.ins().bnot(shift);
        let at = self.b.ins().ishl_imm(index, 3);
        let at = self.b.ins().iadd(table, at);
        let digits = [0, 8, 16, 24].map(|i| self.b.ins().load(types::I64, own(), at, i));
        let words = [0, 1, 2].map(|i: usize| {
            let high = self.b.ins().ishl(digits[i], shift);
            let low = self.b.ins().ushr_imm(digits[i + 1], 1);
            let low = self.b.ins().ushr(low, down);
            self.b.ins().bor(high, low)
        });
        let low = self.b.ins().imul(mantissa, words[2]);
        let carry = self.b.ins().umulhi(mantissa, words[2]);
        let middle = self.b.ins().imul(mantissa, words[1]);
        let middle = self.b.ins().iadd(middle, carry);
        let over = self.b.ins().icmp(IntCC::UnsignedLessThan, middle, carry);
        let over = self.b.ins().uextend(types::I64, over);
        let carry = self.b.ins().umulhi(mantissa, words[1]);
        let high = self.b.ins().imul(mantissa, words[0]);
        let high = self.b.ins().iadd(high, carry);
        let high = self.b.ins().iadd(high, over);
        // Two bits of quarters, then the fraction, taken as from −½ to ½.
        let quarter = self.b.ins().ushr_imm(high, 62);
        let join = |w: &mut Self, upper: Ssa, lower: Ssa| {
            let upper = w.b.ins().ishl_imm(upper, 2);
            let lower = w.b.ins().ushr_imm(lower, 62);
            w.b.ins().bor(upper, lower)
        };
        let upper = join(self, high, middle);
        let lower = join(self, middle, low);
        let sign = self.b.ins().sshr_imm(upper, 63);
        let quarter = self.b.ins().isub(quarter, sign);
        // The magnitude; one in the last of 128 places is of no account.
        let upper = self.b.ins().bxor(upper, sign);
        let lower = self.b.ins().bxor(lower, sign);
        let zeros = self.b.ins().clz(upper);
        let few = self.int(types::I64, 63);
        let zeros = self.b.ins().umin(zeros, few);
        let up = self.b.ins().ishl(upper, zeros);
        let half = self.b.ins().ushr_imm(lower, 1);
        let down = self.b.ins().bnot(zeros);
        let down = self.b.ins().ushr(half, down);
        let digits = self.b.ins().bor(up, down);
        let rest_digits = self.b.ins().ishl(lower, zeros);
        let first = self.b.ins().ushr_imm(digits, 11);
        let second = self.b.ins().ishl_imm(digits, 42);
        let more = self.b.ins().ushr_imm(rest_digits, 22);
        let second = self.b.ins().bor(second, more);
        let second = self.b.ins().band_imm(second, (1 << 53) - 1);
        let first = self.b.ins().fcvt_from_sint(types::F64, first);
        let second = self.b.ins().fcvt_from_sint(types::F64, second);
        // 2^-(53 + zeros), with the sign.
        let exponent = self.int(types::I64, 1023 - 53);
        let exponent = self.b.ins().isub(exponent, zeros);
        let power = self.b.ins().ishl_imm(exponent, 52);
        let negative = self.b.ins().ishl_imm(sign, 63);
        let a_bits = self.cast(types::I64, a);
        let a_sign = self.b.ins().sshr_imm(a_bits, 63);
        let a_top = self.b.ins().ishl_imm(a_sign, 63);
        let power = self.b.ins().bor(power, negative);
        let power = self.b.ins().bxor(power, a_top);
        let power = self.cast(types::F64, power);
        let step = self.float(types::F64, 2f64.powi(-53));
        let first = self.b.ins().fmul(first, power);
        let second = self.b.ins().fmul(second, power);
        let second = self.b.ins().fmul(second, step);
        let [pi, pi_rest, _] = HALF_PI.map(|bits| self.f64_bits(a, bits));
        let (r, rest) = self.product(first, pi);
        let rest = self.b.ins().fma(first, pi_rest, rest);
        let rest = self.b.ins().fma(second, pi, rest);
        // A negative angle has the negative quarter.
        let minus = self.b.ins().ineg(quarter);
        let quarter = self.b.ins().select(a_sign, minus, quarter);
        (r, rest, quarter)
    }
}
