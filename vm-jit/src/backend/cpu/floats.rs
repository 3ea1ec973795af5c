//! The lesser and the greater of two floats, and what is known of the floats of a kernel: which are never NaN, and of
//! which nobody tells −0 from +0.
//!
//! These two have rules for NaNs and for zeros that the machine's instruction lacks. A
//! maximum that a loop carries from −∞ on is never NaN, and where it only goes on into sums and exponentials the sign of
//! a zero is lost: then the one instruction is enough. What goes through a shared array is followed: all that is put there
//! may come out of every load.

use super::writer::Writer;
use crate::backend::flow::Edges;
use cranelift_codegen::ir::condcodes::FloatCC;
use cranelift_codegen::ir::{InstBuilder, Opcode as Clif, Value as Ssa, ValueDef, types};
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Scalar, Value};

/// By value.
pub(super) struct Floats {
    number: Vec<bool>,
    unsigned_zero: Vec<bool>,
    /// Edges that were followed to find it.
    pub(super) steps: u64,
}

/// What is known of the operands of a lesser or greater, and of its result.
#[derive(Clone, Copy, Default)]
pub(super) struct Extreme {
    /// The first is never NaN.
    pub(super) first: bool,
    /// The second is never NaN.
    pub(super) second: bool,
    /// Nobody tells −0 from +0 in the result.
    pub(super) unsigned_zero: bool,
}

impl Floats {
    pub(super) fn of(kernel: &Kernel) -> Floats {
        let count = kernel.values().len();
        let all = count + kernel.shared().len();
        let mut maker = Maker {
            kernel,
            flows: Vec::new(),
            ops: Vec::new(),
            number: vec![true; all],
            unsigned_zero: vec![true; all],
            steps: 0,
        };
        for param in kernel.params() {
            if let vm_ir::module::ParamKind::Scalar { value, .. } = param.kind {
                maker.number[value.index()] = false;
            }
        }
        maker.region(kernel.body());
        maker.settle_numbers();
        maker.settle_zeros();
        let floats = Floats { number: maker.number, unsigned_zero: maker.unsigned_zero, steps: maker.steps };
        tracing::trace!(kernel = kernel.name(), steps = floats.steps, "floats");
        floats
    }

    /// Of an op that takes the lesser or the greater of two floats, or of those of a warp.
    pub(super) fn extreme(&self, op: &Op) -> Extreme {
        let number =
            |i: usize| op.operands.get(i).or(op.operands.last()).is_some_and(|v| self.number[v.index()]);
        let unsigned_zero = op.result().is_some_and(|v| self.unsigned_zero[v.index()]);
        Extreme { first: number(0), second: number(1), unsigned_zero }
    }
}

struct Maker<'k> {
    kernel: &'k Kernel,
    /// Values that become another where control flow joins, or by way of a shared array; by index, the arrays behind the
    /// values.
    flows: Vec<(usize, usize)>,
    /// What regions yield and shared arrays hold is known by the flows; these are the other ops.
    ops: Vec<&'k Op>,
    number: Vec<bool>,
    unsigned_zero: Vec<bool>,
    steps: u64,
}

impl<'k> Maker<'k> {
    fn flow(&mut self, from: &[Value], to: &[Value]) {
        let pairs = from.iter().zip(to);
        self.flows.extend(pairs.map(|(from, to)| (from.index(), to.index())));
    }

    /// What an op puts into a shared array or takes from one. What no thread has put there is a zero, or anything.
    fn through_memory(&mut self, op: &Op) {
        let Some(Place::Shared(array)) = op.place else { return };
        let array = self.kernel.values().len() + usize::from(array);
        match (op.code.shape(), op.result(), op.operands.last()) {
            // Any bytes may make a NaN.
            _ if self.kernel.by_bytes(op).is_some() => {
                (self.number[array], self.unsigned_zero[array]) = (false, false);
            }
            (Shape::Load | Shape::LoadUniform, Some(result), _) => self.flows.push((array, result.index())),
            (Shape::Store | Shape::Gather, _, Some(value)) => self.flows.push((value.index(), array)),
            _ => (self.number[array], self.unsigned_zero[array]) = (false, false),
        }
    }

    fn region(&mut self, region: &'k Region) {
        for op in &region.ops {
            if op.regions.is_empty() && !is_followed(self.kernel, op) {
                self.ops.push(op);
            }
            match op.code.shape() {
                Shape::For => {
                    let body = &op.regions[0];
                    let carried = &body.args[1..];
                    self.flow(&op.operands[3..], carried);
                    self.flow(&body.yields, carried);
                    self.flow(carried, &op.results);
                }
                Shape::While => {
                    let (condition, body) = (&op.regions[0], &op.regions[1]);
                    self.flow(&op.operands, &condition.args);
                    self.flow(&body.yields, &condition.args);
                    self.flow(&condition.args, &op.results);
                }
                // Fragments hold anything, and what comes of it.
                Shape::Map => {
                    let body = &op.regions[0];
                    body.args.iter().for_each(|value| self.number[value.index()] = false);
                    body.yields.iter().for_each(|value| self.unsigned_zero[value.index()] = false);
                }
                _ => op.regions.iter().for_each(|region| self.flow(&region.yields, &op.results)),
            }
            self.through_memory(op);
            op.regions.iter().for_each(|region| self.region(region));
        }
    }

    /// Begins with the best and takes back what does not hold, and what that was needed for, until all holds.
    fn settle_numbers(&mut self) {
        let nodes = self.number.len();
        let uses = self.ops.iter().enumerate();
        let uses: Vec<_> =
            uses.flat_map(|(at, op)| op.operands.iter().map(move |value| (value.index(), at))).collect();
        let (uses, flows) = (Edges::new(nodes, &uses), Edges::new(nodes, &self.flows));
        let lost = |number: &mut [bool], op: &Op| {
            let value = op.result()?.index();
            let loses = number[value] && !is_number(self.kernel, op, |v| number[v.index()]);
            number[value] &= !loses;
            loses.then_some(value)
        };
        let mut due: Vec<usize> = (0..nodes).filter(|node| !self.number[*node]).collect();
        for op in &self.ops {
            due.extend(lost(&mut self.number, op));
        }
        while let Some(node) = due.pop() {
            for at in uses.from(node) {
                self.steps += 1;
                due.extend(lost(&mut self.number, self.ops[at]));
            }
            for to in flows.from(node) {
                self.steps += 1;
                if std::mem::replace(&mut self.number[to], false) {
                    due.push(to);
                }
            }
        }
    }

    /// The same for the signs of zeros, against the way that values take.
    fn settle_zeros(&mut self) {
        let nodes = self.unsigned_zero.len();
        let back: Vec<_> = self.flows.iter().map(|(from, to)| (*to, *from)).collect();
        let flows = Edges::new(nodes, &back);
        let results = self.ops.iter().enumerate();
        let results: Vec<_> =
            results.filter_map(|(at, op)| op.result().map(|value| (value.index(), at))).collect();
        let defs = Edges::new(nodes, &results);
        let lose = |known: &mut [bool], op: &Op, due: &mut Vec<usize>| {
            let after = op.result().is_some_and(|value| known[value.index()]);
            for (index, value) in op.operands.iter().enumerate() {
                if !loses_sign(op.code, index, after) && std::mem::replace(&mut known[value.index()], false) {
                    due.push(value.index());
                }
            }
        };
        let mut due: Vec<usize> = (0..nodes).filter(|node| !self.unsigned_zero[*node]).collect();
        for op in &self.ops {
            lose(&mut self.unsigned_zero, op, &mut due);
        }
        while let Some(node) = due.pop() {
            for at in defs.from(node) {
                self.steps += 1 + self.ops[at].operands.len() as u64;
                lose(&mut self.unsigned_zero, self.ops[at], &mut due);
            }
            for from in flows.from(node) {
                self.steps += 1;
                if std::mem::replace(&mut self.unsigned_zero[from], false) {
                    due.push(from);
                }
            }
        }
    }
}

/// Is it an access to a shared array whose value is followed?
fn is_followed(kernel: &Kernel, op: &Op) -> bool {
    let plain = matches!(op.code.shape(), Shape::Load | Shape::LoadUniform | Shape::Store | Shape::Gather);
    plain && matches!(op.place, Some(Place::Shared(_))) && kernel.by_bytes(op).is_none()
}

/// Is the op's result never NaN, given which of its operands are never?
fn is_number(kernel: &Kernel, op: &Op, number: impl Fn(Value) -> bool) -> bool {
    use Opcode::*;
    let Some(result) = op.result() else { return false };
    let all = || op.operands.iter().all(|v| number(*v));
    match op.code {
        Const => {
            let scalar = kernel.type_of(result).scalar();
            let bits = op.immediates.first().copied().unwrap_or(0);
            matches!(scalar, Scalar::F16 | Scalar::Bf16 | Scalar::F32 | Scalar::F64)
                && !vm_ir::format::to_f64(scalar, bits).is_nan()
        }
        Max | Min => op.operands.iter().any(|v| number(*v)),
        WarpMax | WarpMin | Maximum | Minimum | Exp | Exp2 | Abs | Neg | Floor | Ceil | Round | Fix => all(),
        Splat | Make | Extract | Insert => all(),
        Select => op.operands[1..].iter().all(|v| number(*v)),
        SiToFp | UiToFp => true,
        _ => false,
    }
}

/// Does an op lose the sign of a zero that it takes as its operand number `index`? `after` is whether it is lost behind
/// its result.
fn loses_sign(code: Opcode, index: usize, after: bool) -> bool {
    use Opcode::*;
    match code {
        Eq | Ne | Lt | Le | Gt | Ge | Exp | Exp2 | Cos | Abs | FpToSi | FpToUi => true,
        Add | Sub | Mul | Fma | Max | Min | Maximum | Minimum | Neg | Sqrt | Floor | Ceil | Round | Fix => {
            after
        }
        Splat | Make | Extract | Insert | WarpMax | WarpMin | WarpAdd => after,
        Div => index == 0 && after,
        Select => index > 0 && after,
        _ => false,
    }
}

impl Writer<'_, '_> {
    /// `min` and `max`: a number wins over a NaN, and −0 is less than +0. What is known of the two makes it shorter.
    pub(super) fn number_over_nan(&mut self, code: Opcode, a: Ssa, b: Ssa) -> Ssa {
        let ty = self.type_of(a);
        if !ty.is_vector() {
            // In the first lane of a vector: there masks need no branch.
            let wide = if ty == types::F32 { types::F32X4 } else { types::F64X2 };
            let [a, b] = [a, b].map(|one| self.b.ins().scalar_to_vector(wide, one));
            let both = self.number_over_nan(code, a, b);
            return self.b.ins().extractlane(both, 0);
        }
        let Extreme { first, second, unsigned_zero } = self.extreme;
        // The second where neither is less, as is the machine's own way: it is the one that may not be NaN.
        let (a, b, second) = if first && !second { (b, a, true) } else { (a, b, second) };
        let (low, high) = if code == Opcode::Min { (a, b) } else { (b, a) };
        let less = self.b.ins().fcmp(FloatCC::LessThan, low, high);
        let mut result = self.choose(less, a, b);
        if !unsigned_zero {
            // Equal ones differ in the sign of a zero at most: it is set if one has it, or if both have.
            let bits = self.bits_type(a);
            let [sum, own] = [result, a].map(|one| self.cast(bits, one));
            let both = match code {
                Opcode::Min => {
                    let same = self.b.ins().fcmp(FloatCC::Equal, a, b);
                    let more = self.b.ins().band(own, same);
                    self.b.ins().bor(sum, more)
                }
                _ => {
                    let other = self.b.ins().fcmp(FloatCC::NotEqual, a, b);
                    let most = self.b.ins().bor(own, other);
                    self.b.ins().band(sum, most)
                }
            };
            result = self.cast(ty, both);
        }
        if second {
            return result;
        }
        let is_nan = self.b.ins().fcmp(FloatCC::Unordered, b, b);
        self.choose(is_nan, a, result)
    }

    /// `neg` and `abs`, on the bits of vectors: so the constant is there once. Of a magnitude the sign is set.
    pub(super) fn sign(&mut self, code: Opcode, a: Ssa) -> Ssa {
        let ty = self.type_of(a);
        if !ty.is_vector() {
            return if code == Opcode::Neg { self.b.ins().fneg(a) } else { self.b.ins().fabs(a) };
        }
        let ints = ty.as_int();
        let rest = i64::MAX >> (64 - ty.lane_bits());
        let bits = match (code, self.magnitude(a)) {
            (Opcode::Abs, _) => {
                let (bits, rest) = (self.cast(ints, a), self.int(ints, rest));
                self.b.ins().band(bits, rest)
            }
            (_, Some(bits)) => {
                let sign = self.int(ints, !rest);
                self.b.ins().bor(bits, sign)
            }
            _ => {
                let (bits, sign) = (self.cast(ints, a), self.int(ints, !rest));
                self.b.ins().bxor(bits, sign)
            }
        };
        self.cast(ty, bits)
    }

    /// The bits of a vector whose magnitude this one is.
    fn magnitude(&self, one: Ssa) -> Option<Ssa> {
        let dfg = &self.b.func.dfg;
        let made_by = |value: Ssa| match dfg.value_def(value) {
            ValueDef::Result(inst, _) => Some((dfg.insts[inst].opcode(), dfg.inst_args(inst))),
            _ => None,
        };
        let (Clif::Bitcast, [bits]) = made_by(one)? else { return None };
        let (Clif::Band, [bits, mask]) = made_by(*bits)? else { return None };
        let (Clif::Splat, [mask]) = made_by(*mask)? else { return None };
        let whole = self.type_of(*mask).bits();
        (self.constant(*mask)? == i64::MAX >> (64 - whole)).then_some(*bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_linear() {
        crate::growth::check("floats", 10, |module| {
            module.kernels().iter().map(|kernel| Floats::of(kernel).steps + 1).sum()
        });
    }
}
