//! Splits a kernel at its barriers.
//!
//! A block is run by one thread of the machine, so the threads of the block become loops. Where they must wait for each
//! other the loop ends and another begins; what lives across that is kept in memory, an element for each thread. There
//! are three levels:
//!
//! | level | is run | splits at |
//! | --- | --- | --- |
//! | block | once | `barrier.block`, `load_uniform`, and what contains them |
//! | warp | in a loop over the warps | ops between the threads of a warp, and what contains them |
//! | thread | in a loop over threads | nothing |
//!
//! A cluster is run like one large block, whose threads are those of its blocks numbered through; each block has shared
//! arrays of its own. There "block" stands for the cluster.
//!
//! The validator proved that barriers are reached by whole blocks and warps, so the conditions around them are numbers
//! of the level. Pure ops whose operands are numbers of a level are computed there once.

mod keep;

use super::lockstep::Strides;
use crate::range::Ranges;
use std::cell::Cell;
use vm_ir::limits::WARP;
use vm_ir::module::{Op, ParamKind, Place, Region};
use vm_ir::op::{BarrierScope, Effect, Opcode, Shape};
use vm_ir::valid::{KernelFacts, Uniformity};
use vm_ir::view::Access;
use vm_ir::{Kernel, Scalar, Type, Value};

/// How many threads run something together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Thread,
    Warp,
    Block,
}

/// A stretch of code in which what is defined can be used as it is.
pub(super) type Scope = usize;

/// The scope of what the whole block knows.
pub(super) const BLOCK: Scope = 0;
/// In no scope: it lives in memory only.
const NOWHERE: Scope = usize::MAX;

pub(super) struct ScopeInfo<'k> {
    pub(super) parent: Option<Scope>,
    pub(super) level: Level,
    /// What comes from memory when a thread enters it.
    pub(super) loads: Vec<Value>,
    /// What is rematerialised then, in order.
    pub(super) remat: Vec<&'k Op>,
}

/// What is done at the level of a block or a warp.
pub(super) enum Step<'k> {
    /// Once, as numbers.
    Once(&'k Op),
    /// An op with regions, whose conditions are numbers of the level.
    Control { op: &'k Op, regions: Vec<Vec<Step<'k>>> },
    /// In a loop over the warps.
    Warps { scope: Scope, steps: Vec<Step<'k>> },
    /// In a loop over the threads of the block or of the warp; at last, values are copied, all at once.
    Threads { scope: Scope, ops: Vec<&'k Op>, copies: Vec<(Value, Value)> },
    /// A loop of the block whose body is run in a loop over the threads, which each begin at their own number; at the end
    /// of an iteration, values are copied, all at once.
    Lockstep { scope: Scope, op: &'k Op, copies: Vec<(Value, Value)> },
}

/// Where a value is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// One for the block.
    Block,
    /// One for each warp.
    Warp,
    /// One for each thread.
    Thread,
}

/// Where a value is kept in the scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) offset: i32,
    pub(super) room: Room,
}

pub(super) struct Plan<'k> {
    pub(super) steps: Vec<Step<'k>>,
    pub(super) scopes: Vec<ScopeInfo<'k>>,
    /// By value: the scope that defines it.
    defs: Vec<Scope>,
    /// By value.
    pub(super) slots: Vec<Option<Slot>>,
    /// Offset of each shared array.
    pub(super) shared: Vec<u32>,
    /// Bytes of the shared arrays of a block.
    pub(super) block_bytes: u32,
    /// Bytes of those of all blocks of the cluster.
    pub(super) shared_bytes: u32,
    /// Bytes of shared arrays and slots.
    pub(super) bytes: u64,
    /// Are all threads of a warp run together, and shuffled in registers?
    pub(super) whole_warps: bool,
    /// Ops and uses that were looked at to make it.
    pub(super) spent: u64,
}

/// Bytes that a value takes in memory.
pub(super) fn bytes_of(kernel: &Kernel, value: Value) -> u32 {
    kernel.type_of(value).bytes()
}

impl<'k> Plan<'k> {
    pub(super) fn of(facts: &KernelFacts, ranges: &'k Ranges<'k>) -> Plan<'k> {
        let kernel = ranges.kernel();
        let mut maker = Maker {
            kernel,
            facts,
            strides: Strides::of(ranges),
            scopes: vec![ScopeInfo {
                parent: None,
                level: Level::Block,
                loads: Vec::new(),
                remat: Vec::new(),
            }],
            defs: vec![NOWHERE; kernel.values().len()],
            cheap: vec![None; kernel.values().len()],
            kept: vec![false; kernel.values().len()],
            same: vec![None; kernel.values().len()],
            grouped: vec![0; kernel.values().len()],
            groups: 1,
            loaded: vec![BLOCK; kernel.values().len()],
            steps: Cell::new(0),
            whole_warps: false,
        };
        maker.whole_warps = maker.fit_registers();
        for param in kernel.params() {
            if let ParamKind::Scalar { value, .. } = param.kind {
                maker.defs[value.index()] = BLOCK;
            }
        }
        let mut ops: Vec<&Op> = kernel.body().ops.iter().collect();
        let steps = match kernel.tile() {
            // One thread does everything.
            Some(_) => {
                let mut steps = Vec::new();
                maker.flush(&mut ops, Level::Thread, BLOCK, &mut steps);
                steps
            }
            None => maker.steps(&ops, Level::Block, BLOCK),
        };
        maker.uses(&steps, BLOCK);
        maker.finish(steps)
    }

    /// Is what `value`'s scope defines at hand in `scope`?
    pub(super) fn visible(&self, value: Value, scope: Scope) -> bool {
        visible(&self.scopes, self.defs[value.index()], scope)
    }
}

fn visible(scopes: &[ScopeInfo<'_>], def: Scope, scope: Scope) -> bool {
    let mut at = Some(scope);
    while let Some(here) = at {
        if here == def {
            return true;
        }
        at = scopes[here].parent;
    }
    false
}

/// The level whose threads must come to an op together.
pub(super) fn level_of(op: &Op) -> Level {
    let own = match op.converges() {
        Some(BarrierScope::Block) => Level::Block,
        Some(BarrierScope::Warp) => Level::Warp,
        None => Level::Thread,
    };
    op.regions.iter().flat_map(|r| &r.ops).map(level_of).fold(own, Level::max)
}

/// Is it cheaper to rematerialise than to keep in memory? What begins with a thread's number is then also known to be in steps from
/// thread to thread.
fn is_cheap(op: &Op, ty: Type) -> bool {
    match op.code.shape() {
        _ if ty.is_vector() || !ty.scalar().is_int() => false,
        Shape::Id32 | Shape::Id64 => op.code.effect() == Effect::Pure,
        Shape::Const => true,
        Shape::Unary(_) | Shape::Binary(_) | Shape::Convert(..) => {
            use Opcode::*;
            matches!(op.code, Add | Sub | Mul | And | Or | Xor | Shl | ShrS | ShrU | Sext | Zext | Trunc)
        }
        _ => false,
    }
}

struct Maker<'k, 'f> {
    kernel: &'k Kernel,
    facts: &'f KernelFacts,
    strides: Strides<'k>,
    scopes: Vec<ScopeInfo<'k>>,
    defs: Vec<Scope>,
    /// By value: the op that defines it, if it is cheap.
    cheap: Vec<Option<&'k Op>>,
    /// Which values need memory.
    kept: Vec<bool>,
    /// By result of a loop: what it carries, which has the same memory.
    same: Vec<Option<Value>>,
    /// By value: the group of ops that defines it, as long as that is open.
    grouped: Vec<usize>,
    groups: usize,
    /// By value: the last scope of threads that loads it.
    loaded: Vec<Scope>,
    steps: Cell<u64>,
    whole_warps: bool,
}

impl<'k> Maker<'k, '_> {
    fn scope(&mut self, parent: Scope, level: Level) -> Scope {
        self.scopes.push(ScopeInfo { parent: Some(parent), level, loads: Vec::new(), remat: Vec::new() });
        self.scopes.len() - 1
    }

    /// Can all threads of a warp be run together? They are neighbours along x, nothing takes more than a register for four threads, no
    /// thread loops by itself, and there are shuffles that gain by it.
    fn fit_registers(&self) -> bool {
        let kernel = self.kernel;
        let whole =
            kernel.block()[0].is_multiple_of(WARP) && kernel.cluster() == 1 && kernel.tile().is_none();
        let mut shuffles = false;
        whole && self.fits_registers(kernel.body(), &mut shuffles) && shuffles
    }

    fn fits_registers(&self, region: &Region, shuffles: &mut bool) -> bool {
        region.ops.iter().all(|op| {
            self.step();
            *shuffles |= self.in_registers(op);
            let is_loop = matches!(op.code.shape(), Shape::For | Shape::While);
            let narrow = |value: &Value| {
                let ty = self.kernel.type_of(*value);
                // Whole numbers of eight bytes are mostly steps from thread to thread.
                let scalar = matches!(ty.scalar(), Scalar::F32 | Scalar::I32 | Scalar::I64 | Scalar::Bool);
                scalar && !ty.is_vector()
            };
            op.operands.iter().chain(&op.results).all(narrow)
                && (op.code.shape() != Shape::Shuffle
                    || op.operands[..1].iter().all(|v| self.is_four_bytes(*v)))
                && !(is_loop && level_of(op) == Level::Thread)
                && op.regions.iter().all(|region| self.fits_registers(region, shuffles))
        })
    }

    fn is_four_bytes(&self, value: Value) -> bool {
        matches!(self.kernel.type_of(value).scalar(), Scalar::F32 | Scalar::I32)
    }

    /// Is it a shuffle by a constant, of what fits registers?
    fn in_registers(&self, op: &Op) -> bool {
        op.code.shape() == Shape::Shuffle
            && self.is_four_bytes(op.operands[0])
            && self.strides.constant(op.operands[1]).is_some()
    }

    /// Is the value one number at the level?
    fn is_uniform(&self, value: Value, level: Level) -> bool {
        match level {
            Level::Block => self.facts.uniformity(value) == Uniformity::Block,
            Level::Warp => self.facts.uniformity(value) != Uniformity::Thread,
            Level::Thread => false,
        }
    }

    /// Can it be computed once, and earlier?
    fn movable(&self, op: &Op, level: Level, scope: Scope) -> bool {
        let Some(result) = op.result() else { return false };
        let pure = match op.code.shape() {
            Shape::Load => match op.place {
                Some(Place::View(i)) => self.kernel.view(i).is_some_and(|v| v.access == Access::Read),
                _ => false,
            },
            _ => op.code.effect() == Effect::Pure,
        };
        // What a warp knows is kept for each, so another loop over the warps has it too.
        let of_warp = |v: &Value| {
            let def = self.scopes.get(self.defs[v.index()]);
            level == Level::Warp && def.is_some_and(|def| def.level == Level::Warp)
        };
        pure && self.is_uniform(result, level)
            && op.operands.iter().all(|v| visible(&self.scopes, self.defs[v.index()], scope) || of_warp(v))
    }

    fn steps(&mut self, ops: &[&'k Op], level: Level, scope: Scope) -> Vec<Step<'k>> {
        let mut steps = Vec::new();
        let mut group: Vec<&'k Op> = Vec::new();
        for op in ops {
            self.step();
            if self.movable(op, level, scope) {
                self.define(op, scope);
                steps.push(Step::Once(op));
                continue;
            }
            if level == Level::Block && self.strides.has(op, self.facts) {
                let uniform = [op.operands[1], op.operands[2]];
                if uniform.iter().all(|v| visible(&self.scopes, self.defs[v.index()], scope)) {
                    self.flush(&mut group, level, scope, &mut steps);
                    self.lockstep(op, scope, &mut steps);
                    continue;
                }
            }
            if level_of(op) != level {
                self.join(op, &mut group);
                continue;
            }
            match op.code.shape() {
                Shape::Shuffle => {
                    // All lanes must have what it takes.
                    let together = self.whole_warps && self.in_registers(op);
                    if !together && self.grouped[op.operands[0].index()] == self.groups {
                        self.flush(&mut group, level, scope, &mut steps);
                    }
                    self.join(op, &mut group);
                    continue;
                }
                _ => self.flush(&mut group, level, scope, &mut steps),
            }
            match op.code.shape() {
                Shape::Sync => {}
                Shape::Gather => {
                    let inner = self.scope(scope, Level::Warp);
                    steps.push(Step::Warps { scope: inner, steps: vec![Step::Once(op)] });
                }
                shape if shape.has_regions() => self.control(op, level, scope, &mut steps),
                _ => {
                    self.define(op, scope);
                    steps.push(Step::Once(op));
                }
            }
        }
        self.flush(&mut group, level, scope, &mut steps);
        steps
    }

    fn join(&mut self, op: &'k Op, group: &mut Vec<&'k Op>) {
        op.results.iter().for_each(|v| self.grouped[v.index()] = self.groups);
        group.push(op);
    }

    fn define(&mut self, op: &Op, scope: Scope) {
        for value in &op.results {
            self.defs[value.index()] = scope;
        }
    }

    fn define_all(&mut self, op: &'k Op, scope: Scope) {
        self.step();
        self.define(op, scope);
        if let Some(value) = op.result().filter(|value| is_cheap(op, self.kernel.type_of(*value))) {
            self.cheap[value.index()] = Some(op);
        }
        for region in &op.regions {
            region.args.iter().for_each(|v| self.defs[v.index()] = scope);
            region.ops.iter().for_each(|op| self.define_all(op, scope));
        }
    }

    /// Makes a loop of the ops that were put together.
    fn flush(&mut self, group: &mut Vec<&'k Op>, level: Level, scope: Scope, steps: &mut Vec<Step<'k>>) {
        if group.is_empty() {
            return;
        }
        let ops = std::mem::take(group);
        self.groups += 1;
        if level == Level::Block && ops.iter().any(|op| level_of(op) == Level::Warp) {
            let inner = self.scope(scope, Level::Warp);
            let inside = self.steps(&ops, Level::Warp, inner);
            steps.push(Step::Warps { scope: inner, steps: inside });
            return;
        }
        let inner = self.scope(scope, Level::Thread);
        ops.iter().for_each(|op| self.define_all(op, inner));
        steps.push(Step::Threads { scope: inner, ops, copies: Vec::new() });
    }

    /// Splits the pairs into those that are numbers of the level, which need no copy, and the rest.
    fn copies(&mut self, from: &[Value], to: &[Value], level: Level) -> Vec<(Value, Value)> {
        let pairs = from.iter().copied().zip(to.iter().copied());
        pairs.filter(|(from, to)| from != to && !self.is_uniform(*to, level)).collect()
    }

    fn copy(&mut self, copies: Vec<(Value, Value)>, scope: Scope, steps: &mut Vec<Step<'k>>) {
        if copies.is_empty() {
            return;
        }
        // Behind the ops of the last loop, unless those look at what other threads have there.
        if let Some(Step::Threads { ops, copies: known, .. }) = steps.last_mut()
            && known.is_empty()
            && !ops.iter().any(|op| matches!(op.code.shape(), Shape::Shuffle))
        {
            *known = copies;
            return;
        }
        let inner = self.scope(scope, Level::Thread);
        steps.push(Step::Threads { scope: inner, ops: Vec::new(), copies });
    }

    fn control(&mut self, op: &'k Op, level: Level, scope: Scope, steps: &mut Vec<Step<'k>>) {
        let own = |maker: &mut Self, values: &[Value]| {
            for value in values {
                let uniform = maker.is_uniform(*value, level);
                maker.defs[value.index()] = if uniform { scope } else { NOWHERE };
                maker.kept[value.index()] |= !uniform;
            }
        };
        own(self, &op.results);
        let inside = |maker: &mut Self, region: &'k Region, to: &[Value]| {
            let ops: Vec<&Op> = region.ops.iter().collect();
            let mut steps = maker.steps(&ops, level, scope);
            let copies = maker.copies(&region.yields, to, level);
            maker.copy(copies, scope, &mut steps);
            steps
        };
        let regions = match op.code.shape() {
            Shape::For => {
                let body = &op.regions[0];
                let (count, carried) = body.args.split_at(1);
                own(self, count);
                own(self, carried);
                self.share(&op.results, carried);
                let first = self.copies(&op.operands[3..], carried, level);
                self.copy(first, scope, steps);
                vec![inside(self, body, carried)]
            }
            Shape::While => {
                let (condition, body) = (&op.regions[0], &op.regions[1]);
                own(self, &condition.args);
                self.share(&op.results, &condition.args);
                let first = self.copies(&op.operands, &condition.args, level);
                self.copy(first, scope, steps);
                vec![inside(self, condition, &[]), inside(self, body, &condition.args)]
            }
            _ => op.regions.iter().map(|region| inside(self, region, &op.results)).collect(),
        };
        steps.push(Step::Control { op, regions });
    }

    /// A loop of which the threads of the block take each iteration in lockstep.
    fn lockstep(&mut self, op: &'k Op, scope: Scope, steps: &mut Vec<Step<'k>>) {
        let body = &op.regions[0];
        let (count, carried) = body.args.split_at(1);
        for value in op.results.iter().chain(carried) {
            self.defs[value.index()] = NOWHERE;
            self.kept[value.index()] = true;
        }
        self.share(&op.results, carried);
        let first = self.copies(&op.operands[3..], carried, Level::Block);
        self.copy(first, scope, steps);
        let inner = self.scope(scope, Level::Thread);
        self.defs[count[0].index()] = inner;
        body.ops.iter().for_each(|op| self.define_all(op, inner));
        let copies = self.copies(&body.yields, carried, Level::Block);
        steps.push(Step::Lockstep { scope: inner, op, copies });
    }

    fn share(&mut self, results: &[Value], carried: &[Value]) {
        for (result, value) in results.iter().zip(carried) {
            self.same[result.index()] = Some(*value);
        }
    }

    fn step(&self) {
        self.steps.set(self.steps.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_linear() {
        crate::growth::check("plan", 20, |module| {
            let kernels = module.kernels_with_facts();
            kernels.map(|(kernel, facts)| Plan::of(facts, &Ranges::of(kernel)).spent).sum()
        });
    }
}
