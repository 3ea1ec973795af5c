//! How facts go through ops, and what a condition teaches.

use super::{Below, Fact, MAX_LEARNT, Walk, assumed};
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;
use vm_ir::{Scalar, Value};

/// How far back a condition is followed.
const MAX_DEPTH: usize = 8;

impl Walk<'_> {
    /// What is known of the result of a scalar op.
    pub(super) fn transfer(&self, op: &Op, ty: Scalar) -> Fact {
        let any = Fact::of_type(ty);
        if !ty.is_int() {
            return any;
        }
        let a = op.operands.first().map(|v| self.fact(*v));
        let b = op.operands.get(1).map(|v| self.fact(*v));
        match (op.code, a, b) {
            (Opcode::Const, ..) => {
                let bits = op.immediates.first().copied().unwrap_or(0);
                Fact::between(
                    i128::from(vm_ir::format::signed(ty, bits)),
                    i128::from(vm_ir::format::signed(ty, bits)),
                )
            }
            (Opcode::Add, Some(a), Some(b)) => within(&any, add(a, b), a.shift.min(b.shift)),
            (Opcode::Sub, Some(a), Some(b)) => {
                let mut fact = Fact::between(a.low - b.high, a.high - b.low);
                fact.below = Fact::shifted(&a.below, -b.low);
                within(&any, fact, a.shift.min(b.shift))
            }
            (Opcode::Mul, Some(a), Some(b)) => mul(&any, a, b),
            (Opcode::Shl, Some(a), Some(b)) => match b.constant() {
                Some(by) if (0..i128::from(ty.bits())).contains(&by) => {
                    let factor = 1i128 << by;
                    mul(&any, a, &Fact::between(factor, factor))
                }
                _ => any,
            },
            (Opcode::DivS | Opcode::DivU, Some(a), Some(b)) if a.low >= 0 && b.low >= 1 => {
                let mut fact = Fact::between(a.low / b.high, a.high / b.low);
                fact.below = a.below.clone();
                if let Some(divisor) = b.constant().filter(|d| d.count_ones() == 1) {
                    fact.shift = fact.shift.max(a.shift.saturating_sub(divisor.trailing_zeros()));
                }
                fact
            }
            (Opcode::ShrU | Opcode::ShrS, Some(a), Some(b)) => match b.constant() {
                Some(by) if a.low >= 0 && (0..i128::from(ty.bits())).contains(&by) => {
                    let mut fact = Fact::between(a.low >> by, a.high >> by);
                    fact.below = a.below.clone();
                    fact.shift = fact.shift.max(a.shift.saturating_sub(by as u32));
                    fact
                }
                Some(by) if (1..i128::from(ty.bits())).contains(&by) && op.code == Opcode::ShrU => {
                    Fact::between(0, i128::from(ty.mask() >> by))
                }
                _ => any,
            },
            (Opcode::RemS | Opcode::RemU, Some(a), Some(b)) if a.low >= 0 && b.low >= 1 => {
                let mut fact = Fact::between(0, a.high.min(b.high - 1));
                fact.below = a.below.clone();
                fact
            }
            (Opcode::RemU, _, Some(b)) if b.low >= 1 => Fact::between(0, b.high - 1),
            (Opcode::And, Some(a), Some(b)) if a.low >= 0 || b.low >= 0 => {
                let high = match (a.low >= 0, b.low >= 0) {
                    (true, true) => a.high.min(b.high),
                    (true, false) => a.high,
                    _ => b.high,
                };
                let mut fact = Fact::between(0, high);
                fact.shift = a.shift.max(b.shift);
                if a.low >= 0 {
                    fact.below = a.below.clone();
                }
                fact
            }
            (Opcode::MinS, Some(a), Some(b)) => {
                let mut fact = Fact::between(a.low.min(b.low), a.high.min(b.high));
                fact.shift = a.shift.min(b.shift);
                fact.below = a.below.clone();
                b.below.iter().for_each(|x| fact.add_below(*x));
                fact
            }
            (Opcode::MinU, Some(a), Some(b)) if a.low >= 0 && b.low >= 0 => {
                let mut fact = Fact::between(a.low.min(b.low), a.high.min(b.high));
                fact.below = a.below.clone();
                b.below.iter().for_each(|x| fact.add_below(*x));
                fact
            }
            (Opcode::MaxS, Some(a), Some(b)) => Fact { low: a.low.max(b.low), ..a.join(b) },
            (Opcode::Sext, Some(a), _) => a.clone(),
            (Opcode::Zext, Some(a), _) => {
                let from = self.kernel.type_of(op.operands[0]).scalar();
                match a.low >= 0 && from != Scalar::Bool {
                    true => a.clone(),
                    false => Fact::between(0, i128::from(from.mask())),
                }
            }
            (Opcode::Trunc, Some(a), _) => match a.low >= any.low && a.high <= any.high {
                true => a.clone(),
                false => Fact { shift: a.shift.min(ty.bits()), ..any },
            },
            (Opcode::Select, Some(_), Some(b)) => match op.operands.get(2) {
                Some(c) => b.join(self.fact(*c)),
                None => any,
            },
            (Opcode::Popcount | Opcode::Clz | Opcode::Ctz, Some(_), _) => {
                let from = self.kernel.type_of(op.operands[0]).scalar();
                Fact::between(0, i128::from(from.bits()))
            }
            _ => self.id(op).unwrap_or(any),
        }
    }

    fn id(&self, op: &Op) -> Option<Fact> {
        let (Opcode::Extent, Some(Place::View(view))) = (op.code, op.place) else {
            return assumed::of_place(self.kernel, op);
        };
        let dimension = *op.immediates.first()?;
        let dim = self.kernel.view(view)?.dims.get(dimension as usize)?;
        Some(assumed::of_extent(*dim, self.same_extent(view, dimension as u8)))
    }

    /// Narrows what is known by a condition that holds, or does not.
    pub(super) fn learn(&mut self, condition: Value, holds: bool) {
        self.learnt = 0;
        self.learn_of(condition, holds, 0);
    }

    /// Is there still something to learn from the condition at hand? Otherwise what is known is kept.
    fn may_learn(&mut self, depth: usize) -> bool {
        self.ranges.steps += 1;
        self.learnt += 1;
        self.learnt <= MAX_LEARNT && depth <= MAX_DEPTH
    }

    fn learn_of(&mut self, condition: Value, holds: bool, depth: usize) {
        let Some(op) = self.defs[self.canon[condition.index()] as usize] else { return };
        if !self.may_learn(depth) {
            return;
        }
        let pair = || (op.operands[0], op.operands[1]);
        match (op.code, holds) {
            (Opcode::And, true) | (Opcode::Or, false) => {
                let (a, b) = pair();
                self.learn_of(a, holds, depth + 1);
                self.learn_of(b, holds, depth + 1);
            }
            (Opcode::Not, _) => self.learn_of(op.operands[0], !holds, depth + 1),
            (Opcode::LtS, true) | (Opcode::GeS, false) => self.less(pair().0, pair().1, 1),
            (Opcode::LeS, true) | (Opcode::GtS, false) => self.less(pair().0, pair().1, 0),
            (Opcode::GtS, true) | (Opcode::LeS, false) => self.less(pair().1, pair().0, 1),
            (Opcode::GeS, true) | (Opcode::LtS, false) => self.less(pair().1, pair().0, 0),
            (Opcode::LtU, true) | (Opcode::GeU, false) => self.less_unsigned(pair().0, pair().1, 1),
            (Opcode::LeU, true) | (Opcode::GtU, false) => self.less_unsigned(pair().0, pair().1, 0),
            (Opcode::GtU, true) | (Opcode::LeU, false) => self.less_unsigned(pair().1, pair().0, 1),
            (Opcode::GeU, true) | (Opcode::LtU, false) => self.less_unsigned(pair().1, pair().0, 0),
            (Opcode::Eq, true) | (Opcode::Ne, false)
                if self.kernel.type_of(op.operands[0]).scalar().is_int() =>
            {
                let (a, b) = pair();
                self.less(a, b, 0);
                self.less(b, a, 0);
            }
            _ => {}
        }
    }

    /// `a + by ≤ b`, signed.
    fn less(&mut self, a: Value, b: Value, by: i128) {
        let (fact_a, fact_b) = (self.fact(a).clone(), self.fact(b).clone());
        self.narrow(a, None, Some(fact_b.high - by), &Fact::shifted(&fact_b.below, -by), 0);
        self.narrow(b, Some(fact_a.low + by), None, &[], 0);
    }

    /// `a + by ≤ b`, unsigned: if b is not negative, neither is a.
    fn less_unsigned(&mut self, a: Value, b: Value, by: i128) {
        if self.fact(b).low >= 0 {
            self.narrow(a, Some(0), None, &[], 0);
            self.less(a, b, by);
        }
    }

    fn narrow(&mut self, value: Value, low: Option<i128>, high: Option<i128>, below: &[Below], depth: usize) {
        if !self.may_learn(depth) {
            return;
        }
        let known = self.fact(value);
        let mut fact = known.clone();
        fact.low = low.map_or(fact.low, |low| fact.low.max(low));
        fact.high = high.map_or(fact.high, |high| fact.high.min(high));
        below.iter().for_each(|b| fact.add_below(*b));
        if fact.low > fact.high {
            // Code that is never reached; any fact will do.
            return;
        }
        if fact == *known {
            return;
        }
        self.set(value, fact);
        let Some(op) = self.defs[self.canon[value.index()] as usize] else { return };
        // What holds for the result of these holds for an operand.
        match op.code {
            Opcode::Sext => self.narrow(op.operands[0], low, high, below, depth + 1),
            // A bool's fact is that of its type, -1 to 0.
            Opcode::Zext if self.fact(op.operands[0]).low >= 0 => {
                self.narrow(op.operands[0], low, high, below, depth + 1)
            }
            Opcode::Add => {
                let ty = Fact::of_type(self.kernel.type_of(value).scalar());
                let (a, b) = (op.operands[0], op.operands[1]);
                let sum = add(self.fact(a), self.fact(b));
                if sum.low < ty.low || sum.high > ty.high {
                    return;
                }
                for (this, other) in [(a, b), (b, a)] {
                    let other = self.fact(other).clone();
                    let low = low.map(|low| low - other.high);
                    let high = high.map(|high| high - other.low);
                    let below = Fact::shifted(below, -other.low);
                    self.narrow(this, low, high, &below, depth + 1);
                }
            }
            _ => {}
        }
    }
}

fn add(a: &Fact, b: &Fact) -> Fact {
    let mut fact = Fact::between(a.low + b.low, a.high + b.high);
    fact.below = Fact::shifted(&a.below, b.high);
    Fact::shifted(&b.below, a.high).into_iter().for_each(|x| fact.add_below(x));
    fact
}

/// The fact if it fits the type, else that of the type; in both cases a multiple of 2 to `shift`.
fn within(any: &Fact, fact: Fact, shift: u32) -> Fact {
    if fact.low >= any.low && fact.high <= any.high {
        Fact { shift: fact.shift.max(shift), ..fact }
    } else {
        Fact { shift, ..any.clone() }
    }
}

fn mul(any: &Fact, a: &Fact, b: &Fact) -> Fact {
    let products = [a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high];
    let low = products.iter().copied().min().unwrap_or(any.low);
    let high = products.iter().copied().max().unwrap_or(any.high);
    within(any, Fact::between(low, high), (a.shift + b.shift).min(63))
}
