//! What threads do between two poll points of a run, held against what their plan says that they do at most.

use super::{OpId, Parameters, SHORT, SafetyPlan, cost};
use std::collections::HashMap;
use vm_ir::module::{Op, Region};
use vm_ir::op::Shape;
use vm_ir::{Kernel, Trust};

/// A plan, and where each thread is.
pub(crate) struct Watch<'k> {
    plan: SafetyPlan<'k>,
    /// Loops, by the ops that their iterations begin with.
    begins: HashMap<OpId, OpId>,
    ops: Vec<Known>,
    threads: HashMap<u32, Thread>,
    /// Poll points that were passed.
    pub(crate) polls: u64,
}

/// What is known of an op.
struct Known {
    cost: u64,
    /// Of a polled loop: iterations from one poll point to the next.
    every: Option<u64>,
    /// Is it a loop that is not polled, without another one inside?
    counts: bool,
}

#[derive(Default)]
struct Thread {
    /// What it did since its last poll point.
    cost: u64,
    /// Iterations of innermost loops that are not polled, since its last poll point.
    spent: u64,
    /// Those before each polled loop that it is in.
    before: Vec<u64>,
    /// Iterations of each loop that it is in.
    iterations: HashMap<OpId, u64>,
}

impl<'k> Watch<'k> {
    /// Plans a guest's kernel.
    pub(crate) fn of(kernel: &'k Kernel, parameters: &Parameters) -> Result<Watch<'k>, String> {
        let plan = SafetyPlan::of(kernel, Trust::Guest, parameters).map_err(|error| error.to_string())?;
        let (mut begins, mut ops) = (HashMap::new(), Vec::new());
        kernel.for_each_op(&mut |op| {
            let first = op.regions.first().and_then(|region| region.ops.first());
            let planned = plan.loop_of(op);
            if let (Some(_), Some(first), Some(number)) = (planned, first, plan.number(op)) {
                begins.extend(plan.number(first).map(|first| (first, number)));
            }
            let every = planned.and_then(|planned| planned.poll).map(|poll| poll.every);
            let counts = planned.is_some()
                && every.is_none()
                && !op.regions.iter().any(|region| counted(&plan, region));
            ops.push(Known { cost: cost::of(kernel, op, parameters.costs), every, counts });
        });
        Ok(Watch { plan, begins, ops, threads: HashMap::new(), polls: 0 })
    }

    /// These threads take an op.
    ///
    /// # Errors
    /// One of them has done more than the plan allows.
    pub(crate) fn op(&mut self, op: &Op, threads: &[u32]) -> Result<(), String> {
        let number = self.plan.number(op).ok_or("an op of another kernel")?;
        let known = &self.ops[number.0 as usize];
        let of = self.begins.get(&number).map(|of| (*of, &self.ops[of.0 as usize]));
        let is_before = self.plan.charge_before(op, 1).is_some();
        for thread in threads {
            let thread = self.threads.entry(*thread).or_default();
            if number == OpId(0) {
                // Another block.
                *thread = Thread::default();
            }
            if let Some((number, of)) = of {
                let iterations = thread.iterations.entry(number).or_default();
                if of.every.is_some_and(|every| iterations.is_multiple_of(every)) {
                    (thread.cost, thread.spent, self.polls) = (0, 0, self.polls + 1);
                }
                *iterations += 1;
                thread.spent += u64::from(of.counts);
                thread.cost += cost::LOOP;
            }
            if is_before {
                (thread.cost, self.polls) = (0, self.polls + 1);
            }
            if matches!(op.code.shape(), Shape::For | Shape::While) {
                thread.iterations.insert(number, 0);
                thread.before.extend(known.every.map(|_| thread.spent));
            }
            thread.cost += known.cost;
            if thread.cost > self.plan.bound() || thread.spent > SHORT {
                let (line, Thread { cost, spent, .. }, bound) = (op.line.0, thread, self.plan.bound());
                return Err(format!(
                    "line {line}: a thread did {cost}, and {spent} iterations, without a poll; at most {bound} and {SHORT} are \
                     claimed"
                ));
            }
        }
        Ok(())
    }

    /// A thread has left a loop behind.
    pub(crate) fn looped(&mut self, op: &Op, thread: u32) {
        let every = self.plan.number(op).and_then(|number| self.ops[number.0 as usize].every);
        if let (Some(_), Some(thread)) = (every, self.threads.get_mut(&thread)) {
            // Its poll points are around each iteration.
            thread.spent = thread.before.pop().unwrap_or_default();
        }
    }
}

/// Is there a loop in a region whose iterations count, as it is neither polled nor in one that is?
fn counted(plan: &SafetyPlan<'_>, region: &Region) -> bool {
    region.ops.iter().any(|op| match plan.loop_of(op) {
        Some(planned) => planned.poll.is_none(),
        None => op.regions.iter().any(|region| counted(plan, region)),
    })
}
