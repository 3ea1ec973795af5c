//! Loops in which the threads of a block go through a row side by side.
//!
//! `for %j = %thread to %n step 256` of a block of 256 threads takes 256 neighbours in each iteration. Were some threads
//! run through all of their iterations before the next are begun, the row would be read in long jumps, and many times. So all
//! threads take an iteration, then all the next: a loop of the block with one over its threads inside, and what the loop carries
//! is in memory between.

use super::lanes::{Repr, clif};
use super::plan::{Level, Scope, level_of};
use super::writer::Writer;
use crate::range::Ranges;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use std::collections::HashMap;
use vm_ir::Value;
use vm_ir::module::Op;
use vm_ir::op::{Axis, Opcode, Shape};
use vm_ir::valid::{KernelFacts, Uniformity};

/// Finds such loops.
pub(super) struct Strides<'k> {
    ranges: &'k Ranges<'k>,
    defs: HashMap<Value, &'k Op>,
    /// Are there ops for which threads wait?
    waits: bool,
}

impl<'k> Strides<'k> {
    pub(super) fn of(ranges: &'k Ranges<'k>) -> Strides<'k> {
        fn walk<'k>(region: &'k vm_ir::module::Region, defs: &mut HashMap<Value, &'k Op>, waits: &mut bool) {
            for op in &region.ops {
                *waits |= level_of(op) != Level::Thread;
                defs.extend(op.results.iter().map(|value| (*value, op)));
                op.regions.iter().for_each(|region| walk(region, defs, waits));
            }
        }
        let (mut defs, mut waits) = (HashMap::new(), false);
        walk(ranges.kernel().body(), &mut defs, &mut waits);
        Strides { ranges, defs, waits }
    }

    /// Is it a loop of that kind? Each thread begins at its own number, and the step is no less than the block.
    pub(super) fn has(&self, op: &Op, facts: &KernelFacts) -> bool {
        let [threads, 1, 1] = self.ranges.kernel().block() else { return false };
        let alone = op.code.shape() == Shape::For && level_of(op) == Level::Thread;
        if !alone || !self.waits || self.ranges.kernel().cluster() > 1 {
            return false;
        }
        let of_threads = |value: &Value| facts.uniformity(*value) == Uniformity::Thread;
        let carried = &op.regions[0].args[1..];
        let known = self.ranges.loop_of(op).is_some_and(|known| known.steps_up && known.room > 64);
        known
            && self.is_thread_number(op.operands[0])
            && self.constant(op.operands[2]).is_some_and(|step| step >= i64::from(threads))
            && facts.uniformity(op.operands[1]) == Uniformity::Block
            && carried.iter().chain(&op.results).all(of_threads)
            && op.regions[0].ops.iter().all(|op| !has_loop(op))
    }

    fn is_thread_number(&self, value: Value) -> bool {
        match self.defs.get(&value) {
            Some(op) if matches!(op.code, Opcode::Sext | Opcode::Zext) => {
                self.is_thread_number(op.operands[0])
            }
            Some(op) if op.code == Opcode::ThreadId => op.axis() == Axis::X,
            Some(op) => op.code == Opcode::LocalIndex,
            None => false,
        }
    }

    /// What a value is, if it is a constant.
    pub(super) fn constant(&self, value: Value) -> Option<i64> {
        let op = self.defs.get(&value).filter(|op| op.code == Opcode::Const)?;
        let bits = op.immediates.first()?;
        Some(vm_ir::format::signed(self.ranges.kernel().type_of(value).scalar(), *bits))
    }
}

fn has_loop(op: &Op) -> bool {
    let inside = |op: &Op| op.regions.iter().any(|region| region.ops.iter().any(has_loop));
    matches!(op.code.shape(), Shape::For | Shape::While) || inside(op)
}

impl<'a, 'k> Writer<'a, 'k> {
    /// The loop; `copies` are what it carries on.
    pub(super) fn lockstep(&mut self, op: &'k Op, scope: Scope, copies: &'a [(Value, Value)]) {
        self.charge_before(op);
        let (high, step) = (self.first(op.operands[1]), self.first(op.operands[2]));
        let ty = self.type_of(high);
        let (head, end) = (self.b.create_block(), self.b.create_block());
        let base = self.b.append_block_param(head, ty);
        let zero = self.b.ins().iconst(ty, 0);
        let runs = self.b.ins().icmp(IntCC::SignedLessThan, zero, high);
        self.b.ins().brif(runs, head, &[zero.into()], end, &[]);
        self.b.switch_to_block(head);
        let inner = std::mem::replace(&mut self.scope, scope);
        self.iteration(op, base, high, copies);
        self.scope = inner;
        self.poll_point(op);
        let left = self.b.ins().isub(high, base);
        let more = self.b.ins().icmp(IntCC::UnsignedGreaterThan, left, step);
        let next = self.b.ins().iadd(base, step);
        self.b.ins().brif(more, head, &[next.into()], end, &[]);
        self.b.seal_block(head);
        self.b.seal_block(end);
        self.b.switch_to_block(end);
    }

    /// An iteration of all threads: of the first at `base`, of the others behind it as long as they are below `high`.
    fn iteration(&mut self, op: &'k Op, base: Ssa, high: Ssa, copies: &'a [(Value, Value)]) {
        let ty = self.type_of(base);
        let ops: Vec<&Op> = op.regions[0].ops.iter().collect();
        let width = self.together(&ops, copies);
        let count = self.b.ins().iconst(types::I64, i64::from(self.kernel.threads()));
        self.counted(count, width as i64, |w, index| {
            let at = w.sum_of(base, index);
            let (all, next) = (w.b.create_block(), w.b.create_block());
            let first = w.b.ins().icmp(IntCC::SignedLessThan, at, high);
            if width == 1 {
                w.b.ins().brif(first, all, &[], next, &[]);
            } else {
                let (some, unsure) = (w.b.create_block(), w.b.create_block());
                let last = w.b.ins().iadd_imm_s(at, width as i64 - 1);
                let last = w.b.ins().icmp(IntCC::SignedLessThan, last, high);
                w.b.ins().brif(last, all, &[], unsure, &[]);
                w.b.seal_block(unsure);
                w.b.switch_to_block(unsure);
                w.b.ins().brif(first, some, &[], next, &[]);
                w.b.seal_block(some);
                w.b.set_cold_block(some);
                w.b.switch_to_block(some);
                let left = w.b.ins().isub(high, at);
                let left = if ty == types::I64 { left } else { w.b.ins().sextend(types::I64, left) };
                w.counted(left, 1, |w, lane| {
                    let index = w.b.ins().iadd(index, lane);
                    let at = w.sum_of(base, index);
                    w.threads_iteration(op, 1, index, at, copies);
                });
                w.b.ins().jump(next, &[]);
            }
            w.b.seal_block(all);
            w.b.switch_to_block(all);
            w.threads_iteration(op, width, index, at, copies);
            w.b.ins().jump(next, &[]);
            w.b.seal_block(next);
            w.b.switch_to_block(next);
        });
    }

    fn sum_of(&mut self, base: Ssa, index: Ssa) -> Ssa {
        let by = match self.type_of(base) {
            types::I64 => index,
            ty => self.b.ins().ireduce(ty, index),
        };
        self.b.ins().iadd(base, by)
    }

    /// The loop's body for `width` threads from number `index`, the first of which is at `at`.
    fn threads_iteration(
        &mut self,
        op: &'k Op,
        width: usize,
        index: Ssa,
        at: Ssa,
        copies: &'a [(Value, Value)],
    ) {
        let body = &op.regions[0];
        self.width = width;
        self.threads = Some(self.place(index));
        let count = match width {
            1 => Repr::Splat(at),
            _ => Repr::Affine { base: at, stride: 1, low: i64::MIN, high: i64::MAX },
        };
        debug_assert_eq!(self.type_of(at), clif(self.scalar(body.args[0])));
        self.set(body.args[0], count);
        self.load_and_rematerialise();
        body.ops.iter().for_each(|op| self.op(op));
        self.store_copies(copies);
        let ops: Vec<&Op> = body.ops.iter().collect();
        let threads = u64::from(self.kernel.threads());
        self.charge_each(self.safety.charge_of_threads(&ops, threads, width as u64));
        self.threads = None;
        self.width = 1;
    }
}
