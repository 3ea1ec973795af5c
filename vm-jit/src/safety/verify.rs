//! The proof that a plan is safe, found from what it says and nothing else.

use super::{Loop, SHORT, SafetyPlan, Unroll, cost};
use vm_ir::Kernel;
use vm_ir::module::{Op, Region};
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

impl SafetyPlan {
    /// Sees that all loops of a guest's kernel are polled or short, also together and unrolled, that every access is planned,
    /// and that the bound is one.
    ///
    /// # Errors
    /// The first that is not so.
    pub(crate) fn verify(&self, kernel: &Kernel) -> Result<(), Unsafe> {
        let mut walk = Walk { plan: self, kernel, spent: 0 };
        let found = walk.region(kernel.body(), 1)?.saturating_add(cost::begin(kernel, self.costs));
        match found <= self.bound {
            true => Ok(()),
            false => Err(Unsafe::Bound { found, bound: self.bound }),
        }
    }
}

/// Goes from the outside in, where the plan was made from the inside out.
struct Walk<'a> {
    plan: &'a SafetyPlan,
    kernel: &'a Kernel,
    /// Iterations of innermost loops in the stretch at hand, so far.
    spent: u64,
}

impl Walk<'_> {
    /// A region that is run so often in a stretch; gives what it costs to run it once.
    fn region(&mut self, region: &Region, times: u64) -> Result<u64, Unsafe> {
        region.ops.iter().try_fold(0u64, |sum, op| Ok(sum.saturating_add(self.op(op, times)?)))
    }

    fn regions(&mut self, op: &Op, times: u64) -> Result<u64, Unsafe> {
        op.regions.iter().try_fold(0u64, |sum, region| Ok(sum.saturating_add(self.region(region, times)?)))
    }

    fn op(&mut self, op: &Op, times: u64) -> Result<u64, Unsafe> {
        let line = op.line.0;
        if matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
            self.plan.access(op).ok_or(Unsafe::Unplanned { line })?;
        }
        if !matches!(op.code.shape(), Shape::For | Shape::While) {
            let own = cost::of(self.kernel, op, self.plan.costs);
            return Ok(own.saturating_add(self.regions(op, times)?));
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
        let found = self.regions(op, inside)?.saturating_add(cost::LOOP);
        if found > iteration {
            return Err(Unsafe::Bound { found, bound: iteration });
        }
        if self.spent == before {
            // Nothing inside counted: it is an innermost loop of the stretch.
            self.spent = self.spent.saturating_add(inside);
        }
        if self.spent > SHORT {
            return Err(most(self.spent));
        }
        self.spent = around.unwrap_or(self.spent);
        Ok(often.saturating_mul(iteration))
    }
}
