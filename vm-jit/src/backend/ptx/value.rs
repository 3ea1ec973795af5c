//! Arithmetic, bits, comparison and choice of one lane.

use super::asm::{Arg, Class, Reg, def, ins};
use super::writer::{Writer, class_of};
use crate::range::Fact;
use vm_ir::module::Op;
use vm_ir::op::{Accuracy, Opcode, Shape};
use vm_ir::{Scalar, Value};

impl<'k> Writer<'k> {
    /// The op on one lane. `from` is what it works on, `to` what it gives.
    pub(super) fn value_op(&mut self, op: &Op, from: Scalar, to: Scalar, args: [Reg; 3]) -> Reg {
        if let Shape::Convert(..) = op.code.shape() {
            return self.convert(op.code, from, to, args[0]);
        }
        if op.code == Opcode::Select {
            return self.select(args[0], args[1], args[2], to);
        }
        match from {
            Scalar::Bool => self.bool_op(op.code, args),
            _ if from.is_int() => self.int_op(op, from, args),
            _ => self.float_op(op, from, args),
        }
    }

    /// `condition ? a : b`.
    pub(super) fn select(&mut self, condition: Reg, a: Reg, b: Reg, scalar: Scalar) -> Reg {
        match class_of(scalar) {
            Class::Pred => {
                let first = def!(self, Pred, "and.pred", condition, a);
                let not = def!(self, Pred, "not.pred", condition);
                let second = def!(self, Pred, "and.pred", not, b);
                def!(self, Pred, "or.pred", first, second)
            }
            Class::B16 => def!(self, B16, "selp.b16", a, b, condition),
            Class::B32 => def!(self, B32, "selp.b32", a, b, condition),
            Class::B64 => def!(self, B64, "selp.b64", a, b, condition),
        }
    }

    fn bool_op(&mut self, code: Opcode, [a, b, _]: [Reg; 3]) -> Reg {
        match code {
            Opcode::And => def!(self, Pred, "and.pred", a, b),
            Opcode::Or => def!(self, Pred, "or.pred", a, b),
            Opcode::Xor => def!(self, Pred, "xor.pred", a, b),
            _ => def!(self, Pred, "not.pred", a),
        }
    }

    /// The low bits of a small integer, filled with zeros.
    pub(super) fn fill(&mut self, scalar: Scalar, reg: Reg) -> Reg {
        match scalar.bits() {
            8 | 16 => def!(self, B32, "and.b32", reg, scalar.mask() as i64),
            _ => reg,
        }
    }

    /// A small integer filled with its sign; others as they are.
    pub(super) fn signed(&mut self, scalar: Scalar, reg: Reg) -> Reg {
        match scalar.bits() {
            8 => def!(self, B32, "cvt.s32.s8", reg),
            16 => def!(self, B32, "cvt.s32.s16", reg),
            _ => reg,
        }
    }

    fn int_op(&mut self, op: &Op, ty: Scalar, args: [Reg; 3]) -> Reg {
        let [a, b, _] = args;
        let bits = i64::from(ty.bits());
        let wide = ty == Scalar::I64;
        let small = ty.bits() < 32;
        let class = class_of(ty);
        // One instruction of the type's width.
        let one = |writer: &mut Self, narrow: &str, wide_name: &str, args: &[Reg]| {
            let reg = writer.asm.new_reg(class);
            let mut list = vec![Arg::Reg(reg)];
            list.extend(args.iter().map(|r| Arg::Reg(*r)));
            writer.asm.ins(None, if wide { wide_name } else { narrow }, &list);
            reg
        };
        match op.code {
            Opcode::Add => {
                let reg = one(self, "add.s32", "add.s64", &[a, b]);
                self.fill(ty, reg)
            }
            Opcode::Sub => {
                let reg = one(self, "sub.s32", "sub.s64", &[a, b]);
                self.fill(ty, reg)
            }
            Opcode::Mul => {
                let reg = one(self, "mul.lo.s32", "mul.lo.s64", &[a, b]);
                self.fill(ty, reg)
            }
            Opcode::Neg => {
                let reg = one(self, "neg.s32", "neg.s64", &[a]);
                self.fill(ty, reg)
            }
            Opcode::AbsS => {
                let a = self.signed(ty, a);
                let a = self.hide_operand(op, 0, a);
                let minus = one(self, "neg.s32", "neg.s64", &[a]);
                let minus = self.hide(minus);
                let reg = one(self, "max.s32", "max.s64", &[a, minus]);
                self.fill(ty, reg)
            }
            Opcode::MinS | Opcode::MaxS => {
                let (a, b) = (self.signed(ty, a), self.signed(ty, b));
                let (a, b) = (self.hide_operand(op, 0, a), self.hide_operand(op, 1, b));
                let reg = match op.code {
                    Opcode::MinS => one(self, "min.s32", "min.s64", &[a, b]),
                    _ => one(self, "max.s32", "max.s64", &[a, b]),
                };
                self.fill(ty, reg)
            }
            Opcode::MinU => one(self, "min.u32", "min.u64", &[a, b]),
            Opcode::MaxU => one(self, "max.u32", "max.u64", &[a, b]),
            Opcode::DivS | Opcode::DivU | Opcode::RemS | Opcode::RemU => self.divide(op, ty, a, b),
            Opcode::MulHiS | Opcode::MulHiU if small => {
                let signed = op.code == Opcode::MulHiS;
                let (a, b) = if signed { (self.signed(ty, a), self.signed(ty, b)) } else { (a, b) };
                let product = def!(self, B32, "mul.lo.s32", a, b);
                let high = def!(self, B32, if signed { "shr.s32" } else { "shr.u32" }, product, bits);
                self.fill(ty, high)
            }
            Opcode::MulHiS => one(self, "mul.hi.s32", "mul.hi.s64", &[a, b]),
            Opcode::MulHiU => one(self, "mul.hi.u32", "mul.hi.u64", &[a, b]),
            Opcode::And => one(self, "and.b32", "and.b64", &[a, b]),
            Opcode::Or => one(self, "or.b32", "or.b64", &[a, b]),
            Opcode::Xor => one(self, "xor.b32", "xor.b64", &[a, b]),
            Opcode::Not => {
                let reg = one(self, "not.b32", "not.b64", &[a]);
                self.fill(ty, reg)
            }
            Opcode::Shl | Opcode::ShrS | Opcode::ShrU | Opcode::Rotl => self.shift(op, ty, a, b),
            Opcode::Clz => {
                let zeros = def!(self, B32, if wide { "clz.b64" } else { "clz.b32" }, a);
                match wide {
                    true => def!(self, B64, "cvt.u64.u32", zeros),
                    false if small => def!(self, B32, "sub.s32", zeros, 32 - bits),
                    false => zeros,
                }
            }
            Opcode::Ctz => {
                // A bit above the top stops the count.
                let a = if small { def!(self, B32, "or.b32", a, 1i64 << bits) } else { a };
                let reversed = one(self, "brev.b32", "brev.b64", &[a]);
                let zeros = def!(self, B32, if wide { "clz.b64" } else { "clz.b32" }, reversed);
                if wide { def!(self, B64, "cvt.u64.u32", zeros) } else { zeros }
            }
            Opcode::Popcount => {
                let ones = def!(self, B32, if wide { "popc.b64" } else { "popc.b32" }, a);
                if wide { def!(self, B64, "cvt.u64.u32", ones) } else { ones }
            }
            Opcode::BitReverse => {
                let reg = one(self, "brev.b32", "brev.b64", &[a]);
                if small { def!(self, B32, "shr.u32", reg, 32 - bits) } else { reg }
            }
            _ => self.compare_ints(op.code, ty, a, b),
        }
    }

    fn compare_ints(&mut self, code: Opcode, ty: Scalar, a: Reg, b: Reg) -> Reg {
        let (test, signed) = match code {
            Opcode::Eq => ("eq", false),
            Opcode::Ne => ("ne", false),
            Opcode::LtS => ("lt", true),
            Opcode::LeS => ("le", true),
            Opcode::GtS => ("gt", true),
            Opcode::GeS => ("ge", true),
            Opcode::LtU => ("lt", false),
            Opcode::LeU => ("le", false),
            Opcode::GtU => ("gt", false),
            _ => ("ge", false),
        };
        let (a, b) = if signed { (self.signed(ty, a), self.signed(ty, b)) } else { (a, b) };
        let width = if ty == Scalar::I64 { 64 } else { 32 };
        let name = format!("setp.{test}.{}{width}", if signed { 's' } else { 'u' });
        def!(self, Pred, &name, a, b)
    }

    /// Division and remainder. PTX leaves open what division by zero and of the least integer by −1 give.
    fn divide(&mut self, op: &Op, ty: Scalar, a: Reg, b: Reg) -> Reg {
        let signed = matches!(op.code, Opcode::DivS | Opcode::RemS);
        let remainder = matches!(op.code, Opcode::RemS | Opcode::RemU);
        if let Some(reg) = self.divide_cheaply(op, ty, (signed, remainder), a, b) {
            return reg;
        }
        let (a, b) = if signed { (self.signed(ty, a), self.signed(ty, b)) } else { (a, b) };
        let wide = ty == Scalar::I64;
        let width = if wide { 64 } else { 32 };
        let class = class_of(ty);
        let letter = if signed { 's' } else { 'u' };
        let name = format!("{}.{letter}{width}", if remainder { "rem" } else { "div" });
        let selp = if wide { "selp.b64" } else { "selp.b32" };
        let equal = if wide { "setp.eq.s64" } else { "setp.eq.s32" };
        let fresh = |writer: &mut Self, name: &str, args: [Arg; 3]| {
            let reg = writer.asm.new_reg(class);
            writer.asm.ins(None, name, &[Arg::Reg(reg), args[0], args[1], args[2]]);
            reg
        };
        let known = self.plan.ranges().operand(op, 1);
        let not_zero = known.is_some_and(|f| f.low > 0 || f.high < 0);
        let not_minus_one = !signed || known.is_some_and(|f| f.low > -1 || f.high < -1);
        let zero = (!not_zero).then(|| def!(self, Pred, equal, b, 0));
        let minus_one = (!not_minus_one).then(|| def!(self, Pred, equal, b, -1));
        // 1 in the place of a divisor that PTX leaves open: the remainder of −1 is then right.
        let mut divisor = b;
        for case in [zero, minus_one].into_iter().flatten() {
            divisor = fresh(self, selp, [Arg::Int(1), Arg::Reg(divisor), Arg::Reg(case)]);
        }
        let reg = self.asm.new_reg(class);
        ins!(self, &name, reg, a, divisor);
        let mut reg = reg;
        if !remainder && let Some(case) = minus_one {
            let minus = self.asm.new_reg(class);
            ins!(self, if wide { "neg.s64" } else { "neg.s32" }, minus, a);
            reg = fresh(self, selp, [Arg::Reg(minus), Arg::Reg(reg), Arg::Reg(case)]);
        }
        if let Some(case) = zero {
            let open = if remainder { Arg::Reg(a) } else { Arg::Int(0) };
            reg = fresh(self, selp, [open, Arg::Reg(reg), Arg::Reg(case)]);
        }
        if signed { self.fill(ty, reg) } else { reg }
    }

    /// By a power of two, or of what is known to fit into 32 bits. Division is a call of a routine for 64 bits, also by a constant.
    fn divide_cheaply(
        &mut self,
        op: &Op,
        ty: Scalar,
        (signed, remainder): (bool, bool),
        a: Reg,
        b: Reg,
    ) -> Option<Reg> {
        let known = |index| self.plan.ranges().operand(op, index);
        let fits = |fact: &Fact| fact.low >= 0 && fact.high <= i128::from(u32::MAX);
        let (dividend, divisor) = (known(0), known(1)?);
        let wide = ty == Scalar::I64;
        if !wide && ty != Scalar::I32
            || divisor.low <= 0
            || signed && dividend.is_none_or(|fact| fact.low < 0)
        {
            return None;
        }
        if divisor.low == divisor.high && (divisor.low as u128).is_power_of_two() {
            let (by, mask) = (i64::from(divisor.low.trailing_zeros()), (divisor.low - 1) as i64);
            return Some(match (remainder, wide) {
                (true, true) => def!(self, B64, "and.b64", a, mask),
                (true, false) => def!(self, B32, "and.b32", a, mask),
                (false, true) => def!(self, B64, "shr.u64", a, by),
                (false, false) => def!(self, B32, "shr.u32", a, by),
            });
        }
        if !wide || !dividend.is_some_and(fits) || !fits(divisor) {
            return None;
        }
        let [a, b] = [a, b].map(|reg| def!(self, B32, "cvt.u32.u64", reg));
        let reg = def!(self, B32, if remainder { "rem.u32" } else { "div.u32" }, a, b);
        Some(def!(self, B64, "cvt.u64.u32", reg))
    }

    /// Shifts and rotation. PTX shifts by more than the width give 0, so the amount is cut.
    fn shift(&mut self, op: &Op, ty: Scalar, a: Reg, b: Reg) -> Reg {
        let bits = ty.bits();
        let wide = ty == Scalar::I64;
        let within =
            self.plan.ranges().operand(op, 1).is_some_and(|f| f.low >= 0 && f.high < i128::from(bits));
        let by = if wide { def!(self, B32, "cvt.u32.u64", b) } else { b };
        let by = if within { by } else { def!(self, B32, "and.b32", by, i64::from(bits - 1)) };
        match op.code {
            Opcode::Shl => {
                let reg =
                    if wide { def!(self, B64, "shl.b64", a, by) } else { def!(self, B32, "shl.b32", a, by) };
                self.fill(ty, reg)
            }
            Opcode::ShrU if wide => def!(self, B64, "shr.u64", a, by),
            Opcode::ShrU => def!(self, B32, "shr.u32", a, by),
            Opcode::ShrS if wide => def!(self, B64, "shr.s64", a, by),
            Opcode::ShrS => {
                let a = self.signed(ty, a);
                let reg = def!(self, B32, "shr.s32", a, by);
                self.fill(ty, reg)
            }
            _ if ty == Scalar::I32 => def!(self, B32, "shf.l.wrap.b32", a, a, by),
            _ => {
                let back = def!(self, B32, "sub.s32", i64::from(bits), by);
                let left = def!(self, B32, "shl.b32", a, by);
                let right = def!(self, B32, "shr.u32", a, back);
                let both = def!(self, B32, "or.b32", left, right);
                self.fill(ty, both)
            }
        }
    }

    fn float_op(&mut self, op: &Op, ty: Scalar, args: [Reg; 3]) -> Reg {
        let [a, b, c] = args;
        let suffix = match ty {
            Scalar::F16 => "f16",
            Scalar::Bf16 => "bf16",
            Scalar::F32 => "f32",
            _ => "f64",
        };
        let class = class_of(ty);
        let emit = |writer: &mut Self, name: &str, args: &[Reg]| {
            let reg = writer.asm.new_reg(class);
            let name = format!("{name}.{suffix}");
            let mut list = vec![Arg::Reg(reg)];
            list.extend(args.iter().map(|r| Arg::Reg(*r)));
            writer.asm.ins(None, &name, &list);
            reg
        };
        let fast = op.accuracy() == Accuracy::Fast && ty == Scalar::F32;
        match op.code {
            Opcode::Add => emit(self, "add.rn", &[a, b]),
            Opcode::Sub => emit(self, "sub.rn", &[a, b]),
            Opcode::Mul => emit(self, "mul.rn", &[a, b]),
            Opcode::Fma => emit(self, "fma.rn", &[a, b, c]),
            Opcode::Div if fast => emit(self, "div.full.ftz", &[a, b]),
            Opcode::Div => emit(self, "div.rn", &[a, b]),
            Opcode::Sqrt if fast => emit(self, "sqrt.approx.ftz", &[a]),
            Opcode::Sqrt => emit(self, "sqrt.rn", &[a]),
            Opcode::Rcp if fast => emit(self, "rcp.approx.ftz", &[a]),
            Opcode::Rcp => emit(self, "rcp.rn", &[a]),
            Opcode::Rsqrt if fast => emit(self, "rsqrt.approx.ftz", &[a]),
            Opcode::Rsqrt => emit(self, "rsqrt.approx", &[a]),
            Opcode::Neg | Opcode::Abs => self.sign(op, ty, a),
            Opcode::Min => emit(self, "min", &[a, b]),
            Opcode::Max => emit(self, "max", &[a, b]),
            Opcode::Minimum => emit(self, "min.NaN", &[a, b]),
            Opcode::Maximum => emit(self, "max.NaN", &[a, b]),
            Opcode::Floor => self.round_to_integer("cvt.rmi", suffix, class, a),
            Opcode::Ceil => self.round_to_integer("cvt.rpi", suffix, class, a),
            Opcode::Round => self.round_to_integer("cvt.rni", suffix, class, a),
            Opcode::Fix => self.round_to_integer("cvt.rzi", suffix, class, a),
            Opcode::Eq | Opcode::Ne | Opcode::Lt | Opcode::Le | Opcode::Gt | Opcode::Ge => {
                let test = match op.code {
                    Opcode::Eq => "eq",
                    Opcode::Ne => "neu",
                    Opcode::Lt => "lt",
                    Opcode::Le => "le",
                    Opcode::Gt => "gt",
                    _ => "ge",
                };
                def!(self, Pred, &format!("setp.{test}.{suffix}"), a, b)
            }
            _ => self.function(op.code, fast, a, b),
        }
    }

    fn round_to_integer(&mut self, name: &str, suffix: &str, class: Class, a: Reg) -> Reg {
        let reg = self.asm.new_reg(class);
        ins!(self, &format!("{name}.{suffix}.{suffix}"), reg, a);
        reg
    }

    /// `neg` and `abs`, which keep a NaN's bits. The float instructions may not, so they serve only where
    /// nobody looks.
    fn sign(&mut self, op: &Op, ty: Scalar, a: Reg) -> Reg {
        let negate = op.code == Opcode::Neg;
        let looked_at = op.result().is_none_or(|result| self.exact[result.index()]);
        match (ty, looked_at) {
            (Scalar::F32, false) => def!(self, B32, if negate { "neg.f32" } else { "abs.f32" }, a),
            (Scalar::F64, false) => def!(self, B64, if negate { "neg.f64" } else { "abs.f64" }, a),
            (Scalar::F32, true) if negate => def!(self, B32, "xor.b32", a, i64::from(i32::MIN)),
            (Scalar::F32, true) => def!(self, B32, "and.b32", a, i64::from(i32::MAX)),
            (Scalar::F64, true) if negate => def!(self, B64, "xor.b64", a, i64::MIN),
            (Scalar::F64, true) => def!(self, B64, "and.b64", a, i64::MAX),
            _ if negate => def!(self, B16, "xor.b16", a, 0x8000),
            _ => def!(self, B16, "and.b16", a, 0x7fff),
        }
    }

    /// The same bits cut into other lanes, lane 0 lowest.
    pub(super) fn bitcast(&mut self, from: Value, to: Value) {
        let (a, b) = (self.ty(from), self.ty(to));
        let (bits_a, bits_b) = (a.scalar().bits(), b.scalar().bits());
        let lanes = self.all(from);
        let regs: Vec<Reg> = if bits_a == bits_b {
            lanes.iter().map(|reg| self.change_class(*reg, class_of(b.scalar()))).collect()
        } else if bits_a > bits_b {
            let parts = (bits_a / bits_b) as usize;
            lanes.iter().flat_map(|reg| self.split(*reg, bits_a, bits_b, parts, b.scalar())).collect()
        } else {
            let parts = (bits_b / bits_a) as usize;
            lanes.chunks(parts).map(|chunk| self.join(chunk, bits_a, b.scalar())).collect()
        };
        self.set_all(to, &regs);
    }

    /// The same bits in a register of another class: 16 bits alone or in the low half of 32.
    pub(super) fn change_class(&mut self, reg: Reg, class: Class) -> Reg {
        match (reg.class, class) {
            (Class::B16, Class::B32) => def!(self, B32, "cvt.u32.u16", reg),
            (Class::B32, Class::B16) => def!(self, B16, "cvt.u16.u32", reg),
            _ => reg,
        }
    }

    /// Cuts a register into `parts` of `bits` each, lowest first.
    pub(super) fn split(
        &mut self,
        reg: Reg,
        whole: u32,
        bits: u32,
        parts: usize,
        scalar: Scalar,
    ) -> Vec<Reg> {
        if whole == 64 {
            let (low, high) = (self.asm.new_reg(Class::B32), self.asm.new_reg(Class::B32));
            ins!(self, "mov.b64", Arg::List(&[low, high]), reg);
            if bits == 32 {
                return vec![low, high];
            }
            let mut all = self.split(low, 32, bits, parts / 2, scalar);
            all.extend(self.split(high, 32, bits, parts / 2, scalar));
            return all;
        }
        if whole == 32 && class_of(scalar) == Class::B16 {
            let (low, high) = (self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16));
            ins!(self, "mov.b32", Arg::List(&[low, high]), reg);
            return vec![low, high];
        }
        let reg = self.change_class(reg, Class::B32);
        (0..parts)
            .map(|i| def!(self, B32, "bfe.u32", reg, i as i64 * i64::from(bits), i64::from(bits)))
            .collect()
    }

    /// Joins registers of `bits` each into one of `scalar`, lowest first.
    pub(super) fn join(&mut self, parts: &[Reg], bits: u32, scalar: Scalar) -> Reg {
        let whole = scalar.bits();
        if whole == 64 {
            let (low, high) = match parts {
                [low, high] => (*low, *high),
                _ => {
                    let (low, high) = parts.split_at(parts.len() / 2);
                    (self.join(low, bits, Scalar::I32), self.join(high, bits, Scalar::I32))
                }
            };
            return def!(self, B64, "mov.b64", Arg::List(&[low, high]));
        }
        let joined = match parts {
            [low, high] if low.class == Class::B16 => def!(self, B32, "mov.b32", Arg::List(&[*low, *high])),
            [low, high] if bits == 16 => def!(self, B32, "prmt.b32", *low, *high, 0x5410),
            [low, high] => {
                let above = def!(self, B32, "shl.b32", *high, i64::from(bits));
                def!(self, B32, "or.b32", *low, above)
            }
            [a, b, c, d] => {
                let low = def!(self, B32, "prmt.b32", *a, *b, 0x0040);
                let high = def!(self, B32, "prmt.b32", *c, *d, 0x0040);
                def!(self, B32, "prmt.b32", low, high, 0x5410)
            }
            _ => parts.first().copied().unwrap_or(Reg::NONE),
        };
        self.change_class(joined, class_of(scalar))
    }

    /// `reg = 0` before a load that may not happen.
    pub(super) fn zero(&mut self, reg: Reg) {
        let name = ["mov.pred", "mov.b16", "mov.b32", "mov.b64"][reg.class as usize];
        ins!(self, name, reg, 0);
    }
}
