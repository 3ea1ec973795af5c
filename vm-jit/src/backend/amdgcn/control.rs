//! Regions, and where a guest's loops are polled.

use super::writer::{Label, Val, Writer, int};
use crate::safety::{Poll, QUANTUM};
use vm_abi::Guard;
use vm_ir::module::{Op, Region};

/// What a guest's kernel is cancelled by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cancel {
    /// Address of the cancel flag.
    flag: Val,
    out_of_fuel: Label,
    leave: Label,
}

/// The counters of a thread that is polled: iterations left until the next poll, those left behind that, and what is left of the
/// interval, where some iterations are long.
const QUANTUM_LEFT: usize = 0;
const FUEL_LEFT: usize = 1;
const INTERVAL_LEFT: usize = 2;
const COUNTERS: [&str; 3] = ["i32", "i64", "i32"];

/// What code changes beside values: first the counters, then what [tiles](super::tile) have in registers.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) types: Vec<&'static str>,
    pub(super) now: Vec<Val>,
    /// How many of them are counters.
    counters: usize,
}

impl State {
    /// Adds something, and gives its number.
    pub(super) fn add(&mut self, ty: &'static str, value: Val) -> usize {
        self.types.push(ty);
        self.now.push(value);
        self.now.len() - 1
    }
}

/// What a loop carries.
struct Carried {
    /// Where an iteration ends.
    latch: Label,
    types: Vec<&'static str>,
    /// What of the state.
    state: Vec<usize>,
    /// In an iteration.
    now: Vec<Val>,
    /// In the next.
    next: Vec<Val>,
}

/// Where a region ends: its last block, what it yields, and the state.
struct Arm {
    at: Label,
    values: Vec<Val>,
    state: Vec<Val>,
}

impl<'k> Writer<'k> {
    fn values_of(&self, region: &Region) -> Vec<Val> {
        self.all_of(&region.yields).into_iter().map(|(_, value)| value).collect()
    }

    pub(super) fn if_op(&mut self, op: &'k Op) {
        let condition = self.get(op.operands[0], 0);
        self.branches(op, |_, _| condition);
    }

    pub(super) fn switch_op(&mut self, op: &'k Op) {
        let (ty, value) = (int(self.ty(op.operands[0]).scalar()), self.get(op.operands[0], 0));
        self.branches(op, |writer, case| {
            writer.def(format_args!("icmp eq {ty} {value}, {}", op.immediates[case]))
        });
    }

    /// The first region whose condition is true, else the last, and behind it what that yields. Each region is in the other arm
    /// of the one before, and arms meet in pairs: where LLVM 22 makes control flow structured by itself, as that of its
    /// `switch`, the default's value is lost for lanes that come there another way than the rest.
    fn branches(&mut self, op: &'k Op, condition: impl Fn(&mut Self, usize) -> Val) {
        let Some((last, others)) = op.regions.split_last() else { return };
        let mut arms = Vec::new();
        for (number, region) in others.iter().enumerate() {
            let condition = condition(self, number);
            let (inside, other, end, before) =
                (self.label(), self.label(), self.label(), self.state.now.clone());
            self.br_if(condition, inside, other);
            self.place(inside);
            arms.push((self.arm(region), end));
            self.br(end);
            self.place(other);
            self.state.now = before;
        }
        let mut joined = self.arm(last);
        for (arm, end) in arms.into_iter().rev() {
            self.br(end);
            self.place(end);
            joined = self.join(op, [arm, joined]);
        }
        self.give(op, joined);
    }

    fn arm(&mut self, region: &'k Region) -> Arm {
        self.region(region);
        Arm { at: self.at, values: self.values_of(region), state: self.state.now.clone() }
    }

    /// What came from each of these blocks.
    fn phi(&mut self, ty: &str, from: impl Iterator<Item = (Label, Val)> + Clone) -> Val {
        let mut values = from.clone().map(|(_, value)| value);
        if let Some(first) = values.next()
            && values.all(|value| value == first)
        {
            return first;
        }
        let from: Vec<String> = from.map(|(label, value)| format!("[ {value}, {label} ]")).collect();
        self.def(format_args!("phi {ty} {}", from.join(", ")))
    }

    /// What came from either of two arms.
    fn join(&mut self, op: &Op, arms: [Arm; 2]) -> Arm {
        let types: Vec<_> = self.all_of(&op.results).into_iter().map(|(ty, _)| ty).collect();
        let kinds = self.state.types.clone();
        let mut each = |types: &[&str], of: fn(&Arm) -> &[Val]| {
            let all = types.iter().enumerate();
            all.map(|(at, ty)| self.phi(ty, arms.iter().map(|arm| (arm.at, of(arm)[at])))).collect()
        };
        let values = each(&types, |arm| &arm.values);
        let state = each(&kinds, |arm| &arm.state);
        Arm { at: self.at, values, state }
    }

    /// Gives an op's results, and the state, what an arm ended with.
    fn give(&mut self, op: &Op, arm: Arm) {
        self.set_each(&op.results, &arm.values);
        self.state.now = arm.state;
    }

    /// Begins an op's loop, which carries this, and what of the state it changes.
    fn begin_loop(&mut self, op: &Op, head: Label, initial: &[(&'static str, Val)]) -> Carried {
        let state = (0..self.state.counters).chain(self.changed_tiles(op)).collect();
        let (from, latch) = (self.at, self.label());
        self.br(head);
        self.place(head);
        let mut carried = Carried { latch, types: Vec::new(), state, now: Vec::new(), next: Vec::new() };
        let own: Vec<(&str, Val)> =
            carried.state.iter().map(|at| (self.state.types[*at], self.state.now[*at])).collect();
        for (ty, first) in initial.iter().copied().chain(own) {
            let next = self.reserve();
            carried.now.push(self.def(format_args!("phi {ty} [ {first}, {from} ], [ {next}, {latch} ]")));
            carried.next.push(next);
            carried.types.push(ty);
        }
        let own = carried.now.split_off(initial.len());
        carried.state.iter().zip(own).for_each(|(at, value)| self.state.now[*at] = value);
        carried
    }

    /// Ends an iteration; what follows branches.
    fn end_iteration(&mut self, carried: &Carried, values: &[Val]) {
        self.br(carried.latch);
        self.place(carried.latch);
        let own = carried.state.iter().map(|at| &self.state.now[*at]);
        let values: Vec<Val> = values.iter().chain(own).copied().collect();
        for ((ty, next), value) in carried.types.iter().zip(&carried.next).zip(values) {
            self.define(*next, ty, value);
        }
    }

    pub(super) fn while_op(&mut self, op: &'k Op) {
        let [condition, body] = &op.regions[..] else { return };
        let poll = self.plan.loop_of(op).and_then(|planned| planned.poll);
        let outer = self.enter_polled(poll);
        let (head, inside, end) = (self.label(), self.label(), self.label());
        let initial = self.all_of(&op.operands);
        let carried = self.begin_loop(op, head, &initial);
        self.set_each(&condition.args, &carried.now);
        self.region(condition);
        let goes_on = self.get(condition.yields[0], 0);
        self.br_if(goes_on, inside, end);
        let at_end = self.state.now.clone();
        self.place(inside);
        self.region(body);
        let values = self.values_of(body);
        self.poll_point(poll);
        self.end_iteration(&carried, &values);
        self.br(head);
        self.place(end);
        self.state.now = at_end;
        self.polled = outer;
        self.set_each(&op.results, &carried.now);
    }

    pub(super) fn for_op(&mut self, op: &'k Op) {
        let [body] = &op.regions[..] else { return };
        let poll = self.plan.loop_of(op).and_then(|planned| planned.poll);
        let ty = int(self.ty(op.operands[0]).scalar());
        let [low, high, step] = [0, 1, 2].map(|i| self.get(op.operands[i], 0));
        let initial = self.all_of(&op.operands[3..]);
        let outer = self.enter_polled(poll);
        let (enter, head, end) = (self.label(), self.label(), self.label());
        let some = self.def(format_args!("icmp slt {ty} {low}, {high}"));
        let up = self.def(format_args!("icmp sge {ty} {step}, 1"));
        let runs = self.def(format_args!("and i1 {some}, {up}"));
        let values = initial.iter().map(|(_, value)| *value).collect();
        let before = Arm { at: self.at, values, state: self.state.now.clone() };
        self.br_if(runs, enter, end);
        self.place(enter);
        let carried = self.begin_loop(op, head, &[&[(ty, low)][..], &initial].concat());
        self.set_each(&body.args, &carried.now);
        self.region(body);
        let values = self.values_of(body);
        self.poll_point(poll);
        // The count could overflow, so what is left is compared with the step.
        let count = carried.now[0];
        let left = self.def(format_args!("sub {ty} {high}, {count}"));
        let more = self.def(format_args!("icmp ugt {ty} {left}, {step}"));
        let next = self.def(format_args!("add {ty} {count}, {step}"));
        self.end_iteration(&carried, &[&[next][..], &values].concat());
        self.br_if(more, head, end);
        self.place(end);
        let ran = Arm { at: carried.latch, values, state: self.state.now.clone() };
        let joined = self.join(op, [before, ran]);
        self.give(op, joined);
        self.polled = outer;
    }

    /// Prepares polling. `all` is the fuel, the iterations of polled loops that the thread may take.
    pub(super) fn prepare_polls(&mut self, flag: Val, all: Val) {
        let most = Val::Bits(1 << 62);
        let all = self.call("i64", "llvm.umin.i64", &[("i64", all), ("i64", most)]);
        let mut counters = vec![Val::Bits(0), all];
        if self.plan.poll_points().any(|poll| poll.charge(1).is_some()) {
            counters.push(Val::Bits(self.plan.interval() as u64));
        }
        self.state =
            State { types: COUNTERS[..counters.len()].to_vec(), counters: counters.len(), now: counters };
        self.refuel();
        self.cancel = Some(Cancel { flag, out_of_fuel: self.label(), leave: self.label() });
    }

    /// Takes a quantum of the fuel; what there is, if there is less.
    fn refuel(&mut self) {
        let (quantum, fuel) = (self.state.now[QUANTUM_LEFT], self.state.now[FUEL_LEFT]);
        let take = self.call("i64", "llvm.umin.i64", &[("i64", fuel), ("i64", Val::Bits(QUANTUM))]);
        self.state.now[FUEL_LEFT] = self.def(format_args!("sub i64 {fuel}, {take}"));
        let take = self.def(format_args!("trunc i64 {take} to i32"));
        self.state.now[QUANTUM_LEFT] = self.def(format_args!("add i32 {quantum}, {take}"));
    }

    /// Begins a loop that may be polled; gives whether the code around is in one that is. A launch that is cancelled begins none.
    fn enter_polled(&mut self, poll: Option<Poll>) -> bool {
        let outer = self.polled;
        if let Some(cancel) = self.cancel.filter(|_| poll.is_some()) {
            if !outer {
                self.poll(cancel);
            }
            self.polled = true;
        }
        outer
    }

    /// Takes from a counter, and gives whether it is used up.
    fn take(&mut self, counter: usize, by: i64) -> Val {
        let before = self.state.now[counter];
        let after = self.def(format_args!("sub i32 {before}, {by}"));
        self.state.now[counter] = after;
        self.def(format_args!("icmp slt i32 {after}, 0"))
    }

    /// Takes an iteration of a polled loop from the quantum, and its cost from the interval, and polls when either is used up.
    fn poll_point(&mut self, poll: Option<Poll>) {
        let Some((cancel, poll)) = self.cancel.zip(poll) else { return };
        let over = poll.charge(1).map(|charge| self.take(INTERVAL_LEFT, charge));
        let empty = poll.takes_fuel.then(|| self.take(QUANTUM_LEFT, 1));
        let used_up = match (over, empty) {
            (Some(over), Some(empty)) => self.def(format_args!("or i1 {over}, {empty}")),
            (over, empty) => match over.or(empty) {
                Some(one) => one,
                None => return,
            },
        };
        let (slow, on) = (self.label(), self.label());
        let mut joined = vec![(self.at, self.state.now.clone())];
        self.br_if(used_up, slow, on);
        self.place(slow);
        self.poll(cancel);
        if let Some(over) = over {
            let (left, interval) = (self.state.now[INTERVAL_LEFT], self.plan.interval());
            self.state.now[INTERVAL_LEFT] =
                self.def(format_args!("select i1 {over}, i32 {interval}, i32 {left}"));
        }
        if let Some(empty) = empty {
            let (fuel, more) = (self.label(), self.label());
            joined.push((self.at, self.state.now.clone()));
            self.br_if(empty, fuel, on);
            self.place(fuel);
            let rest = self.state.now[FUEL_LEFT];
            let none = self.def(format_args!("icmp eq i64 {rest}, 0"));
            self.br_if(none, cancel.out_of_fuel, more);
            self.place(more);
            self.refuel();
        }
        joined.push((self.at, self.state.now.clone()));
        self.br(on);
        self.place(on);
        for at in 0..self.state.counters {
            let from = joined.iter().map(|(label, state)| (*label, state[at]));
            self.state.now[at] = self.phi(self.state.types[at], from);
        }
    }

    /// Leaves if the launch is cancelled.
    fn poll(&mut self, cancel: Cancel) {
        let read = |writer: &mut Self| {
            writer.def(format_args!("load atomic i32, ptr addrspace(1) {} monotonic, align 4", cancel.flag))
        };
        let word = if self.tiles.is_some() { self.handed_over("i32", read) } else { read(self) };
        let cancelled = self.def(format_args!("icmp ne i32 {word}, 0"));
        let on = self.label();
        self.br_if(cancelled, cancel.leave, on);
        self.place(on);
    }

    /// What lies behind the kernel's end: a thread out of fuel sets the cancel flag, unless it is set.
    pub(super) fn epilogue(&mut self) {
        let Some(cancel) = self.cancel else { return };
        self.place(cancel.out_of_fuel);
        let code = Guard::OUT_OF_FUEL;
        self.def(format_args!(
            "cmpxchg ptr addrspace(1) {}, i32 0, i32 {code} monotonic monotonic",
            cancel.flag
        ));
        self.br(cancel.leave);
        self.place(cancel.leave);
        self.line("ret void");
    }
}
