//! One plan of what keeps a guest's kernel safe: which loops are unrolled and which are polled for cancellation, which
//! accesses are checked, and how much a thread does at most before it ends or polls.
//!
//! It is made once for a kernel and a target, before anything is emitted, from what [`Ranges`] proved; a back end reads it and
//! decides nothing of the kind by itself. Ops are known by their number in the order of the text ([`OpId`]).
//!
//! # Polling
//!
//! A thread that is to be cancelled notices when it polls the cancel flag. A polled loop counts its iterations and their cost,
//! and polls after [`QUANTUM`] of the ones or an interval's worth of the other. All other loops run unseen, so this must hold, and
//! [`verify`](SafetyPlan::verify) proves it of every guest's kernel before code is made of it:
//!
//! * A `while` is polled. So is a `for` without a known bound.
//! * **On every path, loops that are not polled take at most [`SHORT`] iterations** from the kernel's begin, or from one poll
//!   point, to the next. Those of loops in one another multiply, those of loops one behind the other add up, and unrolling
//!   changes nothing: each copy of the body is an iteration. A polled loop that is unrolled has its poll points between the
//!   copies, no further apart than that.
//! * Together they cost at most a share of the interval, if the target can cancel the kernel at all.
//!
//! Of a nest that is too long together the outermost loop that has to be is polled, so that its inner loops stay as they are.
//!
//! On a GPU code without loops ends soon enough by itself. On a processor, which runs a block's threads one after the other,
//! there are poll points in it too ([`charge_before`](SafetyPlan::charge_before)), and in the loops over threads
//! ([`charge_of_threads`](SafetyPlan::charge_of_threads)), so that no code of a block costs much more than an interval.
//!
//! # Loads that decide
//!
//! A guest may change memory while its kernel runs. A load of a guest's kernel from which an index or a condition is computed
//! [is done once](SafetyPlan::loads_once), whatever a compiler behind this one makes of it.
//!
//! # The cost bound
//!
//! [`SafetyPlan::bound`] is found from the same numbers: all ops once, a loop as often as its iterations at most, a polled one
//! as often as it has iterations between two poll points. It is what a launch is charged and refused by ([`cost`]).

mod access;
pub(crate) mod cost;
mod deciding;
mod loops;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
mod verify;
#[cfg(test)]
pub(crate) mod watch;

pub(crate) use access::{Access, Last};

use crate::range::Ranges;
use crate::reject::{Reject, RejectKind};
use std::collections::HashMap;
use vm_ir::module::Op;
use vm_ir::{Kernel, Trust};

/// Iterations of loops that are not polled, between two poll points.
pub(crate) const SHORT: u64 = 4096;

/// Iterations of polled loops between two polls.
pub(crate) const QUANTUM: u64 = 4096;

/// The number of an op in its kernel: an op comes before those in its regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OpId(u32);

/// What a target makes of a kernel, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters {
    /// What an op costs.
    pub(crate) costs: cost::Costs,
    /// How far loops are unrolled; `None` where they are not.
    pub(crate) unrolling: Option<Unrolling>,
    /// Cost between two polls, about.
    pub(crate) interval: u64,
    /// Cost of loops that are not polled, between two poll points.
    pub(crate) in_loops: u64,
    /// Cost of other code between two poll points; `None` where only loops have them.
    pub(crate) straight: Option<u64>,
    /// Can a kernel whose blocks gather in clusters be cancelled? If not, loops are polled only where they must be.
    pub(crate) cancels_clusters: bool,
}

/// How far loops are unrolled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unrolling {
    /// What an op comes to without its regions, in instructions.
    pub(crate) size: fn(&Kernel, &Op, Option<&Access>) -> u64,
    /// What each copy of a loop's body takes beside it.
    pub(crate) copy: u64,
    /// What all copies in a kernel may come to.
    pub(crate) budget: u64,
}

/// How a loop is unrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unroll {
    /// Not at all.
    None,
    /// Into N copies: all of its iterations.
    Full(u64),
    /// Into a loop of N copies, and one of a single copy for what is left.
    Partial(u64),
}

/// Where a loop is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Poll {
    /// Iterations from one poll point to the next; more than one only between copies.
    pub(crate) every: u64,
    /// Do its iterations take fuel? Not those of a loop that is known to be short, and only costs much.
    pub(crate) takes_fuel: bool,
    iteration: u64,
    interval: u64,
}

impl Poll {
    /// What a poll point takes from the interval for N iterations; `None` where [`QUANTUM`] of them, which take fuel, take no
    /// more than that together. On a poll point of several threads each has taken as many.
    pub(crate) fn charge(self, iterations: u64) -> Option<i64> {
        let cost = self.iteration.saturating_mul(iterations);
        (!self.takes_fuel || cost > self.interval / QUANTUM).then(|| charge(cost, self.interval))
    }
}

/// What is taken from an interval. What is as long as all of it is polled at once.
fn charge(cost: u64, interval: u64) -> i64 {
    cost.min(interval + 1) as i64
}

/// What becomes of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loop {
    /// The most iterations that it can take; `None` if that is not known.
    pub(crate) bound: Option<u64>,
    /// How it is unrolled.
    pub(crate) unroll: Unroll,
    /// Is it polled?
    pub(crate) poll: Option<Poll>,
    /// What an iteration costs.
    pub(crate) iteration: u64,
}

/// What is planned for one op.
#[derive(Clone, Debug, Default)]
struct Decision {
    looped: Option<Loop>,
    access: Option<Access>,
    /// Is it a guest's load from which is computed where an access goes?
    decides: bool,
    /// What it costs with all that is inside of it, and no loop more often than from one poll point to the next.
    cost: u64,
    /// What was done since the last poll point, where there is one before it.
    before: Option<u64>,
    /// Is it a polled loop, or is there one inside?
    polls: bool,
}

/// When a loop over threads takes from the interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadsCharge {
    /// Behind the threads that are run together, each time.
    Each(i64),
    /// Behind all.
    All(i64),
}

/// The plan for a kernel, which it borrows.
#[derive(Debug)]
pub(crate) struct SafetyPlan<'k> {
    ranges: Ranges<'k>,
    numbers: HashMap<*const Op, OpId>,
    decisions: Vec<Decision>,
    parameters: Parameters,
    guest: bool,
    cancellable: bool,
    bound: u64,
}

impl<'k> SafetyPlan<'k> {
    /// Makes it.
    ///
    /// # Errors
    /// That it is not safe: an error of this crate, for which no kernel is to blame.
    pub(crate) fn of(
        kernel: &'k Kernel,
        trust: Trust,
        parameters: &Parameters,
    ) -> Result<SafetyPlan<'k>, Reject> {
        let ranges = Ranges::of(kernel);
        let mut numbers = HashMap::new();
        let mut decisions = Vec::new();
        let guest = trust == Trust::Guest;
        kernel.for_each_op(&mut |op| {
            numbers.insert(std::ptr::from_ref(op), OpId(decisions.len() as u32));
            let access = access::plan(&ranges, op, guest);
            decisions.push(Decision { access, ..Decision::default() });
        });
        let (parameters, cancellable, bound) = (*parameters, false, 0);
        let mut plan = SafetyPlan { ranges, numbers, decisions, parameters, guest, cancellable, bound };
        for op in guest.then(|| deciding::find(kernel)).into_iter().flatten() {
            if let Some(id) = plan.number(op) {
                plan.decisions[id.0 as usize].decides = true;
            }
        }
        loops::plan(&mut plan);
        plan.cancellable = plan.decisions.iter().any(|decision| decision.polls);
        if guest {
            plan.verify().map_err(|error| {
                let what = format!("its safety plan is wrong: {error}");
                Reject::new(kernel, kernel.line().0, RejectKind::Generator { what })
            })?;
        }
        Ok(plan)
    }

    /// What is known of the kernel that it is for.
    pub(crate) fn ranges(&self) -> &Ranges<'k> {
        &self.ranges
    }

    /// The number of an op of the kernel.
    pub(crate) fn number(&self, op: &Op) -> Option<OpId> {
        self.numbers.get(&std::ptr::from_ref(op)).copied()
    }

    fn decision(&self, op: &Op) -> Option<&Decision> {
        self.decisions.get(self.number(op)?.0 as usize)
    }

    /// What becomes of a `for` or a `while`.
    pub(crate) fn loop_of(&self, op: &Op) -> Option<&Loop> {
        self.decision(op)?.looped.as_ref()
    }

    /// How an access to a view or a shared array is done.
    pub(crate) fn access(&self, op: &Op) -> Option<&Access> {
        self.decision(op)?.access.as_ref()
    }

    /// Is it a load whose value must be loaded once, since what is checked with it must be what is used?
    pub(crate) fn loads_once(&self, op: &Op) -> bool {
        self.decision(op).is_some_and(|decision| decision.decides)
    }

    /// Is the op a polled loop, or is there one inside of it?
    pub(crate) fn polls(&self, op: &Op) -> bool {
        self.decision(op).is_some_and(|decision| decision.polls)
    }

    /// Is there any polled loop? Then the kernel takes a [`Guard`](crate::Guard).
    pub(crate) fn cancellable(&self) -> bool {
        self.cancellable
    }

    /// Cost between two polls, about.
    pub(crate) fn interval(&self) -> i64 {
        self.parameters.interval as i64
    }

    /// What N threads take from the interval before an op, for what they did since the last poll point; `None` where
    /// there is no poll point.
    pub(crate) fn charge_before(&self, op: &Op, threads: u64) -> Option<i64> {
        let cost = self.decision(op)?.before?;
        Some(charge(cost.saturating_mul(threads), self.parameters.interval))
    }

    /// What a loop over N threads, some of them at a time, takes from the interval for what these ops leave unpolled.
    pub(crate) fn charge_of_threads(
        &self,
        ops: &[&Op],
        threads: u64,
        together: u64,
    ) -> Option<ThreadsCharge> {
        let limit = self.parameters.straight.filter(|_| self.guest)?;
        let decisions = ops.iter().filter_map(|op| self.decision(op));
        // More than that lies between no two poll points.
        let most = limit.saturating_add(self.parameters.in_loops);
        let one = decisions.fold(0u64, |sum, decision| sum.saturating_add(decision.cost)).min(most);
        let all = one.saturating_mul(threads);
        Some(match all > self.parameters.in_loops {
            true => ThreadsCharge::Each(charge(one.saturating_mul(together), self.parameters.interval)),
            false => ThreadsCharge::All(charge(all, self.parameters.interval)),
        })
    }

    /// Is the kernel a guest's?
    pub(crate) fn is_guests(&self) -> bool {
        self.guest
    }

    /// Are shared and local arrays zeroed, so that nobody sees what was there before?
    pub(crate) fn zeroes_arrays(&self) -> bool {
        self.guest
    }

    /// The most that a thread does before it ends or comes to a poll point, in weighted operations; [`u64::MAX`] where that
    /// has no bound.
    pub(crate) fn bound(&self) -> u64 {
        self.bound
    }

    /// The polled loops.
    pub(crate) fn poll_points(&self) -> impl Iterator<Item = Poll> {
        self.decisions.iter().filter_map(|decision| decision.looped?.poll)
    }
}
