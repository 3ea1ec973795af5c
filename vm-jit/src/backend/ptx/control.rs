//! Regions: `if`, `switch`, `for`, `while`, as the [`SafetyPlan`](crate::safety::SafetyPlan) says: unrolled or not, and
//! polled for cancellation or not.
//!
//! At a poll point a loop takes the iterations since the last one from a quantum of its fuel. When the quantum is used up, the thread polls
//! the cancel flag, leaves if it is set, and takes another quantum. Where a quantum of iterations may be long, their
//! cost is counted too, and after an interval's worth of it the thread polls as well. Before the outermost of such loops
//! the threads of a block that is not among the first [`EARLY`] poll too, so that the blocks that are left
//! end at once: that costs nothing until the first poll point, for a cancellation only empties the quantum. The first
//! blocks do not, because a launch of few is often shorter than the poll, which may go to the host's memory.

use super::asm::{Arg, Class, Reg, def, ins, when};
use super::writer::{Cancel, Writer};
use crate::safety::{Poll, QUANTUM, Unroll};
use std::collections::HashSet;
use vm_abi::Guard;
use vm_ir::Value;
use vm_ir::module::{Op, Region};

/// Blocks that are on the device about as soon as the launch begins; a power of two.
const EARLY: u32 = 256;

impl<'k> Writer<'k> {
    /// Moves values into registers as if at once.
    fn copy(&mut self, from: &[Reg], to: &[Reg]) {
        let mut moved = HashSet::new();
        let safe: Vec<Reg> = from
            .iter()
            .zip(to)
            .map(|(source, target)| {
                let clashes = moved.contains(source);
                moved.insert(*target);
                if !clashes {
                    return *source;
                }
                let kept = self.asm.new_reg(source.class);
                self.mov(kept, *source);
                kept
            })
            .collect();
        for (source, target) in safe.iter().zip(to) {
            self.mov(*target, *source);
        }
    }

    fn all_of(&self, values: &[Value]) -> Vec<Reg> {
        values.iter().flat_map(|v| self.all(*v)).collect()
    }

    fn set_each(&mut self, values: &[Value], regs: &[Reg]) {
        let mut rest = regs;
        for value in values {
            let (head, tail) = rest.split_at(self.lanes(*value));
            self.set_all(*value, head);
            rest = tail;
        }
    }

    /// New registers like those of the values.
    fn fresh(&mut self, values: &[Value]) -> Vec<Reg> {
        let classes: Vec<Class> = values
            .iter()
            .flat_map(|v| std::iter::repeat_n(super::writer::class_of(self.ty(*v).scalar()), self.lanes(*v)))
            .collect();
        classes.into_iter().map(|class| self.asm.new_reg(class)).collect()
    }

    fn branch_name(&self, condition: Value) -> &'static str {
        if self.uniform(condition) { "bra.uni" } else { "bra" }
    }

    pub(super) fn if_op(&mut self, op: &'k Op) {
        let [then, other] = &op.regions[..] else { return };
        let condition = self.get(op.operands[0], 0);
        let branch = self.branch_name(op.operands[0]);
        let results = self.fresh(&op.results);
        let (end, to_else) = (self.asm.new_label(), self.asm.new_label());
        let no_else = other.ops.is_empty() && other.yields.is_empty();
        when!(self, condition, false, branch, Arg::Label(if no_else { end } else { to_else }));
        self.arm(then, &results);
        if !no_else {
            ins!(self, "bra.uni", Arg::Label(end));
            self.asm.place(to_else);
            self.arm(other, &results);
        }
        self.asm.place(end);
        self.set_each(&op.results, &results);
    }

    fn arm(&mut self, region: &'k Region, results: &[Reg]) {
        self.region(region);
        let yields = self.all_of(&region.yields);
        self.copy(&yields, results);
    }

    pub(super) fn switch_op(&mut self, op: &'k Op) {
        let selector = op.operands[0];
        let scalar = self.ty(selector).scalar();
        let compare = if scalar.bits() == 64 { "setp.eq.s64" } else { "setp.eq.s32" };
        let branch = self.branch_name(selector);
        let results = self.fresh(&op.results);
        let end = self.asm.new_label();
        let reg = self.get(selector, 0);
        let labels: Vec<_> = op.immediates.iter().map(|_| self.asm.new_label()).collect();
        for (case, label) in op.immediates.iter().zip(&labels) {
            // Small integers are filled with zeros.
            let bits = (*case & scalar.mask()) as i64;
            let bits = if scalar.bits() == 32 { i64::from(bits as i32) } else { bits };
            let equal = def!(self, Pred, compare, reg, bits);
            when!(self, equal, true, branch, Arg::Label(*label));
        }
        if let Some(default) = op.regions.last() {
            self.arm(default, &results);
        }
        for (region, label) in op.regions.iter().zip(&labels) {
            ins!(self, "bra.uni", Arg::Label(end));
            self.asm.place(*label);
            self.arm(region, &results);
        }
        self.asm.place(end);
        self.set_each(&op.results, &results);
    }

    pub(super) fn while_op(&mut self, op: &'k Op) {
        let [condition, body] = &op.regions[..] else { return };
        let initial = self.all_of(&op.operands);
        let carried = self.fresh(&op.operands);
        self.copy(&initial, &carried);
        self.hide_negated(op, &carried);
        let poll = self.plan.loop_of(op).and_then(|planned| planned.poll);
        let outer = self.enter_polled(poll);
        self.set_each(&condition.args, &carried);
        let (head, end) = (self.asm.new_label(), self.asm.new_label());
        self.asm.place(head);
        self.region(condition);
        let goes_on = self.get(condition.yields[0], 0);
        let branch = self.branch_name(condition.yields[0]);
        when!(self, goes_on, false, branch, Arg::Label(end));
        self.region(body);
        let yields = self.all_of(&body.yields);
        self.copy(&yields, &carried);
        self.poll_point(poll, 1);
        ins!(self, "bra.uni", Arg::Label(head));
        self.asm.place(end);
        self.polled = outer;
        self.set_each(&op.results, &carried);
    }

    pub(super) fn for_op(&mut self, op: &'k Op) {
        if self.own_iteration(op) {
            return;
        }
        let body = &op.regions[0];
        let wide = self.ty(op.operands[0]).scalar().bits() == 64;
        let known = self.plan.ranges().loop_of(op).copied();
        let initial = self.all_of(&op.operands[3..]);
        let Some(planned) = self.plan.loop_of(op).copied() else { return };
        if let Unroll::Full(0) = planned.unroll {
            self.set_each(&op.results, &initial);
            return;
        }
        let poll = planned.poll;
        let outer = self.enter_polled(poll);
        if let Unroll::Full(iterations) = planned.unroll {
            self.unrolled(op, iterations, initial, wide, poll);
            self.polled = outer;
            return;
        }
        let exact = known.and_then(|k| k.exact);

        let [low, high, step] = [0, 1, 2].map(|i| self.get(op.operands[i], 0));
        let fixed_step =
            self.constant(op.operands[2]).map(|bits| if wide { bits as i64 } else { i64::from(bits as i32) });
        let carried = self.fresh(&op.operands[3..]);
        self.copy(&initial, &carried);
        self.hide_negated(op, &carried);
        let count = self.asm.new_reg(low.class);
        self.mov(count, low);
        let (less, plus, class) = if wide {
            ("setp.lt.s64", "add.s64", Class::B64)
        } else {
            ("setp.lt.s32", "add.s32", Class::B32)
        };
        let end = self.asm.new_label();
        let uniform = op.operands[..3].iter().all(|v| self.uniform(*v));
        let branch = if uniform { "bra.uni" } else { "bra" };
        let step_arg = |n: i64| fixed_step.and_then(|s| s.checked_mul(n)).map(Arg::Int);

        if exact.is_none_or(|n| n == 0) {
            let runs = def!(self, Pred, less, low, high);
            let runs = match known {
                Some(k) if k.steps_up => runs,
                _ => {
                    let ahead = if wide { "setp.ge.s64" } else { "setp.ge.s32" };
                    let up = def!(self, Pred, ahead, step, 1);
                    def!(self, Pred, "and.pred", runs, up)
                }
            };
            when!(self, runs, false, branch, Arg::Label(end));
        }

        let room = known.filter(|k| k.steps_up).map_or(0, |k| k.room);
        if let Unroll::Partial(copies) = planned.unroll {
            // As many iterations at once as asked for, while there are as many left.
            let scaled = |writer: &mut Self, n: u64| match step_arg(n as i64) {
                Some(arg) => arg,
                None => {
                    let name = if wide { "mul.lo.s64" } else { "mul.lo.s32" };
                    let reg = writer.asm.new_reg(class);
                    ins!(writer, name, reg, step, n as i64);
                    Arg::Reg(reg)
                }
            };
            let span = scaled(self, copies - 1);
            let stride = scaled(self, copies);
            let (head, rest) = (self.asm.new_label(), self.asm.new_label());
            let last = self.asm.new_reg(class);
            ins!(self, plus, last, count, span);
            let fits = def!(self, Pred, less, last, high);
            when!(self, fits, false, branch, Arg::Label(rest));
            self.asm.place(head);
            self.no_unroll();
            let mut now = carried.clone();
            let mut at = count;
            for copy in 0..copies {
                if copy > 0 {
                    let next = self.asm.new_reg(class);
                    let by = step_arg(1).unwrap_or(Arg::Reg(step));
                    ins!(self, plus, next, at, by);
                    at = next;
                }
                now = self.iteration(body, at, &now);
                if copy + 1 < copies {
                    self.poll_between(poll, copy + 1);
                }
            }
            self.copy(&now, &carried);
            ins!(self, plus, count, count, stride);
            self.poll_after(poll, copies);
            ins!(self, plus, last, count, span);
            let fits = def!(self, Pred, less, last, high);
            when!(self, fits, true, branch, Arg::Label(head));
            self.asm.place(rest);
            let left = def!(self, Pred, less, count, high);
            when!(self, left, false, branch, Arg::Label(end));
        }

        let head = self.asm.new_label();
        // Where the count could overflow, what is left is counted instead.
        let left = (room == 0).then(|| {
            let name = if wide { "sub.s64" } else { "sub.s32" };
            let reg = self.asm.new_reg(class);
            ins!(self, name, reg, high, count);
            reg
        });
        self.asm.place(head);
        if op.unroll() > 0 {
            self.no_unroll();
        }
        let now = self.iteration(body, count, &carried.clone());
        self.copy(&now, &carried);
        self.poll_point(poll, 1);
        let by = step_arg(1).unwrap_or(Arg::Reg(step));
        let more = match left {
            None => {
                ins!(self, plus, count, count, by);
                def!(self, Pred, less, count, high)
            }
            Some(left) => {
                let (more, less) = if wide { ("setp.gt.u64", "sub.s64") } else { ("setp.gt.u32", "sub.s32") };
                let more = def!(self, Pred, more, left, step);
                ins!(self, less, left, left, step);
                ins!(self, plus, count, count, by);
                more
            }
        };
        when!(self, more, true, branch, Arg::Label(head));
        self.asm.place(end);
        self.polled = outer;
        self.set_each(&op.results, &carried);
    }

    /// One iteration of a loop; gives what it yields.
    fn iteration(&mut self, body: &'k Region, count: Reg, carried: &[Reg]) -> Vec<Reg> {
        let (first, args) = (body.args[0], &body.args[1..]);
        self.set(first, 0, count);
        self.set_each(args, carried);
        self.region(body);
        self.all_of(&body.yields)
    }

    /// All iterations one behind the other, as many as the range analysis proved. The bounds may be written as constants, or
    /// computed and proved to be.
    fn unrolled(&mut self, op: &'k Op, iterations: u64, initial: Vec<Reg>, wide: bool, poll: Option<Poll>) {
        let body = &op.regions[0];
        let scalar = self.ty(op.operands[0]).scalar();
        let signed = |bits: u64| if wide { bits as i64 } else { i64::from(bits as u32 as i32) };
        let literal = |i: usize| self.constant(op.operands[i]).map(signed);
        let literals = literal(0).zip(literal(2));
        let mut now = initial;
        let mut before: Option<Reg> = None;
        for copy in 0..iterations {
            let count = match (literals, before) {
                (Some((low, step)), _) => {
                    let at = low.wrapping_add(step.wrapping_mul(copy as i64)) as u64 & scalar.mask();
                    self.number(scalar, at)
                }
                (None, None) => self.get(op.operands[0], 0),
                (None, Some(before)) => {
                    let (plus, class) = if wide { ("add.s64", Class::B64) } else { ("add.s32", Class::B32) };
                    let (step, next) = (self.get(op.operands[2], 0), self.asm.new_reg(class));
                    ins!(self, plus, next, before, step);
                    next
                }
            };
            before = Some(count);
            now = self.iteration(body, count, &now);
            if copy + 1 < iterations {
                self.poll_between(poll, copy + 1);
            }
        }
        self.poll_after(poll, iterations);
        self.set_each(&op.results, &now);
    }

    fn no_unroll(&mut self) {
        self.asm.text.push_str("\t.pragma \"nounroll\";\n");
    }

    /// Prepares polling. `all` is the fuel, the iterations of polled loops that the thread may take.
    pub(super) fn prepare_polls(&mut self, flag: Reg, all: Reg) {
        let fuel = def!(self, B64, "min.u64", all, 1i64 << 62);
        let take = def!(self, B64, "min.u64", fuel, QUANTUM as i64);
        let quantum = def!(self, B32, "cvt.u32.u64", take);
        ins!(self, "sub.s64", fuel, fuel, take);
        let (out_of_fuel, leave) = (self.asm.new_label(), self.asm.new_label());
        let [x, y, z] =
            ["%ctaid.x", "%ctaid.y", "%ctaid.z"].map(|name| def!(self, B32, "mov.u32", Arg::Name(name)));
        let x = def!(self, B32, "shr.u32", x, i64::from(EARLY.trailing_zeros()));
        let some = def!(self, B32, "or.b32", x, y);
        let block = def!(self, B32, "or.b32", some, z);
        let late = def!(self, Pred, "setp.ne.u32", block, 0);
        let costly = self.plan.poll_points().any(|poll| poll.charge(1).is_some());
        let left = costly.then(|| {
            let interval = self.plan.interval();
            def!(self, B32, "mov.b32", interval)
        });
        self.cancel = Some(Cancel { quantum, fuel, left, flag, late, out_of_fuel, leave });
    }

    /// Begins a loop that may be polled; gives whether the code around is in one that is.
    fn enter_polled(&mut self, poll: Option<Poll>) -> bool {
        let outer = self.polled;
        let Some(poll) = poll else { return outer };
        if let Some(cancel) = self.cancel.filter(|_| !outer && self.tiles.is_none()) {
            let word = def!(self, B32, "mov.b32", 0);
            when!(self, cancel.late, true, "ld.relaxed.sys.global.b32", word, Arg::At(cancel.flag, 0));
            let cancelled = def!(self, Pred, "setp.ne.u32", word, 0);
            let counter = cancel.left.filter(|_| !poll.takes_fuel).unwrap_or(cancel.quantum);
            when!(self, cancelled, true, "mov.b32", counter, 0);
        }
        self.polled = true;
        outer
    }

    /// The poll point that may lie behind N copies, others of which follow.
    fn poll_between(&mut self, poll: Option<Poll>, copies: u64) {
        if let Some(every) = poll.map(|poll| poll.every).filter(|every| copies.is_multiple_of(*every)) {
            self.poll_point(poll, every);
        }
    }

    /// The poll point behind the last of N copies.
    fn poll_after(&mut self, poll: Option<Poll>, copies: u64) {
        let Some(every) = poll.map(|poll| poll.every) else { return };
        match copies % every {
            0 => self.poll_point(poll, every),
            rest => self.poll_point(poll, rest),
        }
    }

    /// Takes iterations of a polled loop from the quantum, and their cost from the interval, and polls when either is used up: out
    /// of the way, so that the loop itself stays short.
    fn poll_point(&mut self, poll: Option<Poll>, iterations: u64) {
        let Some((cancel, poll)) = self.cancel.zip(poll) else { return };
        if poll.takes_fuel {
            ins!(self, "add.s32", cancel.quantum, cancel.quantum, -(iterations as i64));
        }
        let cost = cancel.left.zip(poll.charge(iterations));
        if let Some((left, charge)) = cost {
            ins!(self, "add.s32", left, left, -charge);
        }
        let counter = match (poll.takes_fuel, cost) {
            (true, Some((left, _))) => def!(self, B32, "min.s32", cancel.quantum, left),
            (true, None) => cancel.quantum,
            (false, Some((left, _))) => left,
            (false, None) => return,
        };
        // The threads of a role go on together.
        let branch = if self.tiles.is_some() { "bra.uni" } else { "bra" };
        let (slow, on) = (self.asm.new_label(), self.asm.new_label());
        let used_up = def!(self, Pred, "setp.lt.s32", counter, 0);
        when!(self, used_up, true, branch, Arg::Label(slow));
        self.asm.place(on);
        self.asm.swap_cold();
        self.asm.place(slow);
        self.poll(cancel);
        if poll.takes_fuel {
            let fuelled = self.asm.new_label();
            if cost.is_some() {
                let enough = def!(self, Pred, "setp.ge.s32", cancel.quantum, 0);
                when!(self, enough, true, branch, Arg::Label(fuelled));
            }
            let none = def!(self, Pred, "setp.eq.s64", cancel.fuel, 0);
            when!(self, none, true, branch, Arg::Label(cancel.out_of_fuel));
            let take = def!(self, B64, "min.u64", cancel.fuel, QUANTUM as i64);
            ins!(self, "sub.s64", cancel.fuel, cancel.fuel, take);
            let more = def!(self, B32, "cvt.u32.u64", take);
            ins!(self, "add.s32", cancel.quantum, cancel.quantum, more);
            self.asm.place(fuelled);
        }
        if let Some((left, _)) = cost {
            let interval = self.plan.interval();
            match poll.takes_fuel {
                true => {
                    let over = def!(self, Pred, "setp.lt.s32", left, 0);
                    when!(self, over, true, "mov.b32", left, interval);
                }
                false => ins!(self, "mov.b32", left, interval),
            }
        }
        ins!(self, "bra.uni", Arg::Label(on));
        self.asm.swap_cold();
    }

    /// Leaves if the launch is cancelled.
    fn poll(&mut self, cancel: Cancel) {
        if self.tiles.is_some() {
            return self.poll_together(cancel);
        }
        let word = def!(self, B32, "ld.relaxed.sys.global.b32", Arg::At(cancel.flag, 0));
        let cancelled = def!(self, Pred, "setp.ne.u32", word, 0);
        when!(self, cancelled, true, "bra", Arg::Label(cancel.leave));
    }

    /// What lies behind the kernel's `ret`.
    pub(super) fn epilogue(&mut self) {
        let Some(cancel) = self.cancel else { return };
        self.asm.place(cancel.out_of_fuel);
        self.report_out_of_fuel(cancel);
        self.asm.place(cancel.leave);
        ins!(self, "exit");
    }

    /// Sets the cancel flag, unless it is set.
    pub(super) fn report_out_of_fuel(&mut self, cancel: Cancel) {
        let code = i64::from(Guard::OUT_OF_FUEL);
        let old = self.asm.new_reg(Class::B32);
        ins!(self, "atom.relaxed.sys.global.cas.b32", old, Arg::At(cancel.flag, 0), 0, code);
    }
}
