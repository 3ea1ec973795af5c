//! Integers that go in steps from thread to thread: they stay so through sums, products with constants and divisions, and what
//! they are compared with says how many threads are before it.

use super::lanes::{Repr, clif};
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, InstBuilder, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::module::Op;
use vm_ir::op::Opcode;

/// The range of 64-bit integers of which none is known: they may wrap, the same way in every element.
const UNKNOWN: (i64, i64) = (i64::MIN, i64::MAX);
/// The longest step of such ones.
const LONGEST: i64 = 1 << 40;

fn fits(scalar: Scalar, low: i64, high: i64) -> bool {
    let most = (scalar.mask() >> 1) as i64;
    low >= -most && high <= most
}

/// Step and range, times a positive number; products of 64 bits may wrap.
fn scaled(to: Scalar, [stride, low, high]: [i64; 3], by: i64) -> Option<(i64, i64, i64)> {
    let stride = stride.checked_mul(by)?;
    let range = low.checked_mul(by).zip(high.checked_mul(by)).filter(|(low, high)| fits(to, *low, *high));
    let unknown = (to == Scalar::I64 && stride.abs() <= LONGEST).then_some(UNKNOWN);
    let (low, high) = range.or(unknown)?;
    Some((stride, low, high))
}

impl Writer<'_, '_> {
    /// A step from element to element stays one through sums, products with constants, and widening.
    pub(super) fn affine(&mut self, op: &Op, from: Scalar, to: Scalar, args: &[Repr]) -> Option<Repr> {
        let constant = |this: &Self, repr: &Repr| match repr {
            Repr::Splat(one) => this.constant(*one),
            _ => None,
        };
        match (op.code, args) {
            (Opcode::Sext | Opcode::Zext, [Repr::Affine { base, stride, low, high }]) => {
                if op.code == Opcode::Zext && *low < 0 || !fits(from, *low, *high) {
                    return None;
                }
                let base = self.b.ins().sextend(clif(to), *base);
                Some(Repr::Affine { base, stride: *stride, low: *low, high: *high })
            }
            (Opcode::Trunc, [Repr::Affine { base, stride, low, high }]) if fits(to, *low, *high) => {
                let base = self.b.ins().ireduce(clif(to), *base);
                Some(Repr::Affine { base, stride: *stride, low: *low, high: *high })
            }
            (Opcode::Add | Opcode::Mul, [splat @ Repr::Splat(_), affine @ Repr::Affine { .. }]) => {
                let swapped = [affine.clone(), splat.clone()];
                self.affine(op, from, to, &swapped)
            }
            (Opcode::Add | Opcode::Sub, [Repr::Affine { base, stride, low, high }, Repr::Splat(other)]) => {
                // What is not known to fit is added in 64 bits only: those wrap the same way in every element.
                let range = constant(self, &args[1]).and_then(|by| match op.code {
                    Opcode::Add => low.checked_add(by).zip(high.checked_add(by)),
                    _ => low.checked_sub(by).zip(high.checked_sub(by)),
                });
                let (low, high) = range.unwrap_or(UNKNOWN);
                let within = to == Scalar::I64 || fits(to, low, high);
                if !within && (to != Scalar::I32 || self.alone.is_none()) {
                    return None;
                }
                let base = match op.code {
                    Opcode::Add => self.b.ins().iadd(*base, *other),
                    _ => self.b.ins().isub(*base, *other),
                };
                if !within {
                    return self.unless_it_wraps(base, *stride);
                }
                Some(Repr::Affine { base, stride: *stride, low, high })
            }
            (Opcode::Mul, [Repr::Affine { base, stride, low, high }, by]) => {
                let by = constant(self, by).filter(|by| *by > 0)?;
                let (stride, low, high) = scaled(to, [*stride, *low, *high], by)?;
                let base = self.b.ins().imul_imm_s(*base, by);
                Some(Repr::Affine { base, stride, low, high })
            }
            (Opcode::Shl, [Repr::Affine { base, stride, low, high }, by]) => {
                let by = constant(self, by).filter(|by| (0..31).contains(by))?;
                let (stride, low, high) = scaled(to, [*stride, *low, *high], 1 << by)?;
                let base = self.b.ins().ishl_imm_s(*base, by);
                Some(Repr::Affine { base, stride, low, high })
            }
            _ => None,
        }
    }

    /// Numbers of four bytes that go in steps, of which any might be the first: mostly none of them overflows. Where one does,
    /// each thread goes by itself, from the beginning.
    fn unless_it_wraps(&mut self, base: Ssa, stride: i64) -> Option<Repr> {
        let alone = self.alone.filter(|_| (1..=1 << 16).contains(&stride))?;
        let most = i64::from(i32::MAX);
        let above_least = self.b.ins().iadd_imm_s(base, most);
        let room = self.int(types::I32, 2 * most - stride * (self.width as i64 - 1));
        let fits = self.b.ins().icmp(IntCC::UnsignedLessThanOrEqual, above_least, room);
        self.or_alone(fits, alone);
        Some(Repr::Affine { base, stride, low: -most, high: most })
    }

    /// Goes on where something holds for the threads that are run together; else each goes by itself.
    fn or_alone(&mut self, holds: Ssa, alone: Block) {
        let on = self.b.create_block();
        self.b.ins().brif(holds, on, &[], alone, &[]);
        self.parted = true;
        self.b.seal_block(on);
        self.b.switch_to_block(on);
    }

    /// A number that goes in steps, divided by one: mostly all threads that are run together have the same quotient, and remainders
    /// that go in the same steps. Where they don't, each thread goes by itself, from the beginning.
    pub(super) fn quotient(
        &mut self,
        op: &Op,
        scalar: Scalar,
        args: &[Repr],
        elements: usize,
    ) -> Option<Repr> {
        let alone = self.alone.filter(|_| elements == self.width)?;
        let (divides, signed) = match op.code {
            Opcode::DivS => (Opcode::DivS, true),
            Opcode::RemS => (Opcode::DivS, true),
            Opcode::DivU | Opcode::RemU => (Opcode::DivU, false),
            _ => return None,
        };
        let [Repr::Affine { base, stride, low, high }, Repr::Splat(by)] = args else { return None };
        let fits = *low >= 0 && *high <= (scalar.mask() >> 2) as i64 && (1..=1 << 16).contains(stride);
        if !fits {
            return None;
        }
        let all = self.same(divides, scalar, &[*base, *by])?;
        let whole = self.b.ins().imul(all, *by);
        let first = self.b.ins().isub(*base, whole);
        let last = self.b.ins().iadd_imm_s(first, stride * (elements as i64 - 1));
        let below = if signed { IntCC::SignedLessThan } else { IntCC::UnsignedLessThan };
        let same = self.b.ins().icmp(below, last, *by);
        self.or_alone(same, alone);
        Some(match op.code {
            Opcode::DivS | Opcode::DivU => Repr::Splat(all),
            _ => Repr::Affine { base: first, stride: *stride, low: 0, high: *high },
        })
    }

    /// A number that goes in steps, compared with one: masks of four bytes, by how many steps there are between the two.
    pub(super) fn compare_steps(
        &mut self,
        op: &Op,
        scalar: Scalar,
        args: &[Repr],
        elements: usize,
    ) -> Option<Vec<Ssa>> {
        let (code, affine, other) = match args {
            [affine @ Repr::Affine { .. }, Repr::Splat(other)] => (op.code, affine, *other),
            [Repr::Splat(other), affine @ Repr::Affine { .. }] => {
                let turned = match op.code {
                    Opcode::LtS => Opcode::GtS,
                    Opcode::LeS => Opcode::GeS,
                    Opcode::GtS => Opcode::LtS,
                    Opcode::GeS => Opcode::LeS,
                    _ => return None,
                };
                (turned, affine, *other)
            }
            _ => return None,
        };
        let condition = match code {
            Opcode::LtS => IntCC::SignedLessThan,
            Opcode::LeS => IntCC::SignedLessThanOrEqual,
            Opcode::GtS => IntCC::SignedGreaterThan,
            Opcode::GeS => IntCC::SignedGreaterThanOrEqual,
            Opcode::Eq => IntCC::Equal,
            Opcode::Ne => IntCC::NotEqual,
            _ => return None,
        };
        let Repr::Affine { base, stride, low, high } = affine else { return None };
        let near = -(1i64 << 61)..=1 << 61;
        let wide = matches!(scalar, Scalar::I32 | Scalar::I64) && elements.is_multiple_of(4);
        if !wide || !(1..=1 << 16).contains(stride) || !near.contains(low) || !near.contains(high) {
            return None;
        }
        let steps = move |lane: usize| lane as i64 * stride;
        if let (Some(base), Some(other)) = (self.constant(*base), self.constant(other)) {
            let holds = |lane: usize| {
                let (one, other) = (i128::from(base + steps(lane)), i128::from(other));
                match condition {
                    IntCC::SignedLessThan => one < other,
                    IntCC::SignedLessThanOrEqual => one <= other,
                    IntCC::SignedGreaterThan => one > other,
                    IntCC::SignedGreaterThanOrEqual => one >= other,
                    IntCC::Equal => one == other,
                    _ => one != other,
                }
            };
            let masks = (0..elements / 4).map(|at| self.four(|lane| -i32::from(holds(at * 4 + lane))));
            return Some(masks.collect());
        }
        let [base, other] = [*base, other].map(|one| self.wide(one));
        if let Some(vote) = self.vote_of_steps(condition, base, steps(elements - 1), other)
            && let Some(result) = op.result()
        {
            self.votes.insert(result, vote);
        }
        // As far as the elements reach, and one more at either end.
        let before = self.b.ins().iadd_imm_s(base, -1);
        let behind = self.b.ins().iadd_imm_s(base, steps(elements));
        let clamped = self.b.ins().smax(other, before);
        let clamped = self.b.ins().smin(clamped, behind);
        let between = self.b.ins().isub(clamped, base);
        let between = self.b.ins().ireduce(types::I32, between);
        let between = self.b.ins().splat(types::I32X4, between);
        let masks = (0..elements / 4).map(|at| {
            let steps = self.four(|lane| steps(at * 4 + lane) as i32);
            self.b.ins().icmp(condition, steps, between)
        });
        Some(masks.collect())
    }

    /// A vector of four constants.
    pub(super) fn four(&mut self, of: impl Fn(usize) -> i32) -> Ssa {
        let bytes: Vec<u8> = (0..4).flat_map(|lane| of(lane).to_le_bytes()).collect();
        let data = self.b.func.dfg.constants.insert(bytes.into());
        self.b.ins().vconst(types::I32X4, data)
    }
}
