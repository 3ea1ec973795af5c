//! What is kept in memory from one loop over threads to another, what is rematerialised instead, and where it lies.

use super::{BLOCK, Level, Maker, NOWHERE, Plan, Room, Scope, Slot, Step, visible};
use vm_ir::Value;
use vm_ir::limits::WARP;
use vm_ir::module::Op;
use vm_ir::op::Shape;
use vm_ir::valid::Uniformity;

/// The longest chain of ops that is rematerialised.
const REMAT_DEPTH: usize = 6;

impl<'k> Maker<'k, '_> {
    fn used(&mut self, value: Value, scope: Scope) {
        self.step();
        if visible(&self.scopes, self.defs[value.index()], scope) {
            return;
        }
        let of_threads = self.scopes[scope].level == Level::Thread;
        if of_threads && self.loaded[value.index()] == scope {
            return;
        }
        if of_threads && let Some(op) = self.rematerialisable(value, scope, REMAT_DEPTH) {
            self.loaded[value.index()] = scope;
            op.operands.iter().for_each(|v| self.used(*v, scope));
            self.scopes[scope].remat.push(op);
            return;
        }
        self.kept[value.index()] = true;
        if of_threads {
            self.loaded[value.index()] = scope;
            self.scopes[scope].loads.push(value);
        }
    }

    /// The op that a thread may rematerialise in a scope rather than keep its result: all that it takes, `depth` ops deep,
    /// is at hand there or rematerialisable too.
    fn rematerialisable(&self, value: Value, scope: Scope, depth: usize) -> Option<&'k Op> {
        self.step();
        let op = self.cheap[value.index()].filter(|_| depth > 0)?;
        let at_hand = |v: &Value| {
            visible(&self.scopes, self.defs[v.index()], scope)
                || self.loaded[v.index()] == scope
                || self.rematerialisable(*v, scope, depth - 1).is_some()
        };
        op.operands.iter().all(at_hand).then_some(op)
    }

    fn used_within(&mut self, op: &Op, scope: Scope) {
        for (i, value) in op.operands.iter().enumerate() {
            // A shuffle finds its value in memory.
            if i == 0 && op.code.shape() == Shape::Shuffle && !(self.whole_warps && self.in_registers(op)) {
                let around = self.scopes[scope].parent.unwrap_or(BLOCK);
                self.kept[value.index()] |= !visible(&self.scopes, self.defs[value.index()], around);
            } else {
                self.used(*value, scope);
            }
        }
        for region in &op.regions {
            region.ops.iter().for_each(|op| self.used_within(op, scope));
            region.yields.iter().for_each(|v| self.used(*v, scope));
        }
    }

    pub(super) fn uses(&mut self, steps: &[Step<'k>], scope: Scope) {
        let level = self.scopes[scope].level;
        for step in steps {
            match step {
                Step::Once(op) => op.operands.iter().for_each(|v| self.used(*v, scope)),
                Step::Control { op, regions } => {
                    let yields = op.regions.iter().flat_map(|r| &r.yields);
                    for value in op.operands.iter().chain(yields) {
                        if self.is_uniform(*value, level) {
                            self.used(*value, scope);
                        }
                    }
                    regions.iter().for_each(|steps| self.uses(steps, scope));
                }
                Step::Warps { scope, steps } => self.uses(steps, *scope),
                Step::Threads { scope, ops, copies } => {
                    ops.iter().for_each(|op| self.used_within(op, *scope));
                    copies.iter().for_each(|(from, _)| self.used(*from, *scope));
                }
                Step::Lockstep { scope: inner, op, copies } => {
                    op.operands[1..3].iter().for_each(|v| self.used(*v, scope));
                    op.regions[0].ops.iter().for_each(|op| self.used_within(op, *inner));
                    copies.iter().for_each(|(from, _)| self.used(*from, *inner));
                }
            }
        }
    }

    pub(super) fn finish(self, steps: Vec<Step<'k>>) -> Plan<'k> {
        let mut at = 0u64;
        let mut take = |bytes: u64| {
            let offset = at;
            at += (bytes + 15) & !15;
            u32::try_from(offset).unwrap_or(u32::MAX)
        };
        let shared = self.kernel.shared().iter().map(|array| take(array.bytes())).collect();
        let block_bytes = take(0);
        take(u64::from(block_bytes) * u64::from(self.kernel.cluster() - 1));
        let shared_bytes = take(0);
        let threads = u64::from(self.kernel.cluster_threads());
        let mut slots = vec![None; self.defs.len()];
        // The results of a loop whose carried values live in memory are where those are.
        let shares = |value: usize| self.same[value].filter(|c| self.defs[c.index()] == NOWHERE);
        let mut later = Vec::new();
        for (index, definition) in self.kernel.values().iter().enumerate() {
            if !self.kept[index] {
                continue;
            }
            if let Some(carried) = shares(index) {
                later.push((index, carried));
                continue;
            }
            let def = self.defs[index];
            let block = self.facts.uniformity.get(index) == Some(&Uniformity::Block);
            let room = match def {
                _ if block => Room::Block,
                NOWHERE => Room::Thread,
                _ if self.scopes[def].level == Level::Warp => Room::Warp,
                _ => Room::Thread,
            };
            let count = match room {
                Room::Block => 1,
                Room::Warp => threads.div_ceil(u64::from(WARP)),
                Room::Thread => threads,
            };
            let offset = take(count * u64::from(definition.ty.bytes()));
            // What does not fit is too much for the scratch memory.
            let offset = i32::try_from(offset).unwrap_or(i32::MAX);
            slots[index] = Some(Slot { offset, room });
        }
        for (index, carried) in later {
            slots[index] = slots[carried.index()];
        }
        let bytes = u64::from(take(0));
        let (scopes, defs, spent, whole_warps) = (self.scopes, self.defs, self.steps.get(), self.whole_warps);
        let plan =
            Plan { steps, scopes, defs, slots, shared, block_bytes, shared_bytes, bytes, whole_warps, spent };
        tracing::trace!(kernel = self.kernel.name(), steps = plan.spent, "plan");
        plan
    }
}
