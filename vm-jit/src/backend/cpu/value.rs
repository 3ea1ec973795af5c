//! Ops on elements: arithmetic, bits, comparisons, choice.

use super::function::Base;
use super::lanes::{Repr, VECTOR, clif, mask_type, vector};
use super::wide::Function;
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{
    Endianness, InstBuilder, MemFlagsData, Opcode as Clif, Type, Value as Ssa, ValueDef, types,
};
use vm_ir::module::Op;
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Scalar, Value};

impl Writer<'_, '_> {
    /// A constant of a scalar.
    pub(super) fn number(&mut self, scalar: Scalar, bits: u64) -> Ssa {
        match scalar {
            Scalar::F32 | Scalar::Tf32 => self.b.ins().f32const(f32::from_bits(bits as u32)),
            Scalar::F64 => self.b.ins().f64const(f64::from_bits(bits)),
            _ => self.b.ins().iconst(clif(scalar), vm_ir::format::signed(scalar, bits) & mask_of(scalar)),
        }
    }

    /// An integer in every lane of a type.
    pub(super) fn int(&mut self, ty: Type, value: i64) -> Ssa {
        let lane = ty.lane_type();
        let mask = if lane.bits() == 64 { -1 } else { (1i64 << lane.bits()) - 1 };
        let one = self.b.ins().iconst(lane, value & mask);
        if ty.is_vector() { self.b.ins().splat(ty, one) } else { one }
    }

    /// A float in every lane of a type.
    pub(super) fn float(&mut self, ty: Type, value: f64) -> Ssa {
        let one = if ty.lane_type() == types::F32 {
            self.b.ins().f32const(value as f32)
        } else {
            self.b.ins().f64const(value)
        };
        if ty.is_vector() { self.b.ins().splat(ty, one) } else { one }
    }

    pub(super) fn type_of(&self, one: Ssa) -> Type {
        self.b.func.dfg.value_type(one)
    }

    /// The same bits as another type.
    pub(super) fn cast(&mut self, ty: Type, one: Ssa) -> Ssa {
        if self.type_of(one) == ty {
            return one;
        }
        let flags = MemFlagsData::new().with_endianness(Endianness::Little);
        self.b.ins().bitcast(ty, flags, one)
    }

    /// The integer type as wide as the type.
    pub(super) fn bits_type(&self, one: Ssa) -> Type {
        self.type_of(one).as_int()
    }

    /// `a` where the comparison's result holds, else `b`.
    pub(super) fn choose(&mut self, condition: Ssa, a: Ssa, b: Ssa) -> Ssa {
        let ty = self.type_of(a);
        if ty.is_vector() {
            if self.is_all(condition, 0xff) {
                return a;
            }
            if self.is_all(condition, 0) {
                return b;
            }
            let mask = self.cast(ty, condition);
            self.b.ins().bitselect(mask, a, b)
        } else {
            self.b.ins().select(condition, a, b)
        }
    }

    /// The number that a value is, if the code has it as one.
    pub(super) fn constant(&self, one: Ssa) -> Option<i64> {
        let ValueDef::Result(inst, _) = self.b.func.dfg.value_def(one) else { return None };
        match self.b.func.dfg.insts[inst] {
            cranelift_codegen::ir::InstructionData::UnaryImm {
                opcode: cranelift_codegen::ir::Opcode::Iconst,
                imm,
            } => {
                let unused = 64 - self.type_of(one).bits();
                Some((imm.bits() << unused) >> unused)
            }
            _ => None,
        }
    }

    pub(super) fn elementwise(&mut self, op: &Op, from: Scalar, to: Scalar) -> Repr {
        let Some(result) = op.result() else { return Repr::Each(Vec::new()) };
        let elements = self.elements(result);
        self.extreme = self.floats.extreme(op);
        self.votes.remove(&result);
        let args: Vec<Repr> = op.operands.iter().map(|v| self.repr(*v)).collect();
        if args.iter().all(|arg| matches!(arg, Repr::Splat(_))) {
            let args: Vec<Ssa> = args.iter().flat_map(|arg| self.each_of(arg, from, 1)).collect();
            return Repr::Splat(self.one(op, from, to, &args));
        }
        if let Some(repr) = self.affine(op, from, to, &args) {
            return repr;
        }
        if let Some(repr) = self.quotient(op, from, &args, elements) {
            return repr;
        }
        if let Some(masks) = self.compare_steps(op, from, &args, elements) {
            return Repr::Chunks(masks);
        }
        if let Some(vote) = self.vote_of_bools(op, &args) {
            self.votes.insert(result, vote);
        }
        if let Some(chunks) = self.in_chunks(op, from, to, &args, elements) {
            return Repr::Chunks(chunks);
        }
        let mut all: Vec<Vec<Ssa>> = Vec::with_capacity(args.len());
        for (arg, value) in args.iter().zip(&op.operands) {
            // The bool of a select may be one for all lanes.
            let lanes = self.elements(*value);
            let scalar = self.scalar(*value);
            let mut each = self.each_of(arg, scalar, lanes);
            if lanes < elements {
                let times = elements / lanes;
                each = each.into_iter().flat_map(|one| std::iter::repeat_n(one, times)).collect();
            }
            all.push(each);
        }
        let mut known: Vec<(Vec<Ssa>, Ssa)> = Vec::new();
        let each = (0..elements)
            .map(|i| {
                let args: Vec<Ssa> = all.iter().map(|arg| arg[i]).collect();
                if let Some((_, one)) = known.iter().find(|(same, _)| *same == args) {
                    return *one;
                }
                let one = self.one(op, from, to, &args);
                known.push((args, one));
                one
            })
            .collect();
        Repr::Each(each)
    }

    /// Is every bit of a mask known to be this one?
    fn is_all(&self, mask: Ssa, byte: u8) -> bool {
        let ValueDef::Result(inst, _) = self.b.func.dfg.value_def(mask) else { return false };
        match self.b.func.dfg.insts[inst] {
            cranelift_codegen::ir::InstructionData::UnaryConst { constant_handle, .. } => {
                let data = self.b.func.dfg.constants.get(constant_handle);
                data.iter().all(|one| *one == byte)
            }
            _ => false,
        }
    }

    /// The op on vectors of the machine, where it has it.
    fn in_chunks(
        &mut self,
        op: &Op,
        from: Scalar,
        to: Scalar,
        args: &[Repr],
        elements: usize,
    ) -> Option<Vec<Ssa>> {
        let bools = |this: &Self| {
            // As wide as the masks that are there.
            args.iter().find_map(|arg| match arg {
                Repr::Chunks(chunks) => Some(this.type_of(chunks[0]).lane_type().bytes()),
                _ => None,
            })
        };
        match op.code.shape() {
            Shape::Compare(_) => {
                vector(from).filter(|_| Self::in_vectors(from, elements))?;
                let a = self.chunks_of(&args[0], from, elements);
                let b = self.chunks_of(&args[1], from, elements);
                Some(a.into_iter().zip(b).map(|(a, b)| self.compare(op.code, from, a, b)).collect())
            }
            Shape::Select => {
                let condition = op.operands[0];
                if to == Scalar::Bool {
                    let bytes = bools(self)?;
                    let a = self.masks_for(&args[0], condition, bytes, elements);
                    let [b, c] = [1, 2].map(|i| self.masks_of(&args[i], bytes, elements));
                    let each = a.into_iter().zip(b.into_iter().zip(c));
                    return Some(each.map(|(a, (b, c))| self.choose(a, b, c)).collect());
                }
                vector(to).filter(|_| Self::in_vectors(to, elements))?;
                let b = self.chunks_of(&args[1], to, elements);
                let c = self.chunks_of(&args[2], to, elements);
                let pairs = b.into_iter().zip(c);
                if self.elements(condition) == 1 || matches!(args[0], Repr::Splat(_)) {
                    let one = self.first(condition);
                    return Some(pairs.map(|(b, c)| self.b.ins().select(one, b, c)).collect());
                }
                let masks = self.masks_for(&args[0], condition, to.bytes(), elements);
                Some(masks.into_iter().zip(pairs).map(|(a, (b, c))| self.choose(a, b, c)).collect())
            }
            Shape::Unary(_) | Shape::Binary(_) | Shape::Ternary(_) if to == Scalar::Bool => {
                let bytes = bools(self)?;
                let all: Vec<Vec<Ssa>> = args.iter().map(|a| self.masks_of(a, bytes, elements)).collect();
                let count = all[0].len();
                (0..count)
                    .map(|i| {
                        let args: Vec<Ssa> = all.iter().map(|a| a[i]).collect();
                        self.same(op.code, Scalar::I32, &args)
                    })
                    .collect()
            }
            Shape::Unary(_) | Shape::Binary(_) | Shape::Ternary(_) => {
                vector(to).filter(|_| Self::in_vectors(to, elements))?;
                if matches!(op.code, Opcode::Shl | Opcode::ShrS | Opcode::ShrU) {
                    let Repr::Splat(by) = args[1] else { return None };
                    let up = op.code == Opcode::Shl && self.constant(by) == Some(16);
                    let by = self.b.ins().band_imm_s(by, i64::from(to.bits()) - 1);
                    let all = self.chunks_of(&args[0], to, elements).into_iter();
                    let moved = all.map(|a| {
                        let moved = if up { self.moved_up(a) } else { None };
                        moved.unwrap_or_else(|| self.shift(op.code, a, by))
                    });
                    return Some(moved.collect());
                }
                if !Self::has_vector(op.code, to) {
                    return None;
                }
                let mut all: Vec<Vec<Ssa>> = args.iter().map(|a| self.chunks_of(a, to, elements)).collect();
                if op.code == Opcode::Fma && matches!(args[0], Repr::Splat(_)) {
                    // The machine's instruction overwrites the first, of which there would be a copy for each vector.
                    all.swap(0, 1);
                }
                match op.code {
                    Opcode::Exp => return Some(self.exponentials(Base::E, &all[0])),
                    Opcode::Exp2 => return Some(self.exponentials(Base::Two, &all[0])),
                    Opcode::Tanh => return self.wide_function(Function::Tanh, &all[0]),
                    Opcode::Erf => return self.wide_function(Function::Erf, &all[0]),
                    _ => {}
                }
                let count = all[0].len();
                (0..count)
                    .map(|i| {
                        let args: Vec<Ssa> = all.iter().map(|a| a[i]).collect();
                        self.same(op.code, to, &args)
                    })
                    .collect()
            }
            Shape::Convert(..) => self.convert_chunks(op.code, from, to, &args[0], elements),
            _ => None,
        }
    }

    /// The condition of a choice as masks, one for each of `elements` elements.
    fn masks_for(&mut self, repr: &Repr, condition: Value, bytes: u32, elements: usize) -> Vec<Ssa> {
        let own = self.elements(condition);
        if own == elements || matches!(repr, Repr::Splat(_)) {
            return self.masks_of(repr, bytes, elements);
        }
        let masks = Repr::Chunks(self.masks_of(repr, 4, own));
        let broadcast = self.broadcast(&masks, Scalar::Bool, elements / own);
        self.masks_of(&broadcast, bytes, elements)
    }

    fn shift(&mut self, code: Opcode, a: Ssa, by: Ssa) -> Ssa {
        match code {
            Opcode::Shl => self.b.ins().ishl(a, by),
            Opcode::ShrS => self.b.ins().sshr(a, by),
            _ => self.b.ins().ushr(a, by),
        }
    }

    /// Half of a vector's numbers of 16 bits, widened and moved up by as many, as bf16 becomes f32, if it was widened: zeros are put below each.
    fn moved_up(&mut self, a: Ssa) -> Option<Ssa> {
        let ValueDef::Result(inst, _) = self.b.func.dfg.value_def(a) else { return None };
        let first = match self.b.func.dfg.insts[inst].opcode() {
            Clif::UwidenLow => 0,
            Clif::UwidenHigh => 4,
            _ => return None,
        };
        let halves = self.b.func.dfg.inst_args(inst)[0];
        if self.type_of(halves) != types::I16X8 {
            return None;
        }
        let zeros = self.int(types::I16X8, 0);
        let lanes = (first..first + 4).flat_map(|lane| [lane, 8 + lane]);
        let moved = self.shuffled(types::I16X8, zeros, halves, lanes);
        Some(self.cast(types::I32X4, moved))
    }

    /// Is there a vector form of an op between elements of one type?
    fn has_vector(code: Opcode, ty: Scalar) -> bool {
        use Opcode::*;
        match code {
            Add | Sub | Neg | And | Or | Xor | Not | AbsS | MinS | MaxS | MinU | MaxU => true,
            Mul => ty != Scalar::I64,
            Div | Fma | Abs | Min | Max | Minimum | Maximum | Sqrt | Rcp | Rsqrt | Floor | Ceil | Round
            | Fix => true,
            Exp | Exp2 | Tanh | Erf => true,
            _ => false,
        }
    }

    /// One element, of whatever type.
    fn one(&mut self, op: &Op, from: Scalar, to: Scalar, args: &[Ssa]) -> Ssa {
        let code = op.code;
        match code.shape() {
            Shape::Select => self.b.ins().select(args[0], args[1], args[2]),
            Shape::Convert(..) => self.convert(code, from, to, args[0]),
            Shape::Compare(_) => self.compare(code, from, args[0], args[1]),
            _ => self.same(code, from, args).unwrap_or(args[0]),
        }
    }

    /// The result of a comparison: a bool, or a mask.
    pub(super) fn compare(&mut self, code: Opcode, ty: Scalar, a: Ssa, b: Ssa) -> Ssa {
        if !ty.is_int() {
            let condition = match code {
                Opcode::Eq => FloatCC::Equal,
                Opcode::Ne => FloatCC::NotEqual,
                Opcode::Lt => FloatCC::LessThan,
                Opcode::Le => FloatCC::LessThanOrEqual,
                Opcode::Gt => FloatCC::GreaterThan,
                _ => FloatCC::GreaterThanOrEqual,
            };
            return self.b.ins().fcmp(condition, a, b);
        }
        let signed = match code {
            Opcode::Eq => IntCC::Equal,
            Opcode::Ne => IntCC::NotEqual,
            Opcode::LtS | Opcode::LtU => IntCC::SignedLessThan,
            Opcode::LeS | Opcode::LeU => IntCC::SignedLessThanOrEqual,
            Opcode::GtS | Opcode::GtU => IntCC::SignedGreaterThan,
            _ => IntCC::SignedGreaterThanOrEqual,
        };
        let is_unsigned = matches!(code, Opcode::LtU | Opcode::LeU | Opcode::GtU | Opcode::GeU);
        let vector_type = self.type_of(a);
        if !is_unsigned {
            return self.b.ins().icmp(signed, a, b);
        }
        if !vector_type.is_vector() {
            return self.b.ins().icmp(signed.unsigned(), a, b);
        }
        // The machine's vectors compare as signed.
        let (a, b) = (self.flip(a), self.flip(b));
        self.b.ins().icmp(signed, a, b)
    }

    fn flip(&mut self, a: Ssa) -> Ssa {
        let ty = self.type_of(a);
        let sign = self.int(ty, 1i64 << (ty.lane_bits() - 1));
        self.b.ins().bxor(a, sign)
    }

    /// An op between elements of one type, which is no half; on numbers or on vectors.
    pub(super) fn same(&mut self, code: Opcode, ty: Scalar, args: &[Ssa]) -> Option<Ssa> {
        let a = args[0];
        let b = args.get(1).copied().unwrap_or(a);
        let float = !ty.is_int() && ty != Scalar::Bool;
        if float {
            return Some(self.on_floats(code, a, b, args.get(2).copied().unwrap_or(b)));
        }
        Some(match code {
            Opcode::Add => self.b.ins().iadd(a, b),
            Opcode::Sub => self.b.ins().isub(a, b),
            Opcode::Mul => self.b.ins().imul(a, b),
            Opcode::Neg => self.b.ins().ineg(a),
            Opcode::And => self.b.ins().band(a, b),
            Opcode::Or => self.b.ins().bor(a, b),
            Opcode::Xor => self.b.ins().bxor(a, b),
            Opcode::Not if ty == Scalar::Bool => self.b.ins().bxor_imm_s(a, 1),
            Opcode::Not => self.b.ins().bnot(a),
            Opcode::AbsS | Opcode::MinS | Opcode::MaxS | Opcode::MinU | Opcode::MaxU => {
                let (other, comparison) = match code {
                    Opcode::AbsS => (self.b.ins().ineg(a), Opcode::GtS),
                    Opcode::MinS => (b, Opcode::LtS),
                    Opcode::MaxS => (b, Opcode::GtS),
                    Opcode::MinU => (b, Opcode::LtU),
                    _ => (b, Opcode::GtU),
                };
                let holds = self.compare(comparison, ty, a, other);
                self.choose(holds, a, other)
            }
            Opcode::DivS | Opcode::DivU | Opcode::RemS | Opcode::RemU => self.divide(code, ty, a, b),
            Opcode::MulHiS | Opcode::MulHiU => self.upper_product(code, ty, a, b),
            Opcode::Shl | Opcode::ShrS | Opcode::ShrU => self.shift(code, a, b),
            Opcode::Rotl => self.b.ins().rotl(a, b),
            Opcode::Clz => self.b.ins().clz(a),
            Opcode::Ctz => self.b.ins().ctz(a),
            Opcode::Popcount => self.b.ins().popcnt(a),
            Opcode::BitReverse => self.b.ins().bitrev(a),
            _ => return None,
        })
    }

    /// By zero the quotient is 0 and the remainder the dividend; the least by −1 is itself.
    fn divide(&mut self, code: Opcode, ty: Scalar, a: Ssa, b: Ssa) -> Ssa {
        let lane = clif(ty);
        let one = self.int(lane, 1);
        let is_signed = matches!(code, Opcode::DivS | Opcode::RemS);
        let known = self.constant(b);
        let by_zero = self.b.ins().icmp_imm_s(IntCC::Equal, b, 0);
        let mut unsafe_ = by_zero;
        if is_signed {
            let least = self.int(lane, 1i64 << (ty.bits() - 1));
            let minus_one = self.int(lane, -1);
            let is_least = self.b.ins().icmp(IntCC::Equal, a, least);
            let by_minus_one = self.b.ins().icmp(IntCC::Equal, b, minus_one);
            let overflows = self.b.ins().band(is_least, by_minus_one);
            unsafe_ = self.b.ins().bor(by_zero, overflows);
        }
        let plain = known.is_some_and(|n| n != 0 && n != -1);
        let divisor = if plain { b } else { self.b.ins().select(unsafe_, one, b) };
        let result = match code {
            Opcode::DivS => self.b.ins().sdiv(a, divisor),
            Opcode::DivU => self.b.ins().udiv(a, divisor),
            Opcode::RemS => self.b.ins().srem(a, divisor),
            _ => self.b.ins().urem(a, divisor),
        };
        if plain {
            return result;
        }
        let instead = match code {
            Opcode::DivS | Opcode::DivU => self.int(lane, 0),
            _ => a,
        };
        self.b.ins().select(by_zero, instead, result)
    }

    fn upper_product(&mut self, code: Opcode, ty: Scalar, a: Ssa, b: Ssa) -> Ssa {
        let is_signed = code == Opcode::MulHiS;
        if ty == Scalar::I64 {
            return if is_signed { self.b.ins().smulhi(a, b) } else { self.b.ins().umulhi(a, b) };
        }
        let wide = |this: &mut Self, one| match is_signed {
            true => this.b.ins().sextend(types::I64, one),
            false => this.b.ins().uextend(types::I64, one),
        };
        let (a, b) = (wide(self, a), wide(self, b));
        let product = self.b.ins().imul(a, b);
        let upper = self.b.ins().ushr_imm_s(product, i64::from(ty.bits()));
        self.b.ins().ireduce(clif(ty), upper)
    }

    fn on_floats(&mut self, code: Opcode, a: Ssa, b: Ssa, c: Ssa) -> Ssa {
        match code {
            Opcode::Add => self.b.ins().fadd(a, b),
            Opcode::Sub => self.b.ins().fsub(a, b),
            Opcode::Mul => self.b.ins().fmul(a, b),
            Opcode::Div => self.b.ins().fdiv(a, b),
            Opcode::Fma => self.b.ins().fma(a, b, c),
            Opcode::Neg | Opcode::Abs => self.sign(code, a),
            Opcode::Minimum => self.b.ins().fmin(a, b),
            Opcode::Maximum => self.b.ins().fmax(a, b),
            Opcode::Min | Opcode::Max => self.number_over_nan(code, a, b),
            Opcode::Sqrt => self.b.ins().sqrt(a),
            Opcode::Rcp => self.reciprocal(a),
            Opcode::Rsqrt => {
                let root = self.b.ins().sqrt(a);
                self.reciprocal(root)
            }
            Opcode::Floor => self.b.ins().floor(a),
            Opcode::Ceil => self.b.ins().ceil(a),
            Opcode::Round => self.b.ins().nearest(a),
            Opcode::Fix => self.b.ins().trunc(a),
            Opcode::Exp2 => self.exponentials(Base::Two, &[a])[0],
            Opcode::Tanh => self.wide_one(Function::Tanh, a),
            Opcode::Erf => self.wide_one(Function::Erf, a),
            _ => self.exponentials(Base::E, &[a])[0],
        }
    }

    pub(super) fn bitcast(&mut self, from: Value, to: Value) -> Repr {
        let (old, new) = (self.scalar(from), self.scalar(to));
        let elements = self.elements(to);
        let repr = self.repr(from);
        if old.bytes() == new.bytes() {
            let ty = clif(new);
            return match repr {
                Repr::Affine { .. } if clif(old) == ty => repr,
                Repr::Splat(one) => Repr::Splat(self.cast(ty, one)),
                Repr::Chunks(chunks) if new.bytes() == 2 => Repr::Chunks(chunks),
                Repr::Chunks(chunks) => {
                    let ty = vector(new).unwrap_or(mask_type(new.bytes()));
                    Repr::Chunks(chunks.into_iter().map(|chunk| self.cast(ty, chunk)).collect())
                }
                other => {
                    let all = self.each_of(&other, old, elements);
                    Repr::Each(all.into_iter().map(|one| self.cast(ty, one)).collect())
                }
            };
        }
        let before = self.elements(from);
        if let (Some(_), Some(ty)) = (vector(old), vector(new))
            && Self::in_vectors(old, before)
            && self.kernel.type_of(from).bytes() as usize * self.width >= VECTOR
        {
            let chunks = self.chunks_of(&repr, old, before);
            return Repr::Chunks(chunks.into_iter().map(|chunk| self.cast(ty, chunk)).collect());
        }
        // Through integers: taken apart or put together.
        let all = self.each(from);
        let whole = |this: &mut Self, one: Ssa| {
            let ty = this.bits_type(one);
            this.cast(ty, one)
        };
        let all: Vec<Ssa> = all.into_iter().map(|one| whole(self, one)).collect();
        let (old_bytes, new_bytes) = (old.bytes(), new.bytes());
        let int = |bytes: u32| match bytes {
            1 => types::I8,
            2 => types::I16,
            4 => types::I32,
            _ => types::I64,
        };
        let mut out = Vec::with_capacity(elements);
        if new_bytes < old_bytes {
            for one in all {
                for part in 0..old_bytes / new_bytes {
                    let moved = self.b.ins().ushr_imm_s(one, i64::from(part * new_bytes * 8));
                    out.push(self.b.ins().ireduce(int(new_bytes), moved));
                }
            }
        } else {
            for parts in all.chunks((new_bytes / old_bytes) as usize) {
                let mut whole = self.b.ins().uextend(int(new_bytes), parts[0]);
                for (i, part) in parts.iter().enumerate().skip(1) {
                    let wide = self.b.ins().uextend(int(new_bytes), *part);
                    let moved = self.b.ins().ishl_imm_s(wide, i64::from(i as u32 * old_bytes * 8));
                    whole = self.b.ins().bor(whole, moved);
                }
                out.push(whole);
            }
        }
        let ty = clif(new);
        Repr::Each(out.into_iter().map(|one| self.cast(ty, one)).collect())
    }
}

fn mask_of(scalar: Scalar) -> i64 {
    scalar.mask() as i64
}
