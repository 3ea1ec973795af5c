//! Plans are run: a thread of a small machine goes through random nests of loops as a plan says, and counts what it does
//! between two poll points and between two polls.

use super::cost;
use super::tests::ptx;
use super::{Poll, QUANTUM, SHORT, SafetyPlan, Unroll};
use crate::backend::cpu::SAFETY as CPU;
use proptest::prelude::*;
use vm_ir::module::{Op, Region};
use vm_ir::op::Shape;
use vm_ir::{Trust, ValidModule, text, validate};

/// Part of a kernel.
#[derive(Clone, Debug)]
enum Part {
    Add,
    Atomic,
    /// With an unroll hint.
    For(Bound, u64, Vec<Part>),
    While(Vec<Part>),
    If(Vec<Part>, Vec<Part>),
}

/// Up to what: a constant, a parameter of at most 100, one of at most a million, or any.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Constant(u32),
    Few,
    Many,
    Any,
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let bound = prop_oneof![
        6 => prop_oneof![0u32..4, 1u32..300, Just(4096), Just(4097)].prop_map(Bound::Constant),
        1 => Just(Bound::Few),
        1 => Just(Bound::Many),
        1 => Just(Bound::Any),
    ];
    let hint = prop_oneof![Just(0u64), Just(1), Just(2), Just(7), Just(16), Just(256)];
    let leaf = prop_oneof![4 => Just(Part::Add), 1 => Just(Part::Atomic)];
    let part = leaf.prop_recursive(6, 40, 3, move |inner| {
        let inner = prop::collection::vec(inner, 0..3);
        prop_oneof![
            8 => (bound.clone(), hint.clone(), inner.clone()).prop_map(|(b, h, parts)| Part::For(b, h, parts)),
            1 => inner.clone().prop_map(Part::While),
            1 => (inner.clone(), inner).prop_map(|(then, other)| Part::If(then, other)),
        ]
    });
    prop::collection::vec(part, 1..4)
}

/// The text of a kernel of these parts.
fn text_of(parts: &[Part]) -> String {
    fn body(parts: &[Part], names: &mut u32, out: &mut String) {
        for part in parts {
            *names += 1;
            let n = *names;
            match part {
                Part::Add => *out += &format!("%v{n} = add %any, %any : i32\n"),
                Part::Atomic => *out += &format!("%v{n} = atomic.add.device @x[%one], %any : i32\n"),
                Part::For(bound, hint, parts) => {
                    let high = match bound {
                        Bound::Constant(high) => {
                            *out += &format!("%high{n} = const {high} : i32\n");
                            format!("%high{n}")
                        }
                        Bound::Few => "%few".into(),
                        Bound::Many => "%many".into(),
                        Bound::Any => "%any".into(),
                    };
                    let hint = if *hint == 0 { String::new() } else { format!(" unroll {hint}") };
                    *out += &format!("for %i{n}: i32 = %zero to {high} step %one{hint} {{\n");
                    body(parts, names, out);
                    *out += "}\n";
                }
                Part::While(parts) => {
                    *out += &format!("while {{\n%w{n} = lt.s %any, %one : bool\nyield %w{n}\n}} do {{\n");
                    body(parts, names, out);
                    *out += "}\n";
                }
                Part::If(then, other) => {
                    *out += &format!("%c{n} = lt.s %any, %one : bool\nif %c{n} {{\n");
                    body(then, names, out);
                    *out += "} else {\n";
                    body(other, names, out);
                    *out += "}\n";
                }
            }
        }
    }
    let mut out = String::from(
        "vir 1\nkernel @k(@x: view<i32, [?], readwrite>, %few: i32 in [0, 100], %many: i32 in [0, 1000000], \
         %any: i32) at 0x0 block(32) {\n\
         %zero = const 0 : i32\n%one = const 1 : i32\n",
    );
    body(parts, &mut 0, &mut out);
    out + "}\n"
}

fn valid(text: &str) -> ValidModule {
    validate(text::parse(text).unwrap(), Trust::Guest).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A thread that goes where its seed leads it, for some ops.
struct Thread<'a> {
    plan: &'a SafetyPlan<'a>,
    seed: u64,
    /// Ops that it does before it is left alone.
    fuel: u64,
    /// Iterations since the last poll point, without those that have others inside; of each stretch that is open.
    stretches: Vec<u64>,
    /// Cost since the last poll point, and since the last poll.
    since: [u64; 2],
    quantum: i64,
    left: i64,
    /// The most of these.
    longest: u64,
    costliest: [u64; 2],
}

impl<'a> Thread<'a> {
    fn new(plan: &'a SafetyPlan<'a>, seed: u64) -> Self {
        Thread {
            plan,
            seed,
            fuel: 12_000,
            stretches: vec![0],
            since: [0; 2],
            quantum: QUANTUM as i64,
            left: plan.interval(),
            longest: 0,
            costliest: [0; 2],
        }
    }

    /// SplitMix64, below a limit.
    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn take(&mut self, cost: u64) {
        for (since, most) in self.since.iter_mut().zip(&mut self.costliest) {
            *since += cost;
            *most = (*most).max(*since);
        }
        self.fuel = self.fuel.saturating_sub(1);
    }

    fn region(&mut self, region: &Region) {
        for op in &region.ops {
            if self.fuel == 0 {
                return;
            }
            if let Some(charge) = self.plan.charge_before(op, 1) {
                self.since[0] = 0;
                self.charge(charge);
            }
            match op.code.shape() {
                Shape::For | Shape::While => self.looped(op),
                // Threads of a GPU's warp that part go one behind the other, so a warp may take all.
                _ => {
                    let parameters = &self.plan.parameters;
                    self.take(cost::of(self.plan.ranges.kernel(), op, parameters.costs));
                    let only =
                        self.random(if self.plan.parameters.straight.is_some() { 2 } else { 3 }) as usize;
                    for (at, region) in op.regions.iter().enumerate() {
                        if only == 2 || only == at {
                            self.region(region);
                        }
                    }
                }
            }
        }
    }

    fn looped(&mut self, op: &Op) {
        let planned = *self.plan.loop_of(op).unwrap();
        let most = planned.bound.unwrap_or(1 << 40);
        let iterations = match self.plan.ranges.loop_of(op).and_then(|known| known.exact) {
            Some(exact) => exact,
            None => [0, self.random(most + 1), most][self.random(3) as usize],
        };
        let copies = match planned.unroll {
            Unroll::None => 1,
            Unroll::Full(n) | Unroll::Partial(n) => n,
        };
        self.take(cost::LOOP);
        if planned.poll.is_some() {
            self.stretches.push(0);
        }
        let mut at = 0;
        while at < iterations && self.fuel > 0 {
            // What is left behind the copies goes one by one.
            let together = if iterations - at >= copies { copies } else { 1 };
            let mut taken = 0;
            for copy in 1..=together {
                self.iteration(op);
                taken += 1;
                if let Some(poll) = planned.poll.filter(|poll| copy == together || copy % poll.every == 0) {
                    self.poll_point(poll, taken);
                    taken = 0;
                }
            }
            at += together;
        }
        if planned.poll.is_some() {
            self.stretches.pop();
        }
    }

    fn iteration(&mut self, op: &Op) {
        let before = self.stretches.last().copied();
        self.take(cost::LOOP);
        op.regions.iter().for_each(|region| self.region(region));
        if let Some(stretch) = self.stretches.last_mut() {
            *stretch += u64::from(before == Some(*stretch));
            self.longest = self.longest.max(*stretch);
        }
    }

    fn charge(&mut self, charge: i64) {
        self.left -= charge;
        if self.left < 0 {
            self.left = self.plan.interval();
            self.since[1] = 0;
        }
    }

    fn poll_point(&mut self, poll: Poll, iterations: u64) {
        self.since[0] = 0;
        *self.stretches.last_mut().unwrap() = 0;
        self.quantum -= if poll.takes_fuel { iterations as i64 } else { 0 };
        if self.quantum < 0 {
            self.quantum += QUANTUM as i64;
            self.since[1] = 0;
        }
        if let Some(charge) = poll.charge(iterations) {
            self.charge(charge);
        }
    }
}

/// Runs a kernel as planned, and sees that no thread does more than the plan says.
fn check(text: &str, seed: u64) -> Result<(), TestCaseError> {
    let module = valid(text);
    let kernel = &module.kernels()[0];
    for parameters in [&ptx(), &CPU] {
        let plan = SafetyPlan::of(kernel, Trust::Guest, parameters)
            .map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        let mut thread = Thread::new(&plan, seed);
        thread.region(kernel.body());
        prop_assert!(thread.longest <= SHORT, "{} iterations\n{text}", thread.longest);
        let [point, poll] = thread.costliest;
        prop_assert!(point <= plan.bound(), "{point} of {}\n{text}", plan.bound());
        // What is charged, and iterations that are short enough for the quantum alone.
        let interval = parameters.interval;
        let most = plan.bound() + 2 * interval + interval / QUANTUM;
        prop_assert!(poll <= most, "{poll} of {most}\n{text}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_thread_does_more_than_planned(parts in parts(), seed in any::<u64>()) {
        check(&text_of(&parts), seed)?;
    }
}

/// Nests that are long together, in the ways in which each loop of them looks short.
#[test]
fn nests_that_are_long_together() {
    use Bound::{Any, Constant, Few, Many};
    let nest = |loops: &[(Bound, u64)]| {
        loops
            .iter()
            .rev()
            .fold(vec![Part::Atomic, Part::Add], |parts, (bound, hint)| vec![Part::For(*bound, *hint, parts)])
    };
    let light = |parts: Vec<Part>| vec![Part::While(vec![Part::For(Few, 2, parts), Part::Add])];
    let cases = [
        nest(&[(Constant(256), 256), (Constant(4096), 0)]),
        nest(&[(Constant(16), 16), (Constant(16), 16), (Constant(16), 16), (Constant(16), 16)]),
        nest(&[(Constant(1000), 256), (Constant(4096), 0)]),
        nest(&[(Many, 256), (Constant(4096), 0)]),
        nest(&[(Many, 256), (Constant(100), 7), (Few, 16)]),
        nest(&[(Constant(256), 256), (Any, 0)]),
        vec![Part::For(Constant(256), 256, vec![Part::While(vec![Part::Add])])],
        light(nest(&[(Constant(64), 16), (Constant(64), 0)])),
        (0..20).flat_map(|_| nest(&[(Constant(4000), 0)])).collect(),
    ];
    for parts in cases {
        for seed in 0..4 {
            check(&text_of(&parts), seed).unwrap();
        }
    }
}
