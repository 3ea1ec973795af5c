//! The lesser and the greater of two floats, and what is known of the floats of a kernel: which are never NaN, and of
//! which nobody tells −0 from +0.
//!
//! These two have rules for NaNs and for zeros that the machine's instruction lacks. A
//! maximum that a loop carries from −∞ on is never NaN, and where it only goes on into sums and exponentials the sign of
//! a zero is lost: then the one instruction is enough.

use super::writer::Writer;
use cranelift_codegen::ir::condcodes::FloatCC;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use std::collections::HashMap;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Scalar, Value};

/// By value.
pub(super) struct Floats {
    number: Vec<bool>,
    unsigned_zero: Vec<bool>,
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
        let mut maker = Maker {
            kernel,
            flows: Vec::new(),
            defs: HashMap::new(),
            number: vec![true; count],
            unsigned_zero: vec![true; count],
        };
        for param in kernel.params() {
            if let vm_ir::module::ParamKind::Scalar { value, .. } = param.kind {
                maker.number[value.index()] = false;
            }
        }
        maker.region(kernel.body());
        maker.settle();
        Floats { number: maker.number, unsigned_zero: maker.unsigned_zero }
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
    /// Values that become another where control flow joins.
    flows: Vec<(Value, Value)>,
    defs: HashMap<Value, &'k Op>,
    number: Vec<bool>,
    unsigned_zero: Vec<bool>,
}

impl<'k> Maker<'k> {
    fn flow(&mut self, from: &[Value], to: &[Value]) {
        self.flows.extend(from.iter().copied().zip(to.iter().copied()));
    }

    fn region(&mut self, region: &'k Region) {
        for op in &region.ops {
            for value in &op.results {
                self.defs.insert(*value, op);
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
                _ => op.regions.iter().for_each(|region| self.flow(&region.yields, &op.results)),
            }
            op.regions.iter().for_each(|region| self.region(region));
        }
    }

    /// Begins with the best and takes back what does not hold, until all holds.
    fn settle(&mut self) {
        loop {
            let mut changed = false;
            let mut lose = |known: &mut bool, holds: bool| {
                changed |= *known && !holds;
                *known &= holds;
            };
            for (value, op) in &self.defs {
                if op.regions.is_empty() {
                    let holds = is_number(self.kernel, op, |v| self.number[v.index()]);
                    lose(&mut self.number[value.index()], holds);
                }
            }
            for (from, to) in &self.flows {
                let holds = self.number[from.index()];
                lose(&mut self.number[to.index()], holds);
                let holds = self.unsigned_zero[to.index()];
                lose(&mut self.unsigned_zero[from.index()], holds);
            }
            let result = |op: &Op, known: &[bool]| op.result().is_some_and(|v| known[v.index()]);
            self.kernel.for_each_op(&mut |op| {
                // What regions yield is told of by the flows.
                if !op.regions.is_empty() {
                    return;
                }
                let after = result(op, &self.unsigned_zero);
                for (i, value) in op.operands.iter().enumerate() {
                    lose(&mut self.unsigned_zero[value.index()], loses_sign(op.code, i, after));
                }
            });
            if !changed {
                return;
            }
        }
    }
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
}
