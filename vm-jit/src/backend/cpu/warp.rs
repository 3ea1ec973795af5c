//! Ops between the threads of a warp: their values are in memory, an element for each thread.

use super::lanes::{Repr, clif, own, vector};
use super::plan::{Room, Slot, bytes_of};
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use vm_ir::limits::WARP;
use vm_ir::module::Op;
use vm_ir::op::Opcode;
use vm_ir::{Scalar, Value};

impl<'k> Writer<'_, 'k> {
    /// Where a value's elements are, if each thread has its own.
    fn elements_of(&self, value: Value) -> Option<Slot> {
        let around = match self.threads {
            Some(_) => self.plan.scopes[self.scope].parent.unwrap_or(self.scope),
            None => self.scope,
        };
        if self.plan.visible(value, around) {
            return None;
        }
        self.plan.slots[value.index()].filter(|slot| slot.room == Room::Thread)
    }

    /// A value that is uniform in the warp.
    fn uniform(&mut self, value: Value) -> Repr {
        let outer = self.scope;
        if self.threads.is_some() {
            self.scope = self.plan.scopes[outer].parent.unwrap_or(outer);
        }
        let repr = match self.plan.visible(value, self.scope) {
            true => self.env[value.index()].clone().unwrap_or_else(|| Repr::Each(Vec::new())),
            false => self.load_slot(value),
        };
        self.scope = outer;
        repr
    }

    pub(super) fn shuffle(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let value = op.operands[0];
        if self.width == WARP as usize
            && let Some(by) = self.splat_of(op.operands[1])
        {
            return self.shuffle_registers(op, result, by);
        }
        let Some(slot) = self.elements_of(value) else {
            let repr = self.uniform(value);
            self.set(result, repr);
            return;
        };
        let scalar = self.scalar(value);
        let lanes = usize::from(self.kernel.type_of(value).lanes());
        let size = i64::from(bytes_of(self.kernel, value));
        let Some(threads) = self.threads else { return };
        let by = self.each(op.operands[1]);
        let lane = self.b.ins().band_imm_s(threads.index, i64::from(WARP) - 1);
        let first = self.b.ins().isub(threads.index, lane);
        let mut all = Vec::new();
        for (thread, by) in by.into_iter().enumerate() {
            let lane = self.b.ins().iadd_imm_s(lane, thread as i64);
            let by = self.b.ins().uextend(types::I64, by);
            let by = self.b.ins().band_imm_s(by, i64::from(WARP) - 1);
            let from = match op.code {
                Opcode::Shuffle => by,
                Opcode::ShuffleXor => self.b.ins().bxor(lane, by),
                Opcode::ShuffleUp => {
                    let there = self.b.ins().icmp(IntCC::UnsignedGreaterThanOrEqual, lane, by);
                    let from = self.b.ins().isub(lane, by);
                    self.b.ins().select(there, from, lane)
                }
                _ => {
                    let from = self.b.ins().iadd(lane, by);
                    let there = self.b.ins().icmp_imm_s(IntCC::UnsignedLessThan, from, i64::from(WARP));
                    self.b.ins().select(there, from, lane)
                }
            };
            let from = self.b.ins().iadd(first, from);
            let at = self.b.ins().imul_imm_s(from, size);
            let at = self.b.ins().iadd(self.scratch, at);
            let offset = slot.offset;
            let repr = self.load_elements(own(), at, offset, scalar, lanes);
            if self.width == 1 {
                self.set(result, repr);
                return;
            }
            all.extend(self.each_of(&repr, scalar, lanes));
        }
        self.set(result, Repr::Each(all));
    }

    /// What a constant is that all threads have.
    fn splat_of(&mut self, value: Value) -> Option<i64> {
        match self.repr(value) {
            Repr::Splat(one) => self.constant(one),
            _ => None,
        }
    }

    /// A shuffle by a constant of a warp that is run as a whole.
    fn shuffle_registers(&mut self, op: &Op, result: Value, by: i64) {
        let by = by as usize & (WARP as usize - 1);
        let from = |lane: usize| match op.code {
            Opcode::Shuffle => by,
            Opcode::ShuffleXor => lane ^ by,
            Opcode::ShuffleUp => lane.checked_sub(by).unwrap_or(lane),
            _ if lane + by < WARP as usize => lane + by,
            _ => lane,
        };
        let repr = match self.repr(op.operands[0]) {
            Repr::Splat(one) => Repr::Splat(one),
            repr => {
                let (scalar, width) = (self.scalar(result), self.width);
                self.moved(&[repr], &[width], scalar, width, |lane| (0, from(lane)))
            }
        };
        self.set(result, repr);
    }

    /// The elements of all of the warp.
    fn of_warp(&mut self, slot: Slot, value: Value) -> Repr {
        let scalar = self.scalar(value);
        let base = match self.thread_index() {
            Some(first) => {
                let at = self.b.ins().imul_imm_s(first, i64::from(bytes_of(self.kernel, value)));
                self.b.ins().iadd(self.scratch, at)
            }
            None => self.scratch,
        };
        if scalar == Scalar::Bool {
            let halves = [0, 16].map(|at| self.b.ins().load(types::I8X16, own(), base, slot.offset + at));
            return Repr::Chunks(halves.to_vec());
        }
        let all = self.load_elements(own(), base, slot.offset, scalar, WARP as usize);
        match vector(scalar) {
            Some(_) => all,
            None => Repr::Each(self.each_of(&all, scalar, WARP as usize)),
        }
    }

    /// `vote.any`, `vote.all` and `ballot`.
    pub(super) fn vote(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let value = op.operands[0];
        let Some(slot) = self.elements_of(value) else {
            let repr = self.uniform(value);
            let one = self.each_of(&repr, Scalar::Bool, 1)[0];
            let one = match op.code {
                Opcode::Ballot => {
                    let wide = self.b.ins().uextend(types::I32, one);
                    self.b.ins().ineg(wide)
                }
                _ => one,
            };
            self.set(result, Repr::Splat(one));
            return;
        };
        let Repr::Chunks(halves) = self.of_warp(slot, value) else { return };
        let [low, high] = halves[..] else { return };
        let one = match op.code {
            Opcode::VoteAny => {
                let any = self.b.ins().bor(low, high);
                self.b.ins().vany_true(any)
            }
            Opcode::VoteAll => {
                let all = self.b.ins().band(low, high);
                self.b.ins().vall_true(all)
            }
            _ => {
                let [low, high] = [low, high].map(|half| {
                    let top = self.b.ins().ineg(half);
                    self.b.ins().vhigh_bits(types::I32, top)
                });
                let high = self.b.ins().ishl_imm_s(high, 16);
                self.b.ins().bor(low, high)
            }
        };
        self.set(result, Repr::Splat(one));
    }

    /// Every lane combines its own with that of lane xor 16, then 8, 4, 2 and 1; what lane 0 then has, all have.
    pub(super) fn reduce(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let value = op.operands[0];
        let scalar = self.scalar(value);
        self.extreme = self.floats.extreme(op);
        let Some(code) = op.code.combines() else { return };
        let Some(slot) = self.elements_of(value) else {
            let repr = self.uniform(value);
            let mut one = self.each_of(&repr, scalar, 1)[0];
            for _ in 0..5 {
                one = self.combine(code, scalar, one, one);
            }
            self.set(result, Repr::Splat(one));
            return;
        };
        let mut all = match (self.of_warp(slot, value), vector(scalar)) {
            (Repr::Chunks(mut chunks), Some(_)) => {
                while chunks.len() > 1 {
                    chunks = self.halve(code, scalar, &chunks);
                }
                let lanes = self.type_of(chunks[0]).lane_count() as usize;
                self.each_of(&Repr::Chunks(chunks), scalar, lanes)
            }
            (Repr::Chunks(halves), None) => {
                // Bools: and, or and exclusive or go by bytes.
                let both = self.halve(code, Scalar::I32, &halves);
                (0..16).map(|lane| self.b.ins().extractlane(both[0], lane)).collect()
            }
            (other, _) => self.each_of(&other, scalar, WARP as usize),
        };
        while all.len() > 1 {
            all = self.halve(code, scalar, &all);
        }
        self.set(result, Repr::Splat(all[0]));
    }

    fn halve(&mut self, code: Opcode, scalar: Scalar, all: &[Ssa]) -> Vec<Ssa> {
        let (low, high) = all.split_at(all.len() / 2);
        low.iter().zip(high).map(|(a, b)| self.combine(code, scalar, *a, *b)).collect()
    }

    /// Two elements, or vectors of them, combined.
    fn combine(&mut self, code: Opcode, scalar: Scalar, a: Ssa, b: Ssa) -> Ssa {
        debug_assert!(self.type_of(a).is_vector() || self.type_of(a) == clif(scalar));
        self.same(code, scalar, &[a, b]).unwrap_or(a)
    }
}
