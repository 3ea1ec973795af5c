//! The proof that a plan is safe, found from what it says and nothing else.

use super::{Loop, SHORT, SafetyPlan, Unroll, cost};
use vm_ir::Kernel;
use vm_ir::module::Op;
use vm_ir::op::{PlaceRule, Shape};

/// What a plan lacks: an error of this crate, which must not become code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unsafe {
    /// The loop may take long, and is not polled.
    #[error("the loop in line {line} may take {iterations} iterations between two polls")]
    Unpolled {
        /// Where it is.
        line: u32,
        /// How many.
        iterations: u64,
    },
    /// Nothing is known of an op.
    #[error("nothing is planned for the op in line {line}")]
    Unplanned {
        /// Where it is.
        line: u32,
    },
    /// The bound is below what the plan itself allows.
    #[error("a thread may do {found} operations between two polls, and the plan says {bound}")]
    Bound {
        /// What the plan allows.
        found: u64,
        /// What it says.
        bound: u64,
    },
}

impl SafetyPlan<'_> {
    /// Sees that all loops of a guest's kernel are polled or short, also together and unrolled, that every access is planned,
    /// and that the bound is one.
    ///
    /// # Errors
    /// The first that is not so.
    pub(crate) fn verify(&self) -> Result<(), Unsafe> {
        let kernel = self.ranges.kernel();
        let begin = cost::begin(kernel, self.parameters.costs);
        let mut walk = Walk { plan: self, kernel, begin, spent: 0 };
        let mut done = Done::default();
        kernel.body().ops.iter().try_for_each(|op| walk.op(op, 1, &mut done))
    }
}

/// What a thread did.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    /// Since the last poll point, or since the begin of the loop's body.
    since: u64,
    /// Before that, around the loop.
    around: u64,
    /// In all of the loop's body.
    total: u64,
}

/// Goes from the outside in, where the plan was made from the inside out.
struct Walk<'a> {
    plan: &'a SafetyPlan<'a>,
    kernel: &'a Kernel,
    /// What it costs to begin.
    begin: u64,
    /// Iterations of innermost loops in the stretch at hand, so far.
    spent: u64,
}

impl Walk<'_> {
    /// The regions of an op that are run so often in a stretch.
    fn regions(&mut self, op: &Op, times: u64, done: &mut Done) -> Result<(), Unsafe> {
        let mut ops = op.regions.iter().flat_map(|region| &region.ops);
        ops.try_for_each(|op| self.op(op, times, done))
    }

    /// What an op does from its begin or its last poll point on, and in all.
    fn add(&self, op: &Op, since: u64, total: u64, done: &mut Done) -> Result<(), Unsafe> {
        if self.plan.charge_before(op, 1).is_some() {
            *done = Done { total: done.total, ..Done::default() };
        }
        done.since = done.since.saturating_add(since);
        done.total = done.total.saturating_add(total);
        let found = done.since.saturating_add(done.around).saturating_add(self.begin);
        match found <= self.plan.bound {
            true => Ok(()),
            false => Err(Unsafe::Bound { found, bound: self.plan.bound }),
        }
    }

    fn op(&mut self, op: &Op, times: u64, done: &mut Done) -> Result<(), Unsafe> {
        let line = op.line.0;
        if matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
            self.plan.access(op).ok_or(Unsafe::Unplanned { line })?;
        }
        if !matches!(op.code.shape(), Shape::For | Shape::While) {
            return self.plain(op, times, done);
        }
        let planned = *self.plan.loop_of(op).ok_or(Unsafe::Unplanned { line })?;
        let Loop { bound, unroll, poll, iteration } = planned;
        let most = |iterations| Unsafe::Unpolled { line, iterations };
        let (inside, often) = match (poll, bound) {
            (None, None) => return Err(most(u64::MAX)),
            (None, Some(bound)) => (times.saturating_mul(bound), bound),
            (Some(poll), _) => {
                let copies = match unroll {
                    Unroll::None => 1,
                    Unroll::Full(n) | Unroll::Partial(n) => n.max(1),
                };
                if poll.every == 0 || poll.every > copies {
                    return Err(most(poll.every));
                }
                (poll.every, poll.every)
            }
        };
        // A polled loop begins a stretch of its own.
        let around = poll.map(|_| std::mem::take(&mut self.spent));
        let before = self.spent;
        let mut body =
            Done { since: cost::LOOP, around: done.around.saturating_add(done.since), total: cost::LOOP };
        self.regions(op, inside, &mut body)?;
        if body.total > iteration {
            return Err(Unsafe::Bound { found: body.total, bound: iteration });
        }
        if self.spent == before {
            // Nothing inside counted: it is an innermost loop of the stretch.
            self.spent = self.spent.saturating_add(inside);
        }
        if self.spent > SHORT {
            return Err(most(self.spent));
        }
        self.spent = around.unwrap_or(self.spent);
        let since = if poll.is_some() { body.since } else { iteration };
        self.add(op, often.saturating_mul(since), often.saturating_mul(iteration), done)
    }

    fn plain(&mut self, op: &Op, times: u64, done: &mut Done) -> Result<(), Unsafe> {
        let own = cost::of(self.kernel, op, self.plan.parameters.costs);
        self.add(op, own, own, done)?;
        if self.plan.parameters.straight.is_none() {
            // Threads of a warp may take different ones.
            return self.regions(op, times, done);
        }
        let (before, spent) = (*done, self.spent);
        let mut most = spent;
        for region in &op.regions {
            let mut one = before;
            self.spent = spent;
            region.ops.iter().try_for_each(|op| self.op(op, times, &mut one))?;
            most = most.max(self.spent);
            done.since = done.since.max(one.since);
            done.around = done.around.max(one.around);
            done.total = done.total.max(one.total);
        }
        self.spent = most;
        Ok(())
    }
}
