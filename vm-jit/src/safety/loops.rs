//! Which loops are unrolled, and which are polled.

use super::cost::{self, Costs};
use super::{INTERVAL, Loop, Parameters, Poll, SHORT, SafetyPlan, Unroll, Unrolling};
use crate::range::Ranges;
use vm_ir::Kernel;
use vm_ir::module::{Op, Region};
use vm_ir::op::{Opcode, Shape};

/// Plans the loops of a kernel, and its bound.
pub(super) fn plan(plan: &mut SafetyPlan, kernel: &Kernel, ranges: &Ranges, parameters: &Parameters) {
    let unrolled = match parameters.unrolling {
        Some(limits) => {
            let mut all = vec![Unroll::None; plan.decisions.len()];
            let mut unroller = Unroller { plan, ranges, limits, budget: limits.budget, all: &mut all };
            unroller.region(kernel.body(), 1);
            all
        }
        None => vec![Unroll::None; plan.decisions.len()],
    };
    let by_cost = parameters.cancels_clusters || kernel.cluster() == 1 || !gathers(kernel);
    let costs = parameters.costs;
    let mut poller = Poller { plan, kernel, ranges, costs, unrolled, by_cost };
    let mut body = Stretch::default();
    poller.region(kernel.body(), &mut body);
    plan.bound = body.cost.saturating_add(cost::begin(kernel, costs));
}

fn gathers(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.for_each_op(&mut |op| found |= op.code == Opcode::ClusterGather);
    found
}

/// The most iterations of a `for`, if that is known.
pub(super) fn bound(ranges: &Ranges, op: &Op) -> Option<u64> {
    ranges.loop_of(op).map(|known| known.rounds).filter(|bound| *bound < u64::MAX)
}

struct Unroller<'a> {
    plan: &'a SafetyPlan,
    ranges: &'a Ranges,
    limits: Unrolling,
    /// Ops that may still be added.
    budget: u64,
    /// By op.
    all: &'a mut Vec<Unroll>,
}

impl Unroller<'_> {
    /// Decides for a region of which there are so many copies; gives its ops, each counted once.
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
        let Some(known) = self.ranges.loop_of(op) else { return Unroll::None };
        if known.rounds == 0 {
            return Unroll::Full(0);
        }
        let (hint, size) = (op.unroll(), op.regions.iter().map(count).sum::<u64>());
        let mut fits = |n: u64| {
            let ops = n.saturating_mul(size).saturating_mul(copies);
            let fits = hint > 1 && ops <= self.limits.ops && ops <= self.budget;
            self.budget -= if fits { ops } else { 0 };
            fits
        };
        if let Some(exact) = known.exact.filter(|exact| *exact <= hint && fits(*exact)) {
            return Unroll::Full(exact);
        }
        // The count goes this far beyond the end, and must not overflow.
        if known.steps_up && known.room > hint && fits(hint) { Unroll::Partial(hint) } else { Unroll::None }
    }
}

/// The ops of a region, with those inside of them.
fn count(region: &Region) -> u64 {
    region.ops.iter().map(|op| 1 + op.regions.iter().map(count).sum::<u64>()).sum()
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
}

struct Poller<'a> {
    plan: &'a mut SafetyPlan,
    kernel: &'a Kernel,
    ranges: &'a Ranges,
    costs: Costs,
    /// By op.
    unrolled: Vec<Unroll>,
    /// May loops be polled because of what they cost?
    by_cost: bool,
}

impl Poller<'_> {
    /// Adds a region to a stretch, all regions of a branch one behind the other: threads of a warp may take different ones.
    /// Is there a polled loop in it?
    fn region(&mut self, region: &Region, stretch: &mut Stretch) -> bool {
        region.ops.iter().fold(false, |polls, op| self.op(op, stretch) | polls)
    }

    fn op(&mut self, op: &Op, stretch: &mut Stretch) -> bool {
        let polls = match op.code.shape() {
            Shape::For | Shape::While => self.looped(op, stretch),
            _ => {
                stretch.cost = stretch.cost.saturating_add(cost::of(self.kernel, op, self.costs));
                op.regions.iter().fold(false, |polls, region| self.region(region, stretch) | polls)
            }
        };
        if let Some(number) = self.plan.number(op) {
            self.plan.decisions[number.0 as usize].polls = polls;
        }
        polls
    }

    fn looped(&mut self, op: &Op, stretch: &mut Stretch) -> bool {
        let mut body = Stretch { cost: cost::LOOP, ..Stretch::default() };
        let mut polls = op.regions.iter().fold(false, |polls, region| self.region(region, &mut body) | polls);
        let bound = bound(self.ranges, op);
        let Some(number) = self.plan.number(op) else { return polls };
        let unroll = self.unrolled[number.0 as usize];
        // An iteration without loops is one itself.
        let each = body.iterations.max(1);
        let iterations = bound.unwrap_or(u64::MAX).saturating_mul(each);
        let cost = bound.unwrap_or(u64::MAX).saturating_mul(body.cost);
        let long = stretch.iterations.saturating_add(iterations) > SHORT;
        let costly = stretch.in_loops.saturating_add(cost) > INTERVAL && bound.is_none_or(|bound| bound > 1);
        let poll = (self.plan.guest && (long || costly && self.by_cost)).then(|| {
            let most = (SHORT / each).min(INTERVAL / body.cost);
            let copies = match unroll {
                Unroll::None => 1,
                Unroll::Full(n) | Unroll::Partial(n) => n,
            };
            Poll { every: most.clamp(1, copies.max(1)), iteration: body.cost }
        });
        match poll {
            Some(poll) => stretch.cost = stretch.cost.saturating_add(poll.every.saturating_mul(body.cost)),
            None => {
                stretch.iterations = stretch.iterations.saturating_add(iterations);
                stretch.in_loops = stretch.in_loops.saturating_add(cost);
                stretch.cost = stretch.cost.saturating_add(cost).saturating_add(cost::LOOP);
            }
        }
        polls |= poll.is_some();
        self.plan.decisions[number.0 as usize].looped =
            Some(Loop { bound, unroll, poll, iteration: body.cost });
        polls
    }
}
