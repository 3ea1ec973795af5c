//! Ops with regions: each runs its regions for the threads that take them.

use super::exec::{Machine, Result};
use crate::format::signed;
use crate::module::{Op, Value};
use crate::op::Shape;

impl<'m> Machine<'m> {
    /// Copies values in all of the threads, as if at once.
    fn copy(&mut self, from: &[Value], to: &[Value], active: &[u32]) -> Result<()> {
        for value in to {
            self.room_for(*value)?;
        }
        for &thread in active {
            let bits: Vec<Vec<u64>> = from.iter().map(|v| self.lanes(*v, thread).to_vec()).collect();
            for (value, bits) in to.iter().zip(&bits) {
                self.set(*value, thread, bits);
            }
        }
        Ok(())
    }

    /// `if` and `switch`: each region for the threads that choose it, one region after the other.
    pub(super) fn choose(&mut self, op: &'m Op, active: &[u32]) -> Result<()> {
        let selector = op.operands[0];
        let scalar = self.ty(selector).scalar();
        let default = op.regions.len() - 1;
        let choice = |bits: u64| match op.code.shape() {
            Shape::If => usize::from(bits == 0),
            _ => {
                op.immediates.iter().position(|case| *case as i64 == signed(scalar, bits)).unwrap_or(default)
            }
        };
        let chosen: Vec<usize> = active.iter().map(|t| choice(self.get(selector, *t))).collect();
        for (i, region) in op.regions.iter().enumerate() {
            let here: Vec<u32> =
                active.iter().zip(&chosen).filter(|(_, c)| **c == i).map(|(t, _)| *t).collect();
            if !here.is_empty() {
                self.region(region, &here)?;
                self.copy(&region.yields, &op.results, &here)?;
            }
        }
        Ok(())
    }

    pub(super) fn for_loop(&mut self, op: &'m Op, active: &[u32]) -> Result<()> {
        let (bounds, initial) = op.operands.split_at(3);
        let body = &op.regions[0];
        let (count, carried) = body.args.split_at(1);
        let scalar = self.ty(count[0]).scalar();
        self.room_for(count[0])?;
        self.copy(initial, carried, active)?;
        let bound =
            |machine: &Self, i: usize, thread| i128::from(signed(scalar, machine.get(bounds[i], thread)));
        let mut here = active.to_vec();
        for round in 0i128.. {
            let before = self.observer.is_some().then(|| here.clone());
            here.retain(|&thread| {
                let (low, high, step) =
                    (bound(self, 0, thread), bound(self, 1, thread), bound(self, 2, thread));
                step >= 1 && low + round * step < high
            });
            if let Some(before) = before {
                let gone = before.into_iter().filter(|thread| here.binary_search(thread).is_err());
                self.looped(op, gone, round as u64);
            }
            if here.is_empty() {
                break;
            }
            self.spend(here.len())?;
            for &thread in &here {
                let at = bound(self, 0, thread) + round * bound(self, 2, thread);
                self.set(count[0], thread, &[at as u64 & scalar.mask()]);
            }
            self.region(body, &here)?;
            self.copy(&body.yields, carried, &here)?;
        }
        self.copy(carried, &op.results, active)
    }

    pub(super) fn while_loop(&mut self, op: &'m Op, active: &[u32]) -> Result<()> {
        let (condition, body) = (&op.regions[0], &op.regions[1]);
        self.copy(&op.operands, &condition.args, active)?;
        let mut here = active.to_vec();
        let mut round = 0;
        while !here.is_empty() {
            self.spend(here.len())?;
            self.region(condition, &here)?;
            let (on, gone): (Vec<u32>, Vec<u32>) =
                here.iter().partition(|thread| self.get(condition.yields[0], **thread) != 0);
            here = on;
            self.looped(op, gone.into_iter(), round);
            round += 1;
            if !here.is_empty() {
                self.region(body, &here)?;
                self.copy(&body.yields, &condition.args, &here)?;
            }
        }
        self.copy(&condition.args, &op.results, active)
    }
}
