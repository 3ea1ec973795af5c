//! Regions: `if`, `switch`, `for`, `while`; and the loops among them that the [`SafetyPlan`](crate::safety::SafetyPlan) wants
//! polled for cancellation.
//!
//! Such a loop takes its iterations from a quantum of its fuel. When the quantum is used up, the cancel flag is polled, and another quantum is
//! taken from the fuel; after an interval's worth of cost in loops whose iterations are long, it is polled too. Each
//! thread begins with all of its fuel, and so does the block: between barriers and over all of them.
//!
//! A block's or a warp's own control flow is written here too: what is a number there goes through the joins, the rest is
//! in memory and was copied by a loop over the threads.

use super::lanes::{Repr, own};
use super::plan::Step;
use super::writer::Writer;
use crate::safety::QUANTUM;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, BlockArg, InstBuilder, Value as Ssa, types};
use cranelift_frontend::Variable;
use vm_abi::Guard;
use vm_ir::Value;
use vm_ir::limits::WARP;
use vm_ir::module::Op;
use vm_ir::op::Shape;

/// What cancels a guest's kernel.
#[derive(Clone, Copy)]
pub(super) struct Cancel {
    /// Iterations until the next poll.
    quantum: Variable,
    /// Those behind the quantum.
    fuel: Variable,
    /// What is left of the interval.
    cost: Variable,
    /// Address of the cancel flag.
    flag: Ssa,
    /// Fuel that each thread has.
    all: Ssa,
}

/// The regions of an op, split at the level's barriers if it is one of a block or a warp.
pub(super) type Split<'a, 'k> = Option<&'a [Vec<Step<'k>>]>;

impl<'a, 'k> Writer<'a, 'k> {
    pub(super) fn control(&mut self, op: &'k Op, split: Option<&'a Vec<Vec<Step<'k>>>>) {
        let split: Split<'a, 'k> = split.map(|regions| regions.as_slice());
        match op.code.shape() {
            Shape::If => self.if_op(op, split),
            Shape::Switch => self.switch_op(op, split),
            Shape::For => self.for_op(op, split),
            _ => self.while_op(op, split),
        }
    }

    /// A region of an op.
    pub(super) fn body(&mut self, op: &'k Op, index: usize, split: Split<'a, 'k>) {
        match split {
            Some(regions) => self.run(&regions[index]),
            None => self.region(&op.regions[index]),
        }
    }

    /// Does the value go through joins, and not through memory?
    pub(super) fn joins(&self, value: Value, split: Split<'a, 'k>) -> bool {
        split.is_none() || self.plan.visible(value, self.scope)
    }

    /// Adds what a block takes for these values.
    pub(super) fn add_params(&mut self, block: Block, values: &[Value], split: Split<'a, 'k>) {
        for value in values {
            if self.joins(*value, split) {
                for ty in self.joined_types(*value) {
                    self.b.append_block_param(block, ty);
                }
            }
        }
    }

    /// A block that takes these values.
    pub(super) fn join(&mut self, values: &[Value], split: Split<'a, 'k>) -> Block {
        let block = self.b.create_block();
        self.add_params(block, values, split);
        block
    }

    /// `from` as what a join of `to` takes.
    pub(super) fn pass(&mut self, from: &[Value], to: &[Value], split: Split<'a, 'k>) -> Vec<BlockArg> {
        let mut args = Vec::new();
        for (from, to) in from.iter().zip(to) {
            if self.joins(*to, split) {
                let repr = self.repr(*from);
                args.extend(self.flatten(&repr, *to).into_iter().map(BlockArg::Value));
            }
        }
        args
    }

    /// Defines values by parameters of a block, from the one at `first`.
    pub(super) fn take(&mut self, block: Block, first: usize, values: &[Value], split: Split<'a, 'k>) {
        let mut at = first;
        for value in values {
            if !self.joins(*value, split) {
                continue;
            }
            let count = self.joined_types(*value).len();
            let parts: Vec<Ssa> = self.b.block_params(block)[at..at + count].to_vec();
            at += count;
            let repr = self.unflatten(&parts, *value);
            self.set(*value, repr);
        }
    }

    /// Defines values by those of a join where it is.
    pub(super) fn arrive(&mut self, block: Block, values: &[Value], split: Split<'a, 'k>) {
        self.b.seal_block(block);
        self.b.switch_to_block(block);
        self.take(block, 0, values, split);
    }

    fn if_op(&mut self, op: &'k Op, split: Split<'a, 'k>) {
        if self.differs(op.operands[0]) {
            if !self.if_by_lanes(op) {
                self.if_apart(op);
            }
            return;
        }
        let condition = self.first(op.operands[0]);
        let (then, other) = (self.b.create_block(), self.b.create_block());
        let end = self.join(&op.results, split);
        self.b.ins().brif(condition, then, &[], other, &[]);
        for (index, block) in [then, other].into_iter().enumerate() {
            self.b.seal_block(block);
            self.b.switch_to_block(block);
            self.arm(op, index, split, end);
        }
        self.arrive(end, &op.results, split);
    }

    /// A region, and on to the join of the results.
    pub(super) fn arm(&mut self, op: &'k Op, index: usize, split: Split<'a, 'k>, end: Block) {
        self.body(op, index, split);
        let args = self.pass(&op.regions[index].yields, &op.results, split);
        self.b.ins().jump(end, &args);
    }

    fn switch_op(&mut self, op: &'k Op, split: Split<'a, 'k>) {
        if self.differs(op.operands[0]) {
            return self.switch_apart(op);
        }
        let end = self.join(&op.results, split);
        self.cases(op, split, end);
        self.arrive(end, &op.results, split);
    }

    /// The regions of a `switch` on a number that is uniform among the threads at hand.
    pub(super) fn cases(&mut self, op: &'k Op, split: Split<'a, 'k>, end: Block) {
        let selector = self.first(op.operands[0]);
        let scalar = self.scalar(op.operands[0]);
        for (index, case) in op.immediates.iter().enumerate() {
            let (here, next) = (self.b.create_block(), self.b.create_block());
            let number = self.number(scalar, *case & scalar.mask());
            let equal = self.b.ins().icmp(IntCC::Equal, selector, number);
            self.b.ins().brif(equal, here, &[], next, &[]);
            self.b.seal_block(here);
            self.b.seal_block(next);
            self.b.switch_to_block(here);
            self.arm(op, index, split, end);
            self.b.switch_to_block(next);
        }
        self.arm(op, op.regions.len() - 1, split, end);
    }

    fn for_op(&mut self, op: &'k Op, split: Split<'a, 'k>) {
        // Uniform bounds may be held in vectors too; the first element is then each thread's.
        if op.operands[..3].iter().any(|v| self.differs(*v) && !self.is_uniform(*v)) {
            return self.for_apart(op);
        }
        let low = self.first(op.operands[0]);
        let end = self.join(&op.results, split);
        match split {
            None => self.for_versions(op, low, end),
            Some(_) => self.for_from(op, split, low, &op.operands[3..], end),
        }
        self.arrive(end, &op.results, split);
    }

    /// A `for` on bounds that are uniform among the threads at hand, from a count on, with what it carries at first.
    pub(super) fn for_from(
        &mut self,
        op: &'k Op,
        split: Split<'a, 'k>,
        low: Ssa,
        initial: &[Value],
        end: Block,
    ) {
        let body = &op.regions[0];
        let (count, carried) = body.args.split_at(1);
        let known = self.safety.ranges().loop_of(op).copied();
        let (high, step) = (self.first(op.operands[1]), self.first(op.operands[2]));
        let mut runs = self.b.ins().icmp(IntCC::SignedLessThan, low, high);
        if !known.is_some_and(|k| k.steps_up) {
            let up = self.b.ins().icmp_imm_s(IntCC::SignedGreaterThanOrEqual, step, 1);
            runs = self.b.ins().band(runs, up);
        }
        let head = self.b.create_block();
        self.b.append_block_param(head, self.b.func.dfg.value_type(low));
        self.add_params(head, carried, split);
        let mut first = vec![BlockArg::Value(low)];
        first.extend(self.pass(initial, carried, split));
        // What is carried may be known to be uniform where the results, for all that the validator knows of the bounds, are
        // not: then they go through joins in other forms.
        let none = self.pass(initial, &op.results, split);
        self.b.ins().brif(runs, head, &first, end, &none);
        self.b.switch_to_block(head);
        let at = self.b.block_params(head)[0];
        self.set(count[0], Repr::Splat(at));
        self.take(head, 1, carried, split);
        self.body(op, 0, split);
        self.poll_point(op);
        let yields = self.pass(&body.yields, carried, split);
        let results = self.pass(&body.yields, &op.results, split);
        // What is left cannot overflow, the count could.
        let left = self.b.ins().isub(high, at);
        let more = self.b.ins().icmp(IntCC::UnsignedGreaterThan, left, step);
        let next = self.b.ins().iadd(at, step);
        let mut again = vec![BlockArg::Value(next)];
        again.extend(yields);
        self.b.ins().brif(more, head, &again, end, &results);
        self.b.seal_block(head);
    }

    fn while_op(&mut self, op: &'k Op, split: Split<'a, 'k>) {
        let [condition, _] = &op.regions[..] else { return };
        if split.is_none() && self.while_in_steps(op) {
            return;
        }
        let end = self.join(&op.results, split);
        let head = self.join(&condition.args, split);
        let initial = self.pass(&op.operands, &condition.args, split);
        self.b.ins().jump(head, &initial);
        self.while_from(op, split, head, None, end);
        self.arrive(end, &op.results, split);
    }

    /// A `while` whose condition begins in `head`; `enter` is a block that goes to the body directly.
    pub(super) fn while_from(
        &mut self,
        op: &'k Op,
        split: Split<'a, 'k>,
        head: Block,
        enter: Option<Block>,
        end: Block,
    ) {
        let [condition, body] = &op.regions[..] else { return };
        self.b.switch_to_block(head);
        self.take(head, 0, &condition.args, split);
        self.body(op, 0, split);
        let goes_on = condition.yields[0];
        let inside = match enter {
            Some(block) => block,
            None => self.join(&condition.args, split),
        };
        let args = self.pass(&condition.args, &condition.args, split);
        if self.differs(goes_on) {
            self.while_apart(op, goes_on, inside, args, end);
        } else {
            let more = self.first(goes_on);
            let results = self.pass(&condition.args, &op.results, split);
            self.enter(more, (inside, &args), (end, &results));
        }
        self.b.seal_block(inside);
        self.b.switch_to_block(inside);
        self.take(inside, 0, &condition.args, split);
        self.body(op, 1, split);
        self.poll_point(op);
        let again = self.pass(&body.yields, &condition.args, split);
        self.b.ins().jump(head, &again);
        self.b.seal_block(head);
    }

    /// Prepares polling.
    pub(super) fn prepare_polls(&mut self, guard: Guard) {
        let flag = self.parameter(types::I64, guard.stop);
        let all = self.parameter(types::I64, guard.fuel);
        let most = self.b.ins().iconst(types::I64, 1 << 62);
        let all = self.b.ins().umin(all, most);
        let [quantum, fuel, cost] = [0, 0, self.safety.interval()].map(|first| {
            let var = self.b.declare_var(types::I64);
            let first = self.b.ins().iconst(types::I64, first);
            self.b.def_var(var, first);
            var
        });
        self.cancel = Some(Cancel { quantum, fuel, cost, flag, all });
    }

    /// Gives the thread, warp or block that begins its fuel, unless the launch is cancelled.
    pub(super) fn refuel(&mut self) {
        let Some(cancel) = self.cancel.filter(|_| self.safety.cancellable()) else { return };
        self.poll(cancel);
        let most = self.b.ins().iconst(types::I64, QUANTUM as i64);
        let quantum = self.b.ins().umin(cancel.all, most);
        let fuel = self.b.ins().isub(cancel.all, quantum);
        self.b.def_var(cancel.quantum, quantum);
        self.b.def_var(cancel.fuel, fuel);
    }

    /// What is left of the fuel.
    pub(super) fn counters(&mut self) -> Option<(Ssa, Ssa)> {
        let cancel = self.cancel?;
        Some((self.b.use_var(cancel.quantum), self.b.use_var(cancel.fuel)))
    }

    pub(super) fn set_counters(&mut self, counters: Option<(Ssa, Ssa)>) {
        if let (Some(cancel), Some((quantum, fuel))) = (self.cancel, counters) {
            self.b.def_var(cancel.quantum, quantum);
            self.b.def_var(cancel.fuel, fuel);
        }
    }

    /// Leaves if the launch is cancelled.
    fn poll(&mut self, cancel: Cancel) {
        let word = self.b.ins().atomic_load(types::I32, own(), cancel.flag);
        let on = self.b.create_block();
        self.b.ins().brif(word, self.leave, &[], on, &[]);
        self.b.seal_block(on);
        self.b.switch_to_block(on);
    }

    /// Behind an iteration of a loop, if that is polled: takes it from the quantum, and its cost where that may be much.
    pub(super) fn poll_point(&mut self, op: &Op) {
        let poll = self.safety.loop_of(op).and_then(|planned| planned.poll);
        let Some((cancel, poll)) = self.cancel.zip(poll) else { return };
        if poll.takes_fuel {
            self.take_fuel(cancel);
        }
        if let Some(charge) = poll.charge(self.threads_at_hand()) {
            self.charge(charge);
        }
    }

    /// Takes an iteration from the quantum, and another quantum from the fuel when that is used up.
    fn take_fuel(&mut self, cancel: Cancel) {
        self.take_from(cancel, cancel.quantum, 1, |w, quantum| {
            let fuel = w.b.use_var(cancel.fuel);
            let (none, some) = (w.b.create_block(), w.b.create_block());
            w.b.ins().brif(fuel, some, &[], none, &[]);
            w.b.seal_block(none);
            w.b.seal_block(some);
            w.b.switch_to_block(none);
            let zero = w.b.ins().iconst(types::I32, 0);
            let code = w.b.ins().iconst(types::I32, i64::from(Guard::OUT_OF_FUEL));
            w.b.ins().atomic_cas(own(), cancel.flag, zero, code);
            w.b.ins().jump(w.leave, &[]);
            w.b.switch_to_block(some);
            let most = w.b.ins().iconst(types::I64, QUANTUM as i64);
            let take = w.b.ins().umin(fuel, most);
            let rest = w.b.ins().isub(fuel, take);
            w.b.def_var(cancel.fuel, rest);
            w.b.ins().iadd(quantum, take)
        });
    }

    /// Takes what was done from the interval, and polls when that is used up.
    pub(super) fn charge(&mut self, cost: i64) {
        let Some(cancel) = self.cancel else { return };
        self.take_from(cancel, cancel.cost, cost, |w, _| {
            let interval = w.safety.interval();
            w.b.ins().iconst(types::I64, interval)
        });
    }

    /// The poll point before an op, if it has one.
    pub(super) fn charge_before(&mut self, op: &Op) {
        if let Some(cost) = self.safety.charge_before(op, self.threads_at_hand()) {
            self.charge(cost);
        }
    }

    /// Takes from a counter. Where that is used up, the cancel flag is polled, and the counter is what `refill` makes of it.
    fn take_from(
        &mut self,
        cancel: Cancel,
        counter: Variable,
        by: i64,
        refill: impl FnOnce(&mut Self, Ssa) -> Ssa,
    ) {
        let left = self.b.use_var(counter);
        let left = self.b.ins().iadd_imm_s(left, -by);
        self.b.def_var(counter, left);
        let (on, used_up) = (self.b.create_block(), self.b.create_block());
        let short = self.b.ins().icmp_imm_s(IntCC::SignedLessThan, left, 0);
        self.b.ins().brif(short, used_up, &[], on, &[]);
        self.b.seal_block(used_up);
        self.b.set_cold_block(used_up);
        self.b.switch_to_block(used_up);
        self.poll(cancel);
        let more = refill(self, left);
        self.b.def_var(counter, more);
        self.b.ins().jump(on, &[]);
        self.b.seal_block(on);
        self.b.switch_to_block(on);
    }

    /// How many threads take an iteration of a loop that is written now.
    fn threads_at_hand(&self) -> u64 {
        match (self.threads, self.warp) {
            (Some(_), _) => self.width as u64,
            (None, Some(_)) => u64::from(WARP),
            (None, None) => u64::from(self.kernel.cluster_threads()),
        }
    }
}
