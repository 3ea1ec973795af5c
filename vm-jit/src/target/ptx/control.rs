//! Regions: `if`, `switch`, `for`, `while`; unrolling; and how a guest's loops are watched.
//!
//! A guest's loop that may take more than [`SHORT`] rounds, together with the short ones around it, takes
//! from a slice of rounds at the end of each. When the slice is used up, the thread looks at the stop word,
//! leaves if it is set, and takes another slice from the rounds it was given. Where so many rounds may be long, their
//! work is counted too, and after [`LOOK`] of it the thread looks as well. Before the first of such loops
//! the threads of a block that is not among the first [`EARLY`] look too, so that the blocks that are left
//! end at once: that costs nothing until the first round is over, for a stop only empties the slice. The first
//! blocks do not, because a launch of few is often shorter than the look, which may go to the host's memory.

use super::asm::{Arg, Class, Reg, def, ins, when};
use super::writer::{Watch, Writer};
use crate::artifact::Guard;
use crate::work::{self, LOOK, SHORT};
use std::collections::HashSet;
use vm_ir::Value;
use vm_ir::module::{Op, Region};
use vm_ir::op::Shape;

/// Rounds between two looks at the stop word.
const SLICE: i64 = 4096;
/// Blocks that are on the device about as soon as the launch begins; a power of two.
const EARLY: u32 = 256;
/// Ops, with all copies of them, that a loop may grow to by unrolling.
const UNROLLED_OPS: u64 = 8192;

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
        let outer = self.enter_watched();
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
        self.spend(op, 1);
        ins!(self, "bra.uni", Arg::Label(head));
        self.asm.place(end);
        self.leave_watched(outer);
        self.set_each(&op.results, &carried);
    }

    pub(super) fn for_op(&mut self, op: &'k Op) {
        let body = &op.regions[0];
        let wide = self.ty(op.operands[0]).scalar().bits() == 64;
        let known = self.ranges.loop_of(op).copied();
        let initial = self.all_of(&op.operands[3..]);
        let size = count_ops(body);
        let room_for = |writer: &Self, copies: u64| {
            let ops = copies.saturating_mul(size).saturating_mul(writer.copies);
            ops <= UNROLLED_OPS && ops <= writer.unroll_budget
        };
        if known.is_some_and(|k| k.rounds == 0) {
            self.set_each(&op.results, &initial);
            return;
        }
        let exact = known.and_then(|k| k.exact);
        if let Some(rounds) = exact.filter(|n| *n <= op.unroll() && op.unroll() > 1 && room_for(self, *n)) {
            self.unrolled(op, rounds, initial, wide);
            return;
        }

        let outer_rounds = self.rounds;
        let rounds = known.map_or(u64::MAX, |k| k.rounds).saturating_mul(outer_rounds);
        let watched = rounds > SHORT;
        let outer = if watched { Some(self.enter_watched()) } else { None };
        if !watched {
            self.rounds = rounds;
        }

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
        let alike = op.operands[..3].iter().all(|v| self.uniform(*v));
        let branch = if alike { "bra.uni" } else { "bra" };
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

        let copies = op.unroll();
        let room = known.filter(|k| k.steps_up).map_or(0, |k| k.room);
        if copies > 1 && room > copies && room_for(self, copies) {
            // As many rounds at once as asked for, while so many are left.
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
            self.unroll_budget -= copies * size * self.copies;
            self.copies *= copies;
            let mut now = carried.clone();
            let mut at = count;
            for copy in 0..copies {
                if copy > 0 {
                    let next = self.asm.new_reg(class);
                    let by = step_arg(1).unwrap_or(Arg::Reg(step));
                    ins!(self, plus, next, at, by);
                    at = next;
                }
                now = self.round(body, at, &now);
            }
            self.copies /= copies;
            self.copy(&now, &carried);
            ins!(self, plus, count, count, stride);
            if watched {
                self.spend(op, copies);
            }
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
        if copies > 0 {
            self.no_unroll();
        }
        let now = self.round(body, count, &carried.clone());
        self.copy(&now, &carried);
        if watched {
            self.spend(op, 1);
        }
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
        if let Some(outer) = outer {
            self.leave_watched(outer);
        }
        self.rounds = outer_rounds;
        self.set_each(&op.results, &carried);
    }

    /// One round of a loop; gives what it yields.
    fn round(&mut self, body: &'k Region, count: Reg, carried: &[Reg]) -> Vec<Reg> {
        let (first, args) = (body.args[0], &body.args[1..]);
        self.set(first, 0, count);
        self.set_each(args, carried);
        self.region(body);
        self.all_of(&body.yields)
    }

    /// All rounds one behind the other, so many as the range analysis proved. The bounds may be written as constants, or
    /// computed and proved to be.
    fn unrolled(&mut self, op: &'k Op, rounds: u64, initial: Vec<Reg>, wide: bool) {
        let body = &op.regions[0];
        let scalar = self.ty(op.operands[0]).scalar();
        self.unroll_budget -= rounds * count_ops(body) * self.copies;
        self.copies *= rounds.max(1);
        let signed = |bits: u64| if wide { bits as i64 } else { i64::from(bits as u32 as i32) };
        let literal = |i: usize| self.constant(op.operands[i]).map(signed);
        let literals = literal(0).zip(literal(2));
        let mut now = initial;
        let mut before: Option<Reg> = None;
        for round in 0..rounds {
            let count = match (literals, before) {
                (Some((low, step)), _) => {
                    let at = low.wrapping_add(step.wrapping_mul(round as i64)) as u64 & scalar.mask();
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
            now = self.round(body, count, &now);
        }
        self.copies /= rounds.max(1);
        self.set_each(&op.results, &now);
    }

    fn no_unroll(&mut self) {
        self.asm.text.push_str("\t.pragma \"nounroll\";\n");
    }

    /// Does a guest's region have a loop that is watched?
    pub(super) fn needs_watch(&self, region: &Region, rounds: u64) -> bool {
        region.ops.iter().any(|op| self.loop_needs_watch(op, rounds))
    }

    /// Is a guest's op a loop that is watched, or does it hold one?
    pub(super) fn loop_needs_watch(&self, op: &Op, rounds: u64) -> bool {
        let rounds = match op.code.shape() {
            Shape::While => return true,
            Shape::For => self.ranges.loop_of(op).map_or(u64::MAX, |k| k.rounds).saturating_mul(rounds),
            _ => rounds,
        };
        rounds > SHORT && op.code.shape() == Shape::For
            || op.regions.iter().any(|region| self.needs_watch(region, rounds))
    }

    /// Prepares the watch over loops.
    pub(super) fn watch(&mut self, stop: Reg, all: Reg) {
        let rounds = def!(self, B64, "min.u64", all, 1i64 << 62);
        let take = def!(self, B64, "min.u64", rounds, SLICE);
        let slice = def!(self, B32, "cvt.u32.u64", take);
        ins!(self, "sub.s64", rounds, rounds, take);
        let (out_of_rounds, leave) = (self.asm.new_label(), self.asm.new_label());
        let [x, y, z] =
            ["%ctaid.x", "%ctaid.y", "%ctaid.z"].map(|name| def!(self, B32, "mov.u32", Arg::Name(name)));
        let x = def!(self, B32, "shr.u32", x, i64::from(EARLY.trailing_zeros()));
        let some = def!(self, B32, "or.b32", x, y);
        let block = def!(self, B32, "or.b32", some, z);
        let late = def!(self, Pred, "setp.ne.u32", block, 0);
        let long = self.has_long_rounds(self.kernel.body());
        let work = long.then(|| def!(self, B32, "mov.b32", LOOK as i64));
        self.watch = Some(Watch { slice, rounds, work, stop, late, out_of_rounds, leave });
    }

    /// Is there a loop whose rounds may be long?
    fn has_long_rounds(&self, region: &Region) -> bool {
        region.ops.iter().any(|op| {
            let is_loop = matches!(op.code.shape(), Shape::For | Shape::While);
            is_loop && work::of_round(self.kernel, &self.ranges, op, 1).is_some()
                || op.regions.iter().any(|region| self.has_long_rounds(region))
        })
    }

    /// Begins a loop that is watched; gives what [`Writer::leave_watched`] wants back.
    fn enter_watched(&mut self) -> (bool, u64) {
        let outer = (self.watched, self.rounds);
        if let Some(watch) = self.watch.filter(|_| !self.watched) {
            let word = def!(self, B32, "mov.b32", 0);
            when!(self, watch.late, true, "ld.relaxed.sys.global.b32", word, Arg::At(watch.stop, 0));
            let stopped = def!(self, Pred, "setp.ne.u32", word, 0);
            when!(self, stopped, true, "mov.b32", watch.slice, 0);
        }
        self.watched = true;
        self.rounds = 1;
        outer
    }

    fn leave_watched(&mut self, outer: (bool, u64)) {
        (self.watched, self.rounds) = outer;
    }

    /// Takes rounds of a loop from the slice.
    fn spend(&mut self, op: &Op, rounds: u64) {
        let Some(watch) = self.watch else { return };
        let on = self.asm.new_label();
        ins!(self, "add.s32", watch.slice, watch.slice, -(rounds as i64));
        let enough = def!(self, Pred, "setp.ge.s32", watch.slice, 0);
        when!(self, enough, true, "bra", Arg::Label(on));
        self.look(watch);
        let none = def!(self, Pred, "setp.eq.s64", watch.rounds, 0);
        when!(self, none, true, "bra", Arg::Label(watch.out_of_rounds));
        let take = def!(self, B64, "min.u64", watch.rounds, SLICE);
        ins!(self, "sub.s64", watch.rounds, watch.rounds, take);
        let more = def!(self, B32, "cvt.u32.u64", take);
        ins!(self, "add.s32", watch.slice, watch.slice, more);
        self.asm.place(on);
        let round = work::of_round(self.kernel, &self.ranges, op, rounds);
        if let Some((work, round)) = watch.work.zip(round) {
            let on = self.asm.new_label();
            ins!(self, "add.s32", work, work, -round);
            let enough = def!(self, Pred, "setp.ge.s32", work, 0);
            when!(self, enough, true, "bra", Arg::Label(on));
            self.look(watch);
            ins!(self, "mov.b32", work, LOOK as i64);
            self.asm.place(on);
        }
    }

    /// Leaves if the launch is stopped.
    fn look(&mut self, watch: Watch) {
        let word = def!(self, B32, "ld.relaxed.sys.global.b32", Arg::At(watch.stop, 0));
        let stopped = def!(self, Pred, "setp.ne.u32", word, 0);
        when!(self, stopped, true, "bra", Arg::Label(watch.leave));
    }

    /// What lies behind the kernel's `ret`.
    pub(super) fn epilogue(&mut self) {
        let Some(watch) = self.watch else { return };
        self.asm.place(watch.out_of_rounds);
        let code = i64::from(Guard::OUT_OF_ROUNDS);
        let old = self.asm.new_reg(Class::B32);
        ins!(self, "atom.relaxed.sys.global.cas.b32", old, Arg::At(watch.stop, 0), 0, code);
        self.asm.place(watch.leave);
        ins!(self, "exit");
    }
}

fn count_ops(region: &Region) -> u64 {
    region.ops.iter().map(|op| 1 + op.regions.iter().map(count_ops).sum::<u64>()).sum()
}
