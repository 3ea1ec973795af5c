//! Bounds checks and polls ahead of a loop.
//!
//! A loop that only computes and reads, with a step of 1, is often known to stay in bounds when it begins: indices that it does
//! not change are compared once, and its count by where it begins and ends. If all are in bounds, and the quantum has fuel
//! for all iterations, a version of the loop is run that neither checks nor polls; else, the loop as it stands.

use super::lanes::Repr;
use super::writer::Writer;
use crate::safety::Last;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, InstBuilder, Value as Ssa, types};
use vm_ir::Value;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Effect, Shape};

/// The most ops of a loop of which there are two versions.
const OPS: usize = 64;

/// What an index comes to in a loop.
enum Index {
    /// Numbers from this to this, both of eight bytes.
    Between(Ssa, Ssa),
    /// The loop's count.
    Count,
}

impl<'k> Writer<'_, 'k> {
    /// A `for` of threads on uniform bounds, in two versions where that gains something.
    pub(super) fn for_versions(&mut self, op: &'k Op, low: Ssa, end: Block) {
        let initial = &op.operands[3..];
        let Some(quiet) = self.stays_quiet(op, low) else {
            return self.for_from(op, None, low, initial, end);
        };
        let counters = self.counters();
        let [fast, plain] = [0; 2].map(|_| self.b.create_block());
        self.b.ins().brif(quiet, fast, &[], plain, &[]);
        self.b.seal_block(fast);
        self.b.seal_block(plain);
        self.b.switch_to_block(fast);
        if self.takes_fuel(op)
            && let Some((quantum, fuel)) = counters
        {
            let [from, to] = [low, self.first(op.operands[1])].map(|one| self.wide(one));
            let zero = self.b.ins().iconst(types::I64, 0);
            let count = self.b.ins().isub(to, from);
            let count = self.b.ins().smax(count, zero);
            let left = self.b.ins().isub(quantum, count);
            self.set_counters(Some((left, fuel)));
        }
        let cancel = self.cancel.take();
        self.in_bounds = true;
        self.for_from(op, None, low, initial, end);
        self.in_bounds = false;
        self.cancel = cancel;
        self.b.set_cold_block(plain);
        self.b.switch_to_block(plain);
        self.for_from(op, None, low, initial, end);
    }

    fn takes_fuel(&self, op: &Op) -> bool {
        let poll = self.safety.loop_of(op).and_then(|planned| planned.poll);
        self.cancel.is_some() && poll.is_some_and(|poll| poll.takes_fuel)
    }

    /// Whether all that a loop checks is in bounds throughout, and the quantum is enough; `None` where there is nothing to
    /// gain, or it can't be told.
    fn stays_quiet(&mut self, op: &'k Op, low: Ssa) -> Option<Ssa> {
        let body = &op.regions[0];
        let known = self.safety.ranges().loop_of(op).copied()?;
        let step = self.first(op.operands[2]);
        let high = self.first(op.operands[1]);
        let poll = self.safety.loop_of(op).and_then(|planned| planned.poll).filter(|_| self.cancel.is_some());
        let simple = |op: &Op| {
            op.regions.is_empty()
                && matches!(op.code.effect(), Effect::Pure | Effect::Read)
                && self.safety.charge_before(op, self.width as u64).is_none()
        };
        let threads = self.width as u64;
        if self.in_bounds
            || !known.steps_up
            || self.constant(step) != Some(1)
            || body.ops.len() > OPS
            || !body.ops.iter().all(simple)
            || poll.is_some_and(|poll| poll.charge(threads).is_some())
        {
            return None;
        }
        let [from, to] = [low, high].map(|one| self.wide(one));
        let mut holds = Vec::new();
        for access in &body.ops {
            self.access_ahead(access, body, from, to, &mut holds)?;
        }
        if holds.is_empty() {
            return None;
        }
        if self.takes_fuel(op) {
            let (quantum, _) = self.counters()?;
            // What is left cannot overflow if it is positive; a loop that doesn't run goes either way.
            let count = self.b.ins().isub(to, from);
            holds.push(self.b.ins().icmp(IntCC::SignedLessThanOrEqual, from, to));
            holds.push(self.b.ins().icmp(IntCC::UnsignedLessThanOrEqual, count, quantum));
        }
        holds.into_iter().reduce(|a, b| self.b.ins().band(a, b))
    }

    /// Adds what has to hold for an access to be in bounds throughout a loop from one count to another; `None` if that can't
    /// be told.
    fn access_ahead(
        &mut self,
        op: &Op,
        body: &Region,
        from: Ssa,
        to: Ssa,
        holds: &mut Vec<Ssa>,
    ) -> Option<()> {
        let Some(known) = self.safety.access(op).cloned() else { return Some(()) };
        if !matches!(op.code.shape(), Shape::Load) {
            return None;
        }
        if let Last::Bytes { .. } = known.last {
            return None;
        }
        let place = op.place?;
        let (rank, _) = self.kernel.place(place)?;
        let lanes = i64::from(self.kernel.type_of(op.result()?).lanes());
        for (dimension, value) in op.operands[..rank].iter().enumerate() {
            let in_row = dimension + 1 == rank && self.kernel.surface(place).is_none();
            let checked = if in_row { known.last.is_checked() } else { known.checks(dimension) };
            if !checked {
                continue;
            }
            let extent = match place {
                Place::View(view) => {
                    let extent = *self.views.get(usize::from(view))?.as_ref()?.extents.get(dimension)?;
                    self.extent_value(extent)
                }
                Place::Shared(array) => {
                    let extent = *self.kernel.shared().get(usize::from(array))?.dims.get(dimension)?;
                    self.b.ins().iconst(types::I64, i64::from(extent))
                }
                Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => return None,
            };
            let room = if in_row { lanes - 1 } else { 0 };
            let (first, last) = match self.index_ahead(*value, body)? {
                Index::Between(first, last) => (first, last),
                Index::Count => (from, self.b.ins().iadd_imm_s(to, -1)),
            };
            let most = if room == 0 { extent } else { self.b.ins().iadd_imm_s(extent, -room) };
            holds.push(self.b.ins().icmp(IntCC::SignedLessThan, last, most));
            holds.push(self.b.ins().icmp_imm_s(IntCC::SignedGreaterThanOrEqual, first, 0));
        }
        Some(())
    }

    /// What an index comes to in a loop; `None` where it is computed there.
    fn index_ahead(&mut self, value: Value, body: &Region) -> Option<Index> {
        if body.args.first() == Some(&value) {
            return Some(Index::Count);
        }
        let inside = body.args.contains(&value) || body.ops.iter().any(|op| op.results.contains(&value));
        if inside {
            return None;
        }
        match self.repr(value) {
            Repr::Splat(one) => {
                let one = self.wide(one);
                Some(Index::Between(one, one))
            }
            // The last does not overflow.
            Repr::Affine { base, stride, low, high }
                if stride > 0 && low > i64::MIN >> 1 && high < i64::MAX >> 1 =>
            {
                let first = self.wide(base);
                let last = self.b.ins().iadd_imm_s(first, stride * (self.width as i64 - 1));
                Some(Index::Between(first, last))
            }
            _ => None,
        }
    }
}
