//! Which loops are unrolled, and which are polled.

use super::cost;
use super::{Loop, Poll, SHORT, SafetyPlan, Unroll, Unrolling};
use crate::range::Ranges;
use vm_ir::Kernel;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Opcode, Shape};

/// Plans the loops of a kernel, and its bound.
pub(super) fn plan(plan: &mut SafetyPlan<'_>) {
    let (parameters, kernel) = (plan.parameters, plan.ranges.kernel());
    let unrolled = match parameters.unrolling {
        Some(limits) => {
            let mut all = vec![Unroll::None; plan.decisions.len()];
            let mut unroller = Unroller { plan, limits, budget: limits.budget, all: &mut all };
            unroller.region(kernel.body(), 1);
            all
        }
        None => vec![Unroll::None; plan.decisions.len()],
    };
    let by_cost = parameters.cancels_clusters || kernel.cluster() == 1 || !gathers(kernel);
    let mut poller = Poller { plan, unrolled, by_cost, furthest: 0 };
    poller.region(kernel.body(), &mut Stretch::default());
    let furthest = poller.furthest;
    plan.bound = furthest.saturating_add(cost::begin(kernel, parameters.costs));
}

fn gathers(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.for_each_op(&mut |op| found |= op.code == Opcode::ClusterGather);
    found
}

/// The most iterations of a `for`, if that is known.
pub(super) fn bound(ranges: &Ranges<'_>, op: &Op) -> Option<u64> {
    ranges.loop_of(op).map(|known| known.iterations).filter(|bound| *bound < u64::MAX)
}

struct Unroller<'a> {
    plan: &'a SafetyPlan<'a>,
    limits: Unrolling,
    /// What may still be added.
    budget: u64,
    /// By op.
    all: &'a mut Vec<Unroll>,
}

impl Unroller<'_> {
    /// Decides for a region of which there are N copies.
    fn region(&mut self, region: &Region, copies: u64) {
        for op in &region.ops {
            let mut inside = copies;
            if op.code.shape() == Shape::For {
                let unroll = self.decide(op, copies);
                inside = copies.saturating_mul(match unroll {
                    Unroll::None => 1,
                    Unroll::Full(n) => n.max(1),
                    // And those that are left.
                    Unroll::Partial(n) => n + 1,
                });
                if let Some(number) = self.plan.number(op) {
                    self.all[number.0 as usize] = unroll;
                }
            }
            op.regions.iter().for_each(|region| self.region(region, inside));
        }
    }

    fn decide(&mut self, op: &Op, copies: u64) -> Unroll {
        let Some(known) = self.plan.ranges.loop_of(op) else { return Unroll::None };
        if known.iterations == 0 {
            return Unroll::Full(0);
        }
        let hint = op.unroll();
        let each = if hint > 1 { self.size(op).saturating_add(self.limits.copy) } else { 0 };
        let mut fits = |n: u64| {
            let size = n.saturating_mul(each).saturating_mul(copies);
            let fits = hint > 1 && size <= self.budget;
            self.budget -= if fits { size } else { 0 };
            fits
        };
        if let Some(exact) = known.exact.filter(|exact| *exact <= hint && fits(*exact)) {
            return Unroll::Full(exact);
        }
        // The count goes this far beyond the end, and must not overflow; one more copy is for what is left.
        if known.steps_up && known.room > hint && fits(hint + 1) {
            Unroll::Partial(hint)
        } else {
            Unroll::None
        }
    }

    /// What the regions of an op come to, each loop inside of it once.
    fn size(&self, op: &Op) -> u64 {
        let ops = op.regions.iter().flat_map(|region| &region.ops);
        let (kernel, size) = (self.plan.ranges.kernel(), self.limits.size);
        ops.map(|op| size(kernel, op, self.plan.access(op)).saturating_add(self.size(op))).sum()
    }
}

/// What a thread does at most from one poll point to the next.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    /// Iterations of loops that are not polled.
    iterations: u64,
    /// What these cost.
    in_loops: u64,
    /// What all of it costs.
    cost: u64,
    /// What was done around the loop that it is the body of, before it.
    around: u64,
    /// What everything from the stretch's begin costs, poll points or not.
    total: u64,
}

impl Stretch {
    fn most(self, other: Stretch) -> Stretch {
        Stretch {
            iterations: self.iterations.max(other.iterations),
            in_loops: self.in_loops.max(other.in_loops),
            cost: self.cost.max(other.cost),
            around: self.around.max(other.around),
            total: self.total.max(other.total),
        }
    }
}

struct Poller<'a, 'k> {
    plan: &'a mut SafetyPlan<'k>,
    /// By op.
    unrolled: Vec<Unroll>,
    /// May loops be polled because of what they cost?
    by_cost: bool,
    /// The most that a thread does between two poll points.
    furthest: u64,
}

impl Poller<'_, '_> {
    /// Adds a region to a stretch. Is there a polled loop in it?
    fn region(&mut self, region: &Region, stretch: &mut Stretch) -> bool {
        region.ops.iter().fold(false, |polls, op| self.op(op, stretch) | polls)
    }

    /// Adds the regions of a branch.
    fn branch(&mut self, op: &Op, stretch: &mut Stretch) -> bool {
        if self.plan.parameters.straight.is_none() {
            // One behind the other: threads of a warp may take different ones.
            return op.regions.iter().fold(false, |polls, region| self.region(region, stretch) | polls);
        }
        let (before, mut polls) = (*stretch, false);
        for region in &op.regions {
            let mut one = before;
            polls |= self.region(region, &mut one);
            *stretch = stretch.most(one);
        }
        polls
    }

    fn op(&mut self, op: &Op, stretch: &mut Stretch) -> bool {
        let before = stretch.total;
        let polls = match op.code.shape() {
            Shape::For | Shape::While => self.looped(op, stretch),
            _ => {
                let cost = cost::of(self.plan.ranges.kernel(), op, self.plan.parameters.costs);
                self.add(op, cost, cost, stretch);
                self.branch(op, stretch)
            }
        };
        if let Some(number) = self.plan.number(op) {
            let decision = &mut self.plan.decisions[number.0 as usize];
            (decision.polls, decision.cost) = (polls, stretch.total - before);
        }
        polls
    }

    /// Adds what an op costs from its begin or its last poll point on, and in all; behind a poll point where it would become too
    /// much with it.
    fn add(&mut self, op: &Op, cost: u64, total: u64, stretch: &mut Stretch) {
        let limit = self.plan.parameters.straight.filter(|_| self.plan.guest);
        let full = stretch.cost > 0 && limit.is_some_and(|limit| stretch.cost.saturating_add(cost) > limit);
        if let Some(number) = self.plan.number(op).filter(|_| full) {
            self.plan.decisions[number.0 as usize].before = Some(stretch.cost);
            (stretch.cost, stretch.around) = (0, 0);
        }
        stretch.cost = stretch.cost.saturating_add(cost);
        stretch.total = stretch.total.saturating_add(total);
        self.furthest = self.furthest.max(stretch.around.saturating_add(stretch.cost));
    }

    fn looped(&mut self, op: &Op, stretch: &mut Stretch) -> bool {
        let around = stretch.around.saturating_add(stretch.cost);
        let mut body = Stretch { cost: cost::LOOP, total: cost::LOOP, around, ..Stretch::default() };
        let mut polls = op.regions.iter().fold(false, |polls, region| self.region(region, &mut body) | polls);
        let bound = bound(&self.plan.ranges, op);
        let Some(number) = self.plan.number(op) else { return polls };
        let (unroll, parameters) = (self.unrolled[number.0 as usize], self.plan.parameters);
        // An iteration without loops is one itself.
        let each = body.iterations.max(1);
        let iterations = bound.unwrap_or(u64::MAX).saturating_mul(each);
        let cost = bound.unwrap_or(u64::MAX).saturating_mul(body.total);
        let long = stretch.iterations.saturating_add(iterations) > SHORT;
        let costly = stretch.in_loops.saturating_add(cost) > parameters.in_loops
            && bound.is_none_or(|bound| bound > 1);
        let poll = (self.plan.guest && (long || costly && self.by_cost)).then(|| {
            let most = (SHORT / each).min(parameters.interval / body.total);
            let copies = match unroll {
                Unroll::None => 1,
                Unroll::Full(n) | Unroll::Partial(n) => n,
            };
            let every = most.clamp(1, copies.max(1));
            Poll { every, takes_fuel: long, iteration: body.total, interval: parameters.interval }
        });
        match poll {
            Some(poll) => {
                let all = |cost: u64| poll.every.saturating_mul(cost);
                self.add(op, all(body.cost), all(body.total), stretch);
            }
            None => {
                let cost = cost.saturating_add(cost::LOOP);
                self.add(op, cost, cost, stretch);
                stretch.iterations = stretch.iterations.saturating_add(iterations);
                stretch.in_loops = stretch.in_loops.saturating_add(cost);
            }
        }
        polls |= poll.is_some();
        self.plan.decisions[number.0 as usize].looped =
            Some(Loop { bound, unroll, poll, iteration: body.total });
        polls
    }
}
