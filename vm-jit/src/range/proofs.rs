//! Tests that what is claimed of random kernels is so when they run: the interpreter, which knows nothing of this crate,
//! tells of every op and its operands.

use super::{Fact, Lanes, Ranges};
use crate::safety::{SafetyPlan, watch::Watch};
use std::collections::HashMap;
use vm_ir::arbitrary::{self, Options};
use vm_ir::interp::{Limits, Observer, State, observe};
use vm_ir::module::{Op, Place};
use vm_ir::op::{PlaceRule, Shape};
use vm_ir::{Trust, Value, validate};

/// Holds what is known of a kernel against a run of it.
struct Judge<'k> {
    ranges: Ranges<'k>,
    /// The plans of targets.
    watches: Vec<Watch<'k>>,
    /// What is wrong, if anything is.
    wrong: Option<String>,
    /// Ops by thread.
    work: HashMap<u32, u64>,
    seen: Seen,
}

/// How often there was something to hold against, so that a test which never finds any is noticed.
#[derive(Default, Debug)]
struct Seen {
    facts: u64,
    below: u64,
    accesses: u64,
    all: u64,
    together: u64,
    bytes: u64,
    multiples: u64,
    split: u64,
    exact: u64,
    bounded: u64,
    room: u64,
    work: u64,
    polls: u64,
    long: u64,
}

impl Judge<'_> {
    fn hold(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.wrong.is_none() {
            self.wrong = Some(what());
        }
    }

    fn number(state: &State<'_>, value: Value, thread: u32) -> i128 {
        let scalar = state.kernel().type_of(value).scalar();
        i128::from(vm_ir::format::signed(scalar, state.lanes(value, thread)[0]))
    }

    fn fact(&mut self, op: &Op, index: usize, fact: &Fact, thread: u32, state: &State<'_>) {
        let value = op.operands[index];
        let ty = state.kernel().type_of(value);
        if ty.is_vector() || !ty.scalar().is_int() {
            return;
        }
        let number = Self::number(state, value, thread);
        let divides = number.trailing_zeros() >= fact.shift.min(64) || number == 0;
        let below = fact.below.iter().all(|below| {
            let extent = state.extents(Place::View(below.view))[usize::from(below.dimension)];
            number <= i128::from(extent) + i128::from(below.offset)
        });
        self.seen.facts += 1;
        self.seen.below += fact.below.len() as u64;
        self.hold(number >= fact.low && number <= fact.high && divides && below, || {
            format!("line {}: {}: operand {index} is {number}, {fact:?}", op.line.0, op.code.mnemonic())
        });
    }

    fn access(&mut self, op: &Op, threads: &[u32], state: &State<'_>) {
        let Some(place) = op.place else { return };
        let known = self.ranges.access(op).cloned();
        let Some(known) = known else {
            self.hold(false, || format!("line {}: nothing is known of an access", op.line.0));
            return;
        };
        let extents: Vec<i128> = state.extents(place).iter().map(|extent| i128::from(*extent)).collect();
        let value = op.result().or(op.operands.last().copied());
        let lanes = value.map_or(1, |value| state.kernel().type_of(value).lanes().into());
        let bytes = state.kernel().by_bytes(op).map(|ty| ty.bytes());
        let lanes = i128::from(bytes.unwrap_or(lanes));
        for thread in threads {
            let indices: Vec<i128> =
                (0..extents.len()).map(|i| Self::number(state, op.operands[i], *thread)).collect();
            let outer = known.outer.iter().zip(&indices).zip(&extents);
            let outer = outer.fold(true, |holds, ((proved, index), extent)| {
                holds && (!proved || (0..*extent).contains(index))
            });
            let (last, extent) = (indices[indices.len() - 1], extents[extents.len() - 1]);
            let all = last >= 0 && last + lanes <= extent;
            let multiple = bytes.is_none() || last % lanes == 0;
            let inner = match known.lanes {
                Lanes::All => all && multiple,
                Lanes::Bytes { within, aligned } => (all || !within) && (multiple || !aligned),
                Lanes::Together => all || !(0..extent).contains(&last) && (last >= 0 || last + lanes <= 0),
                Lanes::Each => true,
            };
            let aligned = last.trailing_zeros() >= known.shift.min(64) || last == 0;
            let (base, by) = known.base;
            let split = Self::number(state, base, *thread) + i128::from(by) == last;
            self.seen.accesses += 1;
            self.seen.all += u64::from(known.lanes == Lanes::All);
            self.seen.together += u64::from(known.lanes == Lanes::Together && lanes > 1);
            self.seen.bytes += u64::from(matches!(known.lanes, Lanes::Bytes { within: true, .. }));
            self.seen.multiples += u64::from(matches!(known.lanes, Lanes::Bytes { aligned: true, .. }));
            self.seen.split += u64::from(by != 0);
            self.hold(outer && inner && aligned && split, || {
                format!("line {}: {known:?} of {indices:?} in {extents:?}, {lanes} lanes", op.line.0)
            });
        }
    }
}

impl Observer for Judge<'_> {
    fn op(&mut self, op: &Op, threads: &[u32], state: &State<'_>) {
        for thread in threads {
            *self.work.entry(*thread).or_default() += 1;
        }
        if self.wrong.is_some() {
            return;
        }
        let watched = self.watches.iter_mut().try_for_each(|watch| watch.op(op, threads));
        watched.unwrap_or_else(|wrong| self.hold(false, || wrong));
        for index in 0..op.operands.len() {
            if let Some(fact) = self.ranges.operand(op, index).cloned() {
                threads.iter().for_each(|thread| self.fact(op, index, &fact, *thread, state));
            }
        }
        if matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
            self.access(op, threads, state);
        }
        if op.code.shape() == Shape::For
            && let Some(known) = self.ranges.loop_of(op).copied()
        {
            let scalar = state.kernel().type_of(op.operands[0]).scalar();
            for thread in threads {
                let [high, step] = [1, 2].map(|i| Self::number(state, op.operands[i], *thread));
                let room = high + i128::from(known.room) * step.max(0) <= i128::from(scalar.mask() >> 1);
                self.seen.room += u64::from(known.room > 0);
                self.hold(room && (!known.steps_up || step >= 1), || {
                    format!("line {}: {known:?} of a loop to {high} in steps of {step}", op.line.0)
                });
            }
        }
    }

    fn looped(&mut self, op: &Op, thread: u32, iterations: u64) {
        self.watches.iter_mut().for_each(|watch| watch.looped(op, thread));
        self.seen.long += u64::from(iterations >= 1000);
        let Some(known) = self.ranges.loop_of(op).copied() else { return };
        self.seen.exact += u64::from(known.exact.is_some());
        self.seen.bounded += u64::from(known.iterations < 1 << 20);
        self.hold(
            iterations <= known.iterations && known.exact.is_none_or(|exact| exact == iterations),
            || format!("line {}: {known:?} of a loop of {iterations} iterations", op.line.0),
        );
    }
}

/// Runs random kernels; gives the first seed of which something untrue is known.
fn judge(seeds: std::ops::Range<u64>) -> Result<Seen, String> {
    let mut seen = Seen::default();
    for seed in seeds {
        let long = seed.is_multiple_of(2);
        let options = Options { statements: 30, inexact: false, long, ..Options::default() };
        let (module, mut launch) = arbitrary::kernel(seed, options);
        let text = vm_ir::text::print(&module);
        // By way of the text, so that ops have lines.
        let module = vm_ir::text::parse(&text).map_err(|error| format!("seed {seed}: {error}"))?;
        let module = validate(module, Trust::Guest).map_err(|error| format!("seed {seed}: {error}"))?;
        let kernel = &module.kernels()[0];
        let ranges = Ranges::keeping(kernel, true);
        let gpu = crate::backend::ptx::Options::new("sm_90a".parse().map_err(|error| format!("{error:?}"))?);
        let watches = [crate::backend::cpu::SAFETY, crate::backend::ptx::safety(&gpu)]
            .iter()
            .map(|parameters| Watch::of(kernel, parameters))
            .collect::<Result<_, _>>()
            .map_err(|error| format!("seed {seed}: {error}"))?;
        let plan = SafetyPlan::of(kernel, Trust::Trusted, &crate::backend::cpu::SAFETY);
        let bound = plan.map_err(|error| format!("seed {seed}: {error}"))?.bound();
        let mut judge = Judge { ranges, watches, wrong: None, work: HashMap::new(), seen };
        let blocks = u64::from(launch.grid.iter().product::<u32>());
        observe(&module, &mut launch, &Limits::default(), &mut judge)
            .map_err(|error| format!("seed {seed}: {error}"))?;
        let most = judge.work.values().copied().max().unwrap_or(0) / (blocks / u64::from(kernel.cluster()));
        judge.seen.work += u64::from(bound < u64::MAX);
        judge.seen.polls += judge.watches.iter().map(|watch| watch.polls).sum::<u64>();
        judge.hold(most <= bound, || format!("{most} ops of a thread, at most {bound} are claimed"));
        if let Some(wrong) = judge.wrong {
            return Err(format!("seed {seed}: {wrong}\n{text}"));
        }
        seen = judge.seen;
    }
    Ok(seen)
}

#[test]
fn what_is_known_of_random_kernels_is_so() {
    let seen = judge(0..100).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{seen:?}");
    let Seen { facts, below, accesses, all, together, bytes, multiples, .. } = seen;
    let Seen { split, exact, bounded, room, work, polls, long, .. } = seen;
    for (what, count, least) in [
        ("facts", facts, 1 << 20),
        ("extents that something is below", below, 1 << 15),
        ("accesses", accesses, 1 << 17),
        ("accesses in bounds", all, accesses / 16),
        ("accesses as a whole", together, 1 << 8),
        ("accesses by bytes within", bytes, 1 << 8),
        ("accesses by bytes at multiples", multiples, 1 << 8),
        ("accesses at a base and a distance", split, 1 << 12),
        ("loops of exactly known iterations", exact, 1 << 10),
        ("loops of bounded iterations", bounded, 1 << 11),
        ("loops that may go on", room, 1 << 11),
        ("kernels of bounded work", work, 1 << 5),
        ("poll points", polls, 1 << 16),
        ("loops that are long", long, 1 << 4),
    ] {
        assert!(count >= least, "{what}: only {count}");
    }
}
